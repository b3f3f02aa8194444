"""Rules for settings that depend on several of verl's overrides."""

import re
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from hybrid_rl.config import BY_SOURCE, ConfigError, RunConfig

from .program import KEEP_DEFAULT, Command
from .trackers import known

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"
CORRECTION = "algorithm.rollout_correction"
MEGATRON = f"{ACTOR}.megatron"
MATHS = ("math", "dapo", "aime")


def estimator(c: Command) -> str:
    """Return verl's name of the advantage estimator."""
    return c["algorithm.adv_estimator"]


def loss_mode(c: Command) -> str:
    """Return verl's name of the policy loss."""
    return c[f"{ACTOR}.policy_loss.loss_mode"]


def has_model_reward(c: Command) -> bool:
    """Return whether a reward model scores the responses; rule functions then score evaluations alone."""
    return c["reward_model.enable"]


def is_known_config(c: Command) -> bool:
    """Return whether the file of settings is one of verl's own, whose defaults are known."""
    return (c["--config-name"] or "").removesuffix(".yaml") in ("ppo_trainer", "ppo_megatron_trainer")


def is_megatron(c: Command) -> bool:
    """Return whether Megatron trains the models, and not FSDP."""
    return (
        "megatron" in (c["--config-name"] or "")
        or c[f"{ACTOR}.strategy"] == "megatron"
        or any(".megatron." in name for name in c.given)
    )


def guessed_function(names: list[str]) -> str | None:
    """Return the rule function that the names of data files suggest: by_source for several; None if there is none."""
    found = {_function_of(name.lower()) for name in names}
    if found <= {None}:
        return None
    return found.pop() if len(found) == 1 else BY_SOURCE


def _function_of(name: str) -> str | None:
    if "gsm8k" in name:
        return "gsm8k"
    return "math" if any(word in name for word in MATHS) else None


def is_guessed(c: Command) -> bool:
    """Return whether a rule function is guessed by the names of the files that it scores."""
    names = c["data.val_files"] or [] if has_model_reward(c) else c["data.train_files"]
    return not c["custom_reward_function.path"] and guessed_function(names) is not None


def _function(c: Command, names: list[str]) -> str | None:
    path = c["custom_reward_function.path"]
    return f"{path}:{c['custom_reward_function.name']}" if path else guessed_function(names)


def _functions(c: Command) -> list[str]:
    """Return the rule functions of training: none beside a reward model, as in verl."""
    function = None if has_model_reward(c) else _function(c, c["data.train_files"])
    return [function] if function else []


def _eval_function(c: Command) -> str | None:
    is_needed = has_model_reward(c) and c["data.val_files"] and c["trainer.test_freq"] > 0
    return _function(c, c["data.val_files"]) if is_needed else None


def _held_out(files: list[str]) -> str | dict[str, str] | None:
    """Return the held-out file; of several a mapping, named by the file, or by its folder where it is only a split."""
    if len(files) < 2:
        return files[0] if files else None
    named: dict[str, str] = {}
    for file in files:
        path = PurePath(file)
        name = (
            path.parent.name if path.stem in ("test", "val", "validation", "train") and path.parent.name else path.stem
        )
        name = re.sub(r"[^A-Za-z0-9_.-]", "_", name).lstrip("_.-") or "set"
        named[name if name not in named else f"{name}-{len(named) + 1}"] = file
    return named


def _samples(c: Command, value: Any) -> Any:
    """Return a setting of sampled evaluations; without do_sample verl decodes greedily, whatever the others say."""
    return value if c[f"{ROLLOUT}.val_kwargs.do_sample"] else KEEP_DEFAULT


def num_gpus(c: Command) -> tuple[int, int]:
    """Return GPUs per node and nodes."""
    return c["trainer.n_gpus_per_node"], c["trainer.nnodes"]


def _exports(c: Command, model: str) -> bool:
    """Return whether a checkpoint holds a model as a Hugging Face folder."""
    return "hf_model" in (c[f"{model}.checkpoint.save_contents"] or [])


def _place(c: Command) -> PurePath:
    return PurePath(
        c["trainer.default_local_dir"]
        or PurePath("checkpoints", c["trainer.project_name"], c["trainer.experiment_name"])
    )


def _longest(c: Command) -> int:
    return c["data.max_prompt_length"] + c["data.max_response_length"]


