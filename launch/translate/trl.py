"""TRL's `trl grpo`, read at commit f2cd5771 (July 2026): arguments of the algorithm, the optimizer and the engine."""

from .program import Command, Program, fixed, lost, maps, missing, moot, refused
from .reading import count, finite, optional
from .trl_rules import (
    OVERLONG,
    RULES,
    has_evaluation,
    is_corrected,
    mini_batch_size,
    num_gpus,
    num_processes,
    per_optimizer_step,
)
from .trl_run import ACCELERATE, DATA, MODELS, TRAINING_ARGUMENTS

SERVER = "the engine runs on the GPUs of training, as with vllm_mode colocate; there is no server"
ALL_TOKENS = "all tokens may be sampled, as log-probs assume"
ENTROPY = "the factor of the entropy bonus is constant"
OTHER_LOSSES = "only losses that are missing here read it"
LOSSES = {name: name for name in ("grpo", "dapo", "bnpo", "dr_grpo", "cispo")}
SCHEDULES = {
    "linear": "linear",
    "cosine": "cosine",
    "cosine_with_min_lr": "cosine",
    "cosine_warmup_with_min_lr": "cosine",
    "constant": "constant",
    "constant_with_warmup": "constant",
}


def _differs_in_batch(c: Command) -> bool:
    return mini_batch_size(c) != per_optimizer_step(c)


BATCHES = (
    maps(
        "per_device_train_batch_size",
        count,
        8,
        "rollout.rollout_batch_size",
        "update.mini_batch_size",
        "update.micro_batch_tokens",
        note="counted per process in TRL, over all ranks here",
        when=lambda c: (num_processes(c) or 1) > 1,
    ),
    maps(
        "gradient_accumulation_steps",
        count,
        1,
        "rollout.rollout_batch_size",
        "update.mini_batch_size",
        note="TRL's optimizer step spans generations; here it ends with the responses of a step, so that steps are "
        "smaller and more numerous",
        when=_differs_in_batch,
    ),
    maps("steps_per_generation", count, None, "rollout.rollout_batch_size"),
    maps("generation_batch_size", count, None, "rollout.rollout_batch_size"),
    fixed(
        "processes",
        "the command line does not give their number, so batches are those of one process; multiply "
        "rollout.rollout_batch_size and update.mini_batch_size by the number",
        when=lambda c: num_processes(c) is None,
    ),
    maps("num_generations", count, 8, "rollout.group_size"),
    maps("num_iterations", count, 1, "update.num_epochs"),
    maps(
        "max_steps",
        int,
        -1,
        "run.num_steps",
        note="TRL counts optimizer steps, here steps of the loop, each with one generation",
    ),
    moot("num_train_epochs", finite, "run.num_steps counts steps"),
    fixed(
        "run length",
        "TRL runs num_train_epochs passes over the data; set run.num_steps to num_train_epochs x rows / "
        "rollout_batch_size, and the warm-up accordingly",
        when=lambda c: c["max_steps"] <= 0,
    ),
)

