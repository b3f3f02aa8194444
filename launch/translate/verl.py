"""verl's `verl.trainer.main_ppo`, read at commit b178a3cd (January 2026): overrides of algorithm, actor and critic."""

from .program import Argument, Program, fixed, lost, maps, missing, moot, refused
from .reading import count, finite
from .verl_rules import (
    ACTOR,
    CORRECTION,
    KL_ESTIMATORS,
    KL_LOSSES,
    MEGATRON,
    RULES,
    estimator,
    is_known_config,
    is_megatron,
    loss_mode,
    num_gpus,
)
from .verl_run import DATA, MODELS, REWARD, ROLLOUT_ARGUMENTS, TRAINER

ESTIMATORS = {
    "gae": "gae",
    "grpo": "grpo",
    "grpo_vectorized": "grpo",
    "reinforce_plus_plus": "reinforce_pp",
    "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
    "remax": "remax",
    "rloo": "rloo",
    "rloo_vectorized": "rloo",
    "opo": "opo",
}
LOSSES = {"vanilla": "clip", "gspo": "gspo", "cispo": "cispo", "gpg": "pg"}
AGGREGATIONS = {
    "token-mean": "token_mean",
    "seq-mean-token-mean": "sequence_mean",
    "seq-mean-token-sum-norm": "sequence_sum_constant",
}
SCHEDULES = {"constant": "constant", "cosine": "cosine", "linear": "linear"}
TOKENS = "forwards are packed by update.micro_batch_tokens, and the result does not depend on it"
OTHER_LOSSES = "only policy losses that are missing here read it"
SHARDED = "shards are DeepSpeed's, by update.zero_stage"

ALGORITHM = (
    maps("algorithm.adv_estimator", str, "gae", "advantage.estimator", choices=ESTIMATORS),
    maps("algorithm.norm_adv_by_std_in_grpo", bool, True, "advantage.estimator"),
    maps("algorithm.gamma", finite, 1.0, "advantage.gamma"),
    maps("algorithm.lam", finite, 1.0, "advantage.gae_lambda"),
    maps(
        "algorithm.use_kl_in_reward",
        bool,
        False,
        "advantage.kl_coef",
        note="there is one KL here: the one in the loss is taken, and the one in the reward is not carried over",
        when=lambda c: c["algorithm.use_kl_in_reward"] and c[f"{ACTOR}.use_kl_loss"],
    ),
    maps("algorithm.kl_penalty", str, "kl", "advantage.kl_estimator", choices=KL_ESTIMATORS),
    maps("algorithm.kl_ctrl.kl_coef", finite, 0.001, "advantage.kl_coef"),
    lost(
        "algorithm.kl_ctrl.type",
        str,
        "fixed",
        "verl's target is a KL per token and advantage.kl_target one per response, so kl_coef stays constant",
        choices=("fixed", "adaptive"),
    ),
    moot("algorithm.kl_ctrl.horizon", int, "only the adaptive KL control reads it"),
    moot("algorithm.kl_ctrl.target_kl", finite, "only the adaptive KL control reads it"),
    fixed(
        "group KL",
        "verl subtracts the KL of all tokens from a response's reward before it compares the group; here a token's "
        "advantage loses that token's KL",
        when=lambda c: (
            c["algorithm.use_kl_in_reward"]
            and not c[f"{ACTOR}.use_kl_loss"]
            and estimator(c) not in ("gae", "reinforce_plus_plus")
        ),
    ),
    fixed(
        "KL bound",
        "verl bounds k3 by 10; here its exponent alone is bounded, by 20",
        when=lambda c: c[f"{ACTOR}.use_kl_loss"] and c[f"{ACTOR}.kl_loss_type"] in ("low_var_kl", "k3"),
    ),
    maps(
        f"{CORRECTION}.rollout_is",
        str,
        None,
        "update.correction",
        choices={"token": "tis", "sequence": "none"},
        note="one importance weight per sequence is missing here; log-probs are not corrected",
        when=lambda c: c[f"{CORRECTION}.rollout_is"] == "sequence",
    ),
    maps(f"{CORRECTION}.rollout_is_threshold", finite, 2.0, "update.correction_low", "update.correction_high"),
    maps(
        f"{CORRECTION}.rollout_rs",
        str,
        None,
        "update.correction",
        choices={"seq_mean_k1": "sequence_mask", "token_k1": "icepop"},
        note="what is not rejected has its importance weight here; in verl only with rollout_is",
    ),
    maps(f"{CORRECTION}.rollout_rs_threshold", str, None, "update.correction_low", "update.correction_high"),
    lost(f"{CORRECTION}.rollout_is_batch_normalize", bool, False, "importance weights are never normalised"),
    maps(f"{CORRECTION}.bypass_mode", bool, False, "update.old_logprobs"),
    lost(
        f"{CORRECTION}.loss_type",
        str,
        "ppo_clip",
        "the loss of rollout.old_logprobs = rollout is update.policy_loss; cispo without bounds comes closest",
        choices=("ppo_clip", "reinforce"),
    ),
    maps(
        "algorithm.filter_groups.enable",
        bool,
        False,
        "rollout.dynamic_filtering_reward_range",
        note="verl drops groups whose metric is the same in all responses; here groups whose mean score is 0 or 1",
    ),
    moot("algorithm.filter_groups.metric", str, "the score of a response counts"),
    maps("algorithm.filter_groups.max_num_gen_batches", int, 0, "rollout.dynamic_filtering_max_retries"),
    lost("algorithm.use_pf_ppo", bool, False, "responses are not drawn again by their scores (PF-PPO)"),
    moot("algorithm.pf_ppo.*", str, "only PF-PPO reads it", num_values=None),
)