def _micro_batch_tokens(c: Command) -> int:
    if c[f"{ACTOR}.use_dynamic_bsz"]:
        return max(_longest(c), c[f"{ACTOR}.ppo_max_token_len_per_gpu"] * _sequence_parallel_size(c))
    per_gpu = c[f"{ACTOR}.ppo_micro_batch_size_per_gpu"]
    total = c[f"{ACTOR}.ppo_micro_batch_size"]
    if per_gpu is None and total is not None:
        per_gpu = max(1, total // (c["trainer.n_gpus_per_node"] * c["trainer.nnodes"]))
    return _longest(c) * (per_gpu or 1)


def _updates_per_step(c: Command) -> int:
    batches = c["data.train_batch_size"] // c[f"{ACTOR}.ppo_mini_batch_size"]
    return max(1, batches) * c[f"{ACTOR}.ppo_epochs"]


def _num_steps(c: Command) -> Any:
    return c["trainer.total_training_steps"] or KEEP_DEFAULT


def _warmup_steps(c: Command, optimizer: str) -> int:
    """Return the optimizer steps of warm-up; verl counts steps of the loop."""
    steps = c[f"{optimizer}.lr_warmup_steps"]
    if steps < 0:
        num_steps = RunConfig().num_steps if _num_steps(c) is KEEP_DEFAULT else _num_steps(c)
        steps = int(c[f"{optimizer}.lr_warmup_steps_ratio"] * num_steps)
    return steps * _updates_per_step(c)


def _min_lr_ratio(c: Command, optimizer: str) -> float:
    if c[f"{optimizer}.lr_scheduler_type"] == "constant":
        return 0.0
    lowest = c[f"{optimizer}.min_lr"]
    return c[f"{optimizer}.min_lr_ratio"] if lowest is None else lowest / (c[f"{optimizer}.lr"] or 1.0)


def _zero_stage(c: Command) -> int:
    if is_megatron(c):
        return 2
    return 3 if c[f"{ACTOR}.fsdp_config.reshard_after_forward"] else 2


def _sequence_parallel_size(c: Command) -> int:
    if is_megatron(c):
        return c[f"{MEGATRON}.context_parallel_size"] if _tensor_parallel_size(c) == 1 else 1
    return c[f"{ACTOR}.ulysses_sequence_parallel_size"]


def _tensor_parallel_size(c: Command) -> int:
    return c[f"{MEGATRON}.tensor_model_parallel_size"] if is_megatron(c) else 1


def _kind(c: Command) -> str:
    on_host = (
        c[f"{ACTOR}.fsdp_config.offload_policy"] or c[f"{ACTOR}.optim.override_optimizer_config.optimizer_cpu_offload"]
    )
    return "cpu_adam" if on_host else "adamw"


def _estimator(c: Command) -> str:
    names = {
        "grpo": "grpo" if c["algorithm.norm_adv_by_std_in_grpo"] else "dr_grpo",
        "reinforce_plus_plus": "reinforce_pp",
        "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "rloo_vectorized": "rloo",
        "grpo_vectorized": "grpo",
    }
    return names.get(estimator(c), estimator(c))


def _kl_coef(c: Command) -> float:
    if c[f"{ACTOR}.use_kl_loss"]:
        return c[f"{ACTOR}.kl_loss_coef"]
    return c["algorithm.kl_ctrl.kl_coef"] if c["algorithm.use_kl_in_reward"] else 0.0


KL_ESTIMATORS = {"kl": "k1", "k1": "k1", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
KL_LOSSES = KL_ESTIMATORS | {f"{name}+": "k2" for name in KL_ESTIMATORS}
"""verl's KL with a plus has the gradient of k2."""


def _kl_estimator(c: Command) -> Any:
    if not _kl_coef(c):
        return KEEP_DEFAULT
    in_loss = c[f"{ACTOR}.use_kl_loss"]
    return KL_LOSSES[c[f"{ACTOR}.kl_loss_type"]] if in_loss else KL_ESTIMATORS[c["algorithm.kl_penalty"]]


def _clip(c: Command, side: str) -> float:
    """Return a bound of the ratio, for which verl reads clip_ratio only if the side's own bound is null."""
    name = f"{ACTOR}.clip_ratio_{side}"
    bound = c[name] if c[name] is not None else c[f"{ACTOR}.clip_ratio"] if name in c.given else 0.2
    return min(1.0, bound) if side == "low" else bound


def _aggregation(c: Command) -> str:
    names = {
        "token-mean": "token_mean",
        "seq-mean-token-mean": "sequence_mean",
        "seq-mean-token-sum-norm": "sequence_sum_constant",
    }
    return "sequence_mean" if loss_mode(c) == "gspo" else names[c[f"{ACTOR}.loss_agg_mode"]]


def _correction(c: Command) -> str:
    if c[f"{CORRECTION}.bypass_mode"]:
        return "none"
    masks = {"seq_mean_k1": "sequence_mask", "token_k1": "icepop"}
    weights = {"token": "tis"}
    return masks.get(c[f"{CORRECTION}.rollout_rs"]) or weights.get(c[f"{CORRECTION}.rollout_is"], "none")


def _bounds(c: Command) -> tuple[Any, Any]:
    """Return the bounds of the importance weight.

    Raises:
        ConfigError: the threshold is neither a number nor two with an underscore between them.
    """
    match _correction(c):
        case "none":
            return KEEP_DEFAULT, KEEP_DEFAULT
        case "tis":
            return 0.0, c[f"{CORRECTION}.rollout_is_threshold"]
    text = c[f"{CORRECTION}.rollout_rs_threshold"] or "2.0"
    found = re.fullmatch(r"(?:([\d.eE+-]+)_)?([\d.eE+-]+)", text)
    try:
        assert found is not None
        high = float(found[2])
        return float(found[1]) if found[1] else 1 / high, high
    except (AssertionError, ValueError, ZeroDivisionError):
        name = f"{CORRECTION}.rollout_rs_threshold"
        raise ConfigError(f"{name} {text}: must be a number, or two as in 0.5_2.0") from None


def _swap(c: Command) -> str:
    offloads = [c[f"{ACTOR}.fsdp_config.{kind}_offload"] for kind in ("param", "optimizer")]
    return "auto" if c[f"{ROLLOUT}.free_cache_engine"] or any(offloads) else "off"


def _lora_rank(c: Command) -> int:
    return c[f"{MODEL}.lora_rank"] or c[f"{MODEL}.lora.rank"]


def _lora_alpha(c: Command) -> Any:
    if not _lora_rank(c):
        return KEEP_DEFAULT
    return c[f"{MODEL}.lora_alpha"] if c[f"{MODEL}.lora_rank"] else c[f"{MODEL}.lora.alpha"]


def _lora_modules(c: Command) -> Any:
    modules = c[f"{MODEL}.target_modules"]
    return modules if _lora_rank(c) and modules != ["all-linear"] else KEEP_DEFAULT


def _overlong(c: Command, name: str) -> Any:
    settings = "reward_model.reward_kwargs.overlong_buffer_cfg"
    return c[f"{settings}.{name}"] if c[f"{settings}.enable"] else KEEP_DEFAULT


def _retries(c: Command) -> Any:
    batches = c["algorithm.filter_groups.max_num_gen_batches"]
    return batches - 1 if c["algorithm.filter_groups.enable"] and batches > 0 else KEEP_DEFAULT


RULES: Mapping[str, Callable[[Command], Any]] = {
    "run.name": lambda c: _place(c).name,
    "run.dir": lambda c: str(_place(c).parent),
    "run.num_steps": _num_steps,
    "run.seed": lambda c: KEEP_DEFAULT if c["data.seed"] is None else c["data.seed"],
    "run.eval_every_steps": lambda c: max(0, c["trainer.test_freq"]) if c["data.val_files"] else KEEP_DEFAULT,
    "run.eval_function": _eval_function,
    "run.eval_samples": lambda c: c[f"{ROLLOUT}.val_kwargs.n"] if c[f"{ROLLOUT}.val_kwargs.do_sample"] else 1,
    "run.eval_temperature": lambda c: _samples(c, c[f"{ROLLOUT}.val_kwargs.temperature"]),
    "run.eval_top_p": lambda c: _samples(c, c[f"{ROLLOUT}.val_kwargs.top_p"]),
    "models.reward": lambda c: c["reward_model.model.path"] if has_model_reward(c) else None,
    "models.lora.rank": _lora_rank,
    "models.lora.alpha": _lora_alpha,
    "models.lora.target_modules": _lora_modules,
    "prompts.path": lambda c: c["data.train_files"] if len(c["data.train_files"]) > 1 else c["data.train_files"][0],
    "prompts.eval_path": lambda c: _held_out(c["data.val_files"] or []),
    "prompts.answer_column": lambda c: (
        KEEP_DEFAULT if c["data.prompt_key"] == "prompt" else "reward_model.ground_truth"
    ),
    "prompts.max_samples": lambda c: c["data.train_max_samples"] if c["data.train_max_samples"] > 0 else None,
    "prompts.max_eval_samples": lambda c: c["data.val_max_samples"] if c["data.val_max_samples"] > 0 else KEEP_DEFAULT,
    "prompts.overlong_prompts": lambda c: (
        "error" if c["data.truncation"] == "error" and not c["data.filter_overlong_prompts"] else "drop"
    ),
    "rollout.dynamic_filtering_reward_range": lambda c: [0.0, 1.0] if c["algorithm.filter_groups.enable"] else None,
    "rollout.dynamic_filtering_max_retries": _retries,
    "rollout.kv_cache_memory_bytes": lambda c: None,
    "reward.functions": _functions,
    "reward.overlong_buffer": lambda c: _overlong(c, "len"),
    "reward.overlong_penalty": lambda c: _overlong(c, "penalty_factor"),
    "advantage.estimator": _estimator,
    "advantage.kl_coef": _kl_coef,
    "advantage.kl_in": lambda c: "loss" if c[f"{ACTOR}.use_kl_loss"] else "reward",
    "advantage.kl_estimator": _kl_estimator,
    "update.mini_batch_size": lambda c: c[f"{ACTOR}.ppo_mini_batch_size"] * c[f"{ROLLOUT}.n"],
    "update.micro_batch_tokens": _micro_batch_tokens,
    "update.clip_low": lambda c: _clip(c, "low"),
    "update.clip_high": lambda c: _clip(c, "high"),
    "update.dual_clip": lambda c: c[f"{ACTOR}.clip_ratio_c"] if loss_mode(c) == "vanilla" else None,
    "update.aggregation": _aggregation,
    "update.correction": _correction,
    "update.correction_low": lambda c: _bounds(c)[0],
    "update.correction_high": lambda c: _bounds(c)[1],
    "update.old_logprobs": lambda c: "rollout" if c[f"{CORRECTION}.bypass_mode"] else "trainer",
    "update.critic_warmup_steps": lambda c: c["trainer.critic_warmup"] if estimator(c) == "gae" else 0,
    "update.zero_stage": _zero_stage,
    "update.sequence_parallel_size": _sequence_parallel_size,
    "update.tensor_parallel_size": _tensor_parallel_size,
    "update.actor.kind": _kind,
    "update.actor.warmup_steps": lambda c: _warmup_steps(c, f"{ACTOR}.optim"),
    "update.actor.min_lr_ratio": lambda c: _min_lr_ratio(c, f"{ACTOR}.optim"),
    "update.critic.kind": _kind,
    "update.critic.warmup_steps": lambda c: _warmup_steps(c, "critic.optim"),
    "update.critic.min_lr_ratio": lambda c: _min_lr_ratio(c, "critic.optim"),
    "memory.swap": _swap,
    "checkpoint.every_steps": lambda c: max(0, c["trainer.save_freq"]),
    "checkpoint.keep_last": lambda c: c["trainer.max_actor_ckpt_to_keep"] or KEEP_DEFAULT,
    "checkpoint.export_every_steps": lambda c: max(0, c["trainer.save_freq"]) if _exports(c, ACTOR) else 0,
    "checkpoint.export_keep_last": lambda c: (
        c["trainer.max_actor_ckpt_to_keep"] or KEEP_DEFAULT if _exports(c, ACTOR) else KEEP_DEFAULT
    ),
    "checkpoint.export_critic": lambda c: _exports(c, "critic") and estimator(c) == "gae",
    "run.trackers": lambda c: KEEP_DEFAULT if c["trainer.logger"] is None else known(c["trainer.logger"]),
    "run.project": lambda c: (
        c["trainer.project_name"] if set(known(c["trainer.logger"] or [])) - {"tensorboard"} else None
    ),
}
"""Setting -> its value; every other setting has the value of the one override that maps to it."""