ALGORITHM = (
    maps(
        "scale_rewards",
        str,
        "group",
        "advantage.estimator",
        choices={"group": "grpo", "True": "grpo", "none": "dr_grpo", "False": "dr_grpo"},
    ),
    fixed(
        "group std",
        "TRL adds 1e-4 to the group's standard deviation, here it is 1e-6",
        when=lambda c: c["scale_rewards"] in ("group", "True"),
    ),
    maps(
        "loss_type",
        str,
        "dapo",
        "update.aggregation",
        "update.policy_loss",
        choices=LOSSES,
        note="TRL divides by the tokens of a micro-batch, here of the mini-batch",
        when=lambda c: c["loss_type"] == "bnpo",
    ),
    maps(
        "importance_sampling_level",
        str,
        "token",
        "update.policy_loss",
        choices={"token": "clip", "sequence": "gspo"},
        note="in TRL a sequence has one ratio; here a token's gradient flows through its own log-prob",
        when=lambda c: c["importance_sampling_level"] == "sequence",
    ),
    maps("epsilon", finite, 0.2, "update.clip_low", "update.clip_high"),
    maps("epsilon_high", finite, None, "update.clip_high"),
    maps("delta", finite, None, "update.dual_clip"),
    maps("beta", finite, 0.0, "advantage.kl_coef", "advantage.kl_in", "advantage.kl_estimator"),
    maps("use_bias_correction_kl", bool, False, "advantage.kl_unbiased"),
    maps("mask_truncated_completions", bool, False, "update.mask_truncated"),
    maps("sync_ref_model", bool, False, "models.reference_sync_steps", "models.reference_mixup_alpha"),
    maps("ref_model_mixup_alpha", finite, 0.6, "models.reference_mixup_alpha"),
    maps("ref_model_sync_steps", count, 512, "models.reference_sync_steps"),
    maps("entropy_coef", finite, 0.0, "update.entropy_coef"),
    lost("use_adaptive_entropy", bool, False, ENTROPY),
    *(
        moot(f"entropy_{name}", finite, "only the adaptive entropy reads it")
        for name in ("coef_min", "coef_max", "coef_delta", "target")
    ),
    lost("top_entropy_quantile", finite, 1.0, "all tokens are trained, whatever their entropy"),
    lost("off_policy_mask_threshold", finite, None, "sequences are masked by update.correction alone"),
    refused(
        "multi_objective_aggregation",
        str,
        "sum_then_normalize",
        "rewards are always summed before they are normalised",
    ),
    *(
        moot(name, finite, OTHER_LOSSES)
        for name in (
            "sapo_temperature_neg",
            "sapo_temperature_pos",
            "vespo_k_pos",
            "vespo_lambda_pos",
            "vespo_k_neg",
            "vespo_lambda_neg",
        )
    ),
    maps(
        "router_aux_loss_coef",
        finite,
        0.001,
        "update.router_aux_loss_coef",
        note="transformers sums over the experts of a token, here is their mean: multiply by their number",
    ),
)

REWARDS = (
    maps(
        "reward_funcs",
        str,
        None,
        "reward.functions",
        "prompts.answer_column",
        num_values=None,
        note="a file works as it is, with all responses to a prompt per call, as reward.prompts_per_call says; "
        "trainer_state is not given",
        when=lambda c: any("." in name for name in c["reward_funcs"] or []),
    ),
    fixed(
        "accuracy",
        "TRL's rewards give nothing for an answer that cannot be parsed; here it is an error",
        when=lambda c: any(name.endswith("accuracy_reward") for name in c["reward_funcs"] or []),
    ),
    fixed(
        "overlong punishment",
        "TRL's begins at 1024 and ends at 1280 tokens; here it covers the last 256 of max_completion_length",
        "reward.overlong_buffer",
        when=lambda c: OVERLONG in (c["reward_funcs"] or []),
    ),
    maps(
        "reward_weights",
        finite,
        None,
        "reward.weights",
        "reward.model_weight",
        "reward.overlong_penalty",
        num_values=None,
    ),
    maps("reward_model_name_or_path", str, None, "models.reward"),
)