LOSS = (
    maps(f"{ACTOR}.policy_loss.loss_mode", str, "vanilla", "update.policy_loss", choices=LOSSES),
    moot(f"{ACTOR}.policy_loss.*", str, OTHER_LOSSES, num_values=None),
    moot(f"{ACTOR}.tau_pos", finite, OTHER_LOSSES),
    moot(f"{ACTOR}.tau_neg", finite, OTHER_LOSSES),
    maps(
        f"{ACTOR}.clip_ratio",
        finite,
        0.2,
        "update.clip_low",
        "update.clip_high",
        note="verl reads it only where clip_ratio_low or clip_ratio_high is null, and so does the translation",
        when=lambda c: f"{ACTOR}.clip_ratio" in c.given,
    ),
    maps(f"{ACTOR}.clip_ratio_low", finite, None, "update.clip_low"),
    maps(f"{ACTOR}.clip_ratio_high", finite, None, "update.clip_high"),
    maps(f"{ACTOR}.clip_ratio_c", finite, 3.0, "update.dual_clip"),
    maps(
        f"{ACTOR}.loss_agg_mode",
        str,
        "token-mean",
        "update.aggregation",
        choices=AGGREGATIONS,
        note="verl divides the sum by the length alone, not by the number of responses",
        when=lambda c: c[f"{ACTOR}.loss_agg_mode"] == "seq-mean-token-sum-norm",
    ),
    lost(f"{ACTOR}.loss_scale_factor", finite, None, "the constant is rollout.max_response_tokens"),
    fixed(
        "gspo loss",
        "verl averages the policy loss alone over sequences; here value loss and KL are, too",
        when=lambda c: loss_mode(c) == "gspo",
    ),
    maps(f"{ACTOR}.entropy_coeff", finite, 0.0, "update.entropy_coef"),
    maps(f"{ACTOR}.use_kl_loss", bool, False, "advantage.kl_in", "advantage.kl_coef"),
    maps(f"{ACTOR}.kl_loss_coef", finite, 0.001, "advantage.kl_coef"),
    maps(
        f"{ACTOR}.kl_loss_type",
        str,
        "low_var_kl",
        "advantage.kl_estimator",
        choices=KL_LOSSES,
        note="the value in the metrics is k2's, as is the gradient in verl",
        when=lambda c: c[f"{ACTOR}.kl_loss_type"].endswith("+"),
    ),
    maps(f"{ACTOR}.ppo_mini_batch_size", count, 256, "update.mini_batch_size"),
    maps(f"{ACTOR}.ppo_epochs", count, 1, "update.num_epochs"),
    maps(f"{ACTOR}.ppo_micro_batch_size_per_gpu", count, None, "update.micro_batch_tokens"),
    maps(f"{ACTOR}.ppo_micro_batch_size", count, None, "update.micro_batch_tokens"),
    maps(f"{ACTOR}.use_dynamic_bsz", bool, False, "update.micro_batch_tokens"),
    maps(f"{ACTOR}.ppo_max_token_len_per_gpu", count, 16384, "update.micro_batch_tokens"),
    maps(f"{ACTOR}.grad_clip {ACTOR}.optim.clip_grad", finite, 1.0, "update.actor.max_grad_norm"),
)


def _optimizer(role: str, prefix: str, lr: float) -> tuple[Argument, ...]:
    """Return the arguments of an optimizer, whose defaults are FSDP's."""
    return (
        maps(f"{prefix}.lr", finite, lr, f"update.{role}.lr"),
        maps(f"{prefix}.betas", finite, [0.9, 0.999], f"update.{role}.betas", num_values=2),
        maps(f"{prefix}.weight_decay", finite, 0.01, f"update.{role}.weight_decay"),
        maps(f"{prefix}.lr_warmup_steps", int, -1, f"update.{role}.warmup_steps"),
        maps(f"{prefix}.lr_warmup_steps_ratio", finite, 0.0, f"update.{role}.warmup_steps"),
        maps(
            f"{prefix}.lr_scheduler_type {prefix}.warmup_style {prefix}.lr_decay_style",
            str,
            "constant",
            f"update.{role}.schedule",
            f"update.{role}.min_lr_ratio",
            choices=SCHEDULES,
        ),
        maps(f"{prefix}.min_lr_ratio", finite, 0.0, f"update.{role}.min_lr_ratio"),
        maps(f"{prefix}.min_lr", finite, None, f"update.{role}.min_lr_ratio"),
        lost(f"{prefix}.optimizer", str, "AdamW", "AdamW is the only optimizer", choices=("AdamW", "adam")),
        maps(
            f"{prefix}.override_optimizer_config.optimizer_cpu_offload",
            bool,
            False,
            f"update.{role}.kind",
        ),
        lost(f"{prefix}.override_optimizer_config.*", str, None, "AdamW has the settings of update", num_values=None),
        lost(f"{prefix}.num_cycles", finite, 0.5, "the cosine ends after half a cycle"),
        moot(f"{prefix}.total_training_steps", int, "schedules span run.num_steps"),
        moot(f"{prefix}.optimizer_impl", str, "AdamW is the only optimizer"),
        lost(f"{prefix}.lr_warmup_init", finite, 0.0, "the warm-up starts at 0"),
        lost(f"{prefix}.lr_decay_steps", int, None, "the schedule spans the run"),
        lost(f"{prefix}.weight_decay_incr_style", str, "constant", "weight_decay is constant"),
        moot(f"{prefix}.lr_wsd_decay_style", str, "only a schedule that is missing here reads it"),
        moot(f"{prefix}.lr_wsd_decay_steps", int, "only a schedule that is missing here reads it"),
        moot(f"{prefix}.use_checkpoint_opt_param_scheduler", bool, "the schedule follows the settings"),
    )


OPTIMIZERS = (
    *_optimizer("actor", f"{ACTOR}.optim", 1e-6),
    *_optimizer("critic", "critic.optim", 1e-5),
    fixed("weight decay", "verl decays biases and norms, too; here they have none"),
)

CRITIC = (
    maps("critic.model.path", str, "~/models/deepseek-llm-7b-chat", "models.critic"),
    fixed(
        "value head",
        "verl starts at random values if critic.model.path has no value head; here it starts at 0",
        when=lambda c: estimator(c) == "gae",
    ),
    maps("critic.cliprange_value", finite, 0.5, "update.value_clip"),
    maps("critic.grad_clip critic.optim.clip_grad", finite, 1.0, "update.critic.max_grad_norm"),
    lost("critic.ppo_epochs", count, None, "the critic has the actor's update.num_epochs"),
    lost("critic.ppo_mini_batch_size", count, None, "the critic has the actor's update.mini_batch_size"),
    lost("critic.loss_agg_mode", str, None, "the critic has the actor's update.aggregation"),
    lost("critic.model.lora_rank", count, None, "models.lora holds for actor and critic"),
    moot("critic.*", str, "the critic is sharded, packed and moved as the actor", num_values=None),
)