ENGINE = (
    maps("temperature", finite, 1.0, "rollout.temperature"),
    lost("top_p", finite, 1.0, ALL_TOKENS),
    lost("top_k", int, 0, ALL_TOKENS),
    lost("min_p", finite, None, ALL_TOKENS),
    lost("repetition_penalty", finite, 1.0, ALL_TOKENS),
    lost("generation_kwargs", str, None, ALL_TOKENS),
    lost("chat_template_kwargs", str, None, "the chat template has no arguments"),
    lost("vllm_structured_outputs_regex", str, None, ALL_TOKENS),
    maps(
        "max_tool_calling_iterations",
        count,
        None,
        "environment.max_turns",
        note="a turn more than TRL's rounds of calls, the answer; list the functions that the script gives the trainer "
        "as tools in environment.tools",
        when=lambda c: c["max_tool_calling_iterations"] is not None,
    ),
    maps("max_completion_length", count, 512, "rollout.max_response_tokens"),
    maps(
        "max_prompt_length",
        count,
        None,
        "prompts.max_prompt_tokens",
        note="TRL had it until 2025 and cut the prompt on its left; here a longer prompt is dropped and counted",
    ),
    fixed(
        "long prompts",
        "TRL takes prompts of any length; here one above prompts.max_prompt_tokens is dropped and counted",
        "prompts.overlong_prompts",
        when=lambda c: c["max_prompt_length"] is None,
    ),
    maps("vllm_max_model_length", count, None, "prompts.max_prompt_tokens"),
    maps(
        "use_vllm",
        bool,
        False,
        "update.correction",
        note="TRL generates with transformers then, here the engine is vLLM",
        when=lambda c: not c["use_vllm"],
    ),
    lost("vllm_mode", str, "colocate", SERVER, choices=("colocate", "server")),
    maps("vllm_gpu_memory_utilization", finite, 0.3, "rollout.gpu_memory_utilization", "rollout.kv_cache_memory_bytes"),
    maps("vllm_tensor_parallel_size", count, 1, "rollout.tensor_parallel_size"),
    moot("vllm_enable_sleep_mode", bool, "memory.swap moves what has no room"),
    lost("vllm_model_impl", str, "vllm", "the engine has vLLM's own models", choices=("vllm", "transformers")),
    *(
        moot(f"vllm_{name}", str, SERVER)
        for name in ("server_base_url", "server_host", "server_port", "server_timeout", "group_port")
    ),
    maps("vllm_importance_sampling_correction", bool, True, "update.correction"),
    maps(
        "vllm_importance_sampling_mode",
        str,
        "sequence_mask",
        "update.correction",
        choices={"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "sequence_mask"},
        note="TRL bounds the product of a sequence's ratios and weights its tokens by it; here their geometric mean is "
        "bounded, and a token has its own weight",
        when=lambda c: is_corrected(c) and c["vllm_importance_sampling_mode"] == "sequence_mask",
    ),
    maps(
        "vllm_importance_sampling_clip_max vllm_importance_sampling_cap",
        optional,
        3.0,
        "update.correction_high",
    ),
    maps("vllm_importance_sampling_clip_min", finite, None, "update.correction_low"),
    *(
        moot(name, str, "the engine is vLLM")
        for name in (
            "cache_implementation",
            "use_transformers_paged",
            "use_transformers_continuous_batching",
            "transformers_continuous_batching_config",
            "ds3_gather_for_generation",
            "pad_to_multiple_of",
        )
    ),
)

OPTIMIZER = (
    maps("learning_rate", finite, 1e-6, "update.actor.lr"),
    maps(
        "lr_scheduler_type",
        str,
        "linear",
        "update.actor.schedule",
        "update.actor.min_lr_ratio",
        choices=SCHEDULES,
    ),
    maps("lr_scheduler_kwargs", str, None, "update.actor.min_lr_ratio"),
    maps("warmup_steps", finite, 0.0, "update.actor.warmup_steps"),
    maps("warmup_ratio", finite, None, "update.actor.warmup_steps"),
    maps("adam_beta1", finite, 0.9, "update.actor.betas"),
    maps("adam_beta2", finite, 0.999, "update.actor.betas"),
    maps("adam_epsilon", finite, 1e-8, "update.actor.eps"),
    maps("weight_decay", finite, 0.0, "update.actor.weight_decay"),
    maps("max_grad_norm", finite, 1.0, "update.actor.max_grad_norm"),
    lost(
        "optim",
        str,
        "adamw_torch_fused",
        "AdamW with a float32 state is the only optimizer",
        when=lambda c: not c["optim"].startswith("adamw_torch"),
    ),
    lost("optim_args", str, None, "AdamW has the settings of update.actor"),
    lost("optim_target_modules", str, None, "AdamW trains all weights", num_values=None),
)

EVALUATION = (
    maps(
        "eval_strategy",
        str,
        "no",
        "prompts.eval_path",
        "run.eval_every_steps",
        choices={"no": 0, "steps": 1, "epoch": 1},
        note="an evaluation gives the share of correct responses; TRL's gives mean rewards and the loss",
        when=has_evaluation,
    ),
    maps("eval_steps", finite, None, "run.eval_every_steps"),
    maps("num_generations_eval", count, None, "run.eval_samples"),
    missing("eval_on_start", bool, False, "an evaluation always precedes step 1"),
    moot("eval_delay", finite, "evaluations start with step 1"),
    moot("per_device_eval_batch_size", int, "the engine gets all held-out prompts at once"),
    moot("eval_accumulation_steps", int, "the engine gets all held-out prompts at once"),
)

PROGRAM = Program(
    title="TRL's grpo",
    names=("trl grpo", "grpo.py"),
    arguments=(
        MODELS
        + DATA
        + BATCHES
        + ENGINE
        + REWARDS
        + ALGORITHM
        + OPTIMIZER
        + EVALUATION
        + TRAINING_ARGUMENTS
        + ACCELERATE
    ),
    rules=RULES,
    syntax="switches",
    num_gpus=num_gpus,
)