PARALLEL = (
    maps(
        f"{ACTOR}.strategy {ACTOR}.fsdp_config.strategy",
        str,
        "fsdp",
        "update.zero_stage",
        choices={"fsdp": 3, "fsdp2": 3, "megatron": 2},
    ),
    maps(f"{ACTOR}.fsdp_config.reshard_after_forward", bool, True, "update.zero_stage"),
    fixed("shards", "FSDP's full shards become ZeRO 3", when=lambda c: not is_megatron(c)),
    fixed("shards of Megatron", "its distributed optimizer becomes ZeRO 2", when=is_megatron),
    maps(f"{ACTOR}.fsdp_config.param_offload", bool, False, "memory.swap"),
    maps(f"{ACTOR}.fsdp_config.optimizer_offload", bool, False, "memory.swap"),
    maps(f"{ACTOR}.fsdp_config.offload_policy", bool, False, "update.actor.kind", "update.critic.kind"),
    maps(f"{ACTOR}.ulysses_sequence_parallel_size", count, 1, "update.sequence_parallel_size"),
    missing(f"{ACTOR}.fsdp_config.fsdp_size", int, -1, "shards span all ranks"),
    lost(
        f"{ACTOR}.fsdp_config.model_dtype",
        str,
        "fp32",
        "weights have a float32 master always",
        choices=("fp32", "float32", "bf16", "bfloat16"),
    ),
    maps(f"{ACTOR}.fsdp_config.full_determinism", bool, False, "run.deterministic"),
    missing(f"{ACTOR}.fsdp_config.*", str, None, SHARDED, num_values=None),
    maps(f"{MEGATRON}.tensor_model_parallel_size", count, 1, "update.tensor_parallel_size"),
    maps(
        f"{MEGATRON}.context_parallel_size",
        count,
        1,
        "update.sequence_parallel_size",
        note="with tensor parallelism there is no sequence parallelism here",
        when=lambda c: c[f"{MEGATRON}.context_parallel_size"] > 1 and c[f"{MEGATRON}.tensor_model_parallel_size"] > 1,
    ),
    missing(
        f"{MEGATRON}.pipeline_model_parallel_size",
        count,
        1,
        "there are no pipeline stages; update.zero_stage = 3 or update.tensor_parallel_size splits the model",
    ),
    refused(f"{MEGATRON}.expert_model_parallel_size", count, 1, "there is no expert parallelism"),
    missing(f"{MEGATRON}.*", str, None, "Megatron is missing here; DeepSpeed trains the models", num_values=None),
    missing(
        "actor_rollout_ref.ref.*",
        str,
        None,
        "the reference is sharded as the actor, packed by update.micro_batch_tokens and moved by memory.swap",
        num_values=None,
    ),
    missing(f"{ACTOR}.use_torch_compile", bool, True, "training is not compiled"),
    missing(f"{ACTOR}.use_prefix_grouper", bool, False, "a group's prompt is computed for each of its responses"),
    moot(f"{ACTOR}.entropy_checkpointing", bool, TOKENS),
    moot(f"{ACTOR}.entropy_from_logits_with_chunking", bool, TOKENS),
    moot(f"{ACTOR}.calculate_entropy", bool, "the entropy is always a metric"),
    lost(f"{ACTOR}.shuffle", bool, False, "mini-batches have the order of the rollout"),
    moot(f"{ACTOR}.rollout_n", int, "it is rollout.group_size"),
    moot(f"{ACTOR}.load_weight", bool, "models are always loaded"),
    moot(f"{ACTOR}.calculate_sum_pi_squared", bool, OTHER_LOSSES),
    moot(f"{ACTOR}.sum_pi_squared_checkpointing", bool, OTHER_LOSSES),
    moot(f"{ACTOR}.data_loader_seed", int, "mini-batches have the order of the rollout"),
    moot(f"{ACTOR}.use_remove_padding", bool, "sequences are always packed"),
    moot(f"{ACTOR}.use_fused_kernels", bool, "models.fused_layers = auto takes Liger where it is installed"),
    moot(f"{ACTOR}.freeze_vision_tower", bool, "models read text only"),
    maps(
        f"{ACTOR}.router_replay.mode",
        str,
        "disabled",
        "rollout.routing_replay",
        choices={"disabled": False, "R3": True},
    ),
    moot(f"{ACTOR}.router_replay.*", str, "choices of experts are not written to files", num_values=None),
    missing(f"{ACTOR}.profiler.*", str, None, "run.profile_steps profiles whole steps", num_values=None),
    maps(
        f"{ACTOR}.checkpoint.save_contents {ACTOR}.checkpoint.contents",
        str,
        None,
        "checkpoint.export_every_steps",
        "checkpoint.export_keep_last",
        num_values=None,
    ),
    maps(
        "critic.checkpoint.save_contents critic.checkpoint.contents",
        str,
        None,
        "checkpoint.export_critic",
        num_values=None,
    ),
    missing(
        f"{ACTOR}.checkpoint.*", str, None, "checkpoints hold the whole state, and export/ the model", num_values=None
    ),
    moot("actor_rollout_ref.nccl_timeout", int, "run.stall_timeout_s limits every wait"),
    moot("actor_rollout_ref.hybrid_engine", bool, "training and rollout always share the GPUs"),
    lost(
        "--config-name",
        str,
        None,
        "the settings of this file are not read, only those of the command line",
        when=lambda c: c["--config-name"] is not None and not is_known_config(c),
    ),
    moot("--config-path", str, "files of settings are not read"),
)

PROGRAM = Program(
    title="verl's main_ppo",
    names=("verl.trainer.main_ppo", "main_ppo.py", "recipe.dapo.main_dapo"),
    arguments=MODELS + DATA + ROLLOUT_ARGUMENTS + REWARD + ALGORITHM + LOSS + OPTIMIZERS + CRITIC + PARALLEL + TRAINER,
    rules=RULES,
    syntax="overrides",
    num_gpus=num_gpus,
)
