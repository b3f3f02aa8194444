"""Rules for settings that depend on several of TRL's arguments."""

import json
import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from hybrid_rl.config import ConfigError, RunConfig, check

from .program import KEEP_DEFAULT, Command
from .trackers import known

GPUS_PER_NODE = 8
OVERLONG = "get_soft_overlong_punishment"
REWARD_FUNCTIONS = {
    "accuracy_reward": "math",
    "reasoning_accuracy_reward": "math",
    "think_format_reward": "think_format",
}
UNBOUNDED = 1e9
"""Upper bound of an importance weight that has none in TRL."""


def num_processes(c: Command) -> int | None:
    """Return the number of processes; None if the command line does not give it."""
    return c["num_processes"] or c.num_processes


def num_gpus(c: Command) -> tuple[int, int] | None:
    """Return GPUs per node and nodes, one GPU per process."""
    processes = num_processes(c)
    if processes is None:
        return None
    nodes = -(-processes // GPUS_PER_NODE)
    return -(-processes // nodes), nodes


def per_optimizer_step(c: Command) -> int:
    """Return the responses of an optimizer step in TRL."""
    return c["per_device_train_batch_size"] * (num_processes(c) or 1) * c["gradient_accumulation_steps"]


def _per_generation(c: Command) -> int:
    steps = c["steps_per_generation"] or c["gradient_accumulation_steps"]
    return c["generation_batch_size"] or c["per_device_train_batch_size"] * (num_processes(c) or 1) * steps


def rollout_batch_size(c: Command) -> int:
    """Return the prompts of a step: those of a generation, or of an optimizer step that has several generations.

    Raises:
        ConfigError: TRL refuses the batch, too, because it would have parts of groups.
    """
    responses = max(_per_generation(c), per_optimizer_step(c))
    check(
        responses % c["num_generations"] == 0,
        f"--num_generations {c['num_generations']}: must divide the {responses} responses of a generation",
    )
    return responses // c["num_generations"]


def mini_batch_size(c: Command) -> int:
    """Return the largest mini-batch that divides the responses of a step and does not exceed TRL's."""
    responses = rollout_batch_size(c) * c["num_generations"]
    return max(n for n in range(1, responses + 1) if responses % n == 0 and n <= per_optimizer_step(c))


def _updates_per_step(c: Command) -> int:
    return rollout_batch_size(c) * c["num_generations"] // mini_batch_size(c) * c["num_iterations"]


def _in_steps(c: Command, updates: float) -> int:
    """Return steps of the loop for a number of optimizer steps, at least one."""
    return max(1, math.ceil(updates / _updates_per_step(c)))


def _save_steps(c: Command) -> int:
    return _in_steps(c, c["save_steps"]) if c["save_strategy"] == "steps" else 0


def _num_steps(c: Command) -> Any:
    return _in_steps(c, c["max_steps"]) if c["max_steps"] > 0 else KEEP_DEFAULT


def _warmup_steps(c: Command) -> int:
    if c["lr_scheduler_type"] == "constant":
        return 0
    steps = c["warmup_ratio"] if c["warmup_ratio"] is not None else c["warmup_steps"]
    num_steps = RunConfig().num_steps if _num_steps(c) is KEEP_DEFAULT else _num_steps(c)
    return math.ceil(steps * num_steps * _updates_per_step(c)) if steps < 1 else int(steps)


def _min_lr_ratio(c: Command) -> float:
    """Return the last learning rate, as a fraction of the peak.

    Raises:
        ConfigError: the arguments of the schedule are no JSON object.
    """
    text = c["lr_scheduler_kwargs"]
    try:
        options = json.loads(text.replace("'", '"')) if text else {}
        ratio = options.get("min_lr_rate", options.get("min_lr", 0.0) / (c["learning_rate"] or 1.0))
        return float(ratio) if c["lr_scheduler_type"].endswith("with_min_lr") else 0.0
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(f"--lr_scheduler_kwargs {text}: must be a JSON object with min_lr_rate or min_lr") from None


def _prompt_tokens(c: Command) -> Any:
    if c["max_prompt_length"]:
        return c["max_prompt_length"]
    length = c["vllm_max_model_length"]
    return max(1, length - c["max_completion_length"]) if length else KEEP_DEFAULT


def _sequence_tokens(c: Command) -> int:
    prompt = _prompt_tokens(c)
    return (512 if prompt is KEEP_DEFAULT else prompt) + c["max_completion_length"]


def has_evaluation(c: Command) -> bool:
    """Return whether the run is evaluated."""
    return c["eval_strategy"] != "no"


def _eval_every_steps(c: Command) -> Any:
    if not has_evaluation(c):
        return KEEP_DEFAULT
    return _in_steps(c, c["eval_steps"] or c["logging_steps"]) if c["eval_strategy"] == "steps" else KEEP_DEFAULT


def _path(c: Command) -> str:
    config = c["dataset_config"]
    return f"{c['dataset_name']}:{config}" if config and c["dataset_name"] else c["dataset_name"]


def functions(c: Command) -> list[str]:
    """Return the rule functions, of which a dotted path becomes a file.

    Raises:
        ConfigError: TRL has no such function.
    """
    found = []
    for name in c["reward_funcs"] or []:
        module, dot, function = name.rpartition(".")
        check(
            name in REWARD_FUNCTIONS or name == OVERLONG or bool(dot),
            f"--reward_funcs {name}: has no counterpart here, only {', '.join(REWARD_FUNCTIONS)} and dotted paths",
        )
        if name != OVERLONG:
            found.append(REWARD_FUNCTIONS.get(name) or f"{module.replace('.', '/')}.py:{function}")
    return found


def _reads_solution(c: Command) -> bool:
    """Return whether a function of TRL reads the column `solution`; functions of files read columns by their names."""
    return any(name in REWARD_FUNCTIONS for name in c["reward_funcs"] or [])


def _weights(c: Command) -> tuple[float, list[float] | None, float]:
    """Return the weights of reward model, rule functions and overlong penalty.

    Raises:
        ConfigError: there is not one weight per reward.
    """
    names = c["reward_funcs"] or []
    sources = ([None] if c["reward_model_name_or_path"] else []) + names
    weights = c["reward_weights"]
    if weights is None:
        return 1.0, None, 1.0
    check(
        len(weights) == len(sources),
        f"--reward_weights has {len(weights)} values for {len(sources)} rewards: one each",
    )
    of_source = dict(zip(sources, weights, strict=True))
    rules = [weight for name, weight in zip(sources, weights, strict=True) if name not in (None, OVERLONG)]
    return of_source.get(None, 1.0), rules or None, of_source.get(OVERLONG, 1.0)


def is_corrected(c: Command) -> bool:
    """Return whether log-probs of engine and trainer are corrected."""
    return c["use_vllm"] and c["vllm_importance_sampling_correction"]


def _correction(c: Command) -> str:
    modes = {"token_truncate": "tis", "token_mask": "icepop", "sequence_mask": "sequence_mask"}
    return modes[c["vllm_importance_sampling_mode"]] if is_corrected(c) else "none"


def _bound(c: Command, name: str, otherwise: float) -> Any:
    value = c[f"vllm_importance_sampling_{name}"]
    return (otherwise if value is None else value) if is_corrected(c) else KEEP_DEFAULT


def _policy_loss(c: Command) -> str:
    if c["loss_type"] == "cispo":
        return "cispo"
    return "gspo" if c["importance_sampling_level"] == "sequence" else "clip"


def _clip_high(c: Command) -> float:
    bound = c["epsilon"] if c["epsilon_high"] is None else c["epsilon_high"]
    return max(0.0, bound - 1) if c["loss_type"] == "cispo" else bound


def _aggregation(c: Command) -> str:
    return {"grpo": "sequence_mean", "dr_grpo": "sequence_sum_constant"}.get(c["loss_type"], "token_mean")


def _dtype(c: Command) -> str:
    is_float32 = c["bf16"] is False and not c["fp16"]
    return "float32" if is_float32 else "auto"


def _lora(c: Command, value: Any) -> Any:
    return value if c["use_peft"] else KEEP_DEFAULT


def _reference(c: Command, value: Any) -> Any:
    return value if c["sync_ref_model"] else KEEP_DEFAULT


RULES: Mapping[str, Callable[[Command], Any]] = {
    "run.name": lambda c: PurePath(c["output_dir"]).name,
    "run.dir": lambda c: str(PurePath(c["output_dir"]).parent),
    "run.num_steps": _num_steps,
    "run.eval_every_steps": _eval_every_steps,
    "run.eval_samples": lambda c: (
        c["num_generations_eval"] or c["num_generations"] if has_evaluation(c) else KEEP_DEFAULT
    ),
    "models.dtype": _dtype,
    "models.lora.rank": lambda c: _lora(c, c["lora_r"]),
    "models.lora.alpha": lambda c: _lora(c, c["lora_alpha"]),
    "models.lora.rslora": lambda c: _lora(c, c["use_rslora"]),
    "models.lora.target_modules": lambda c: (
        KEEP_DEFAULT if c["lora_target_modules"] in (None, ["all-linear"]) else _lora(c, c["lora_target_modules"])
    ),
    "models.reference_sync_steps": lambda c: _reference(c, _in_steps(c, c["ref_model_sync_steps"])),
    "models.reference_mixup_alpha": lambda c: _reference(c, c["ref_model_mixup_alpha"]),
    "prompts.path": _path,
    "prompts.eval_path": lambda c: _path(c) if has_evaluation(c) else None,
    "prompts.split": lambda c: KEEP_DEFAULT if c["dataset_train_split"] == "train" else c["dataset_train_split"],
    "prompts.eval_split": lambda c: (
        c["dataset_test_split"] if has_evaluation(c) and c["dataset_test_split"] != "test" else KEEP_DEFAULT
    ),
    "prompts.answer_column": lambda c: "solution" if _reads_solution(c) else None,
    "prompts.max_prompt_tokens": _prompt_tokens,
    "prompts.overlong_prompts": lambda c: "drop",
    "rollout.rollout_batch_size": rollout_batch_size,
    "rollout.kv_cache_memory_bytes": lambda c: None,
    "environment.max_turns": lambda c: (
        KEEP_DEFAULT if c["max_tool_calling_iterations"] is None else c["max_tool_calling_iterations"] + 1
    ),
    "reward.functions": functions,
    "reward.weights": lambda c: _weights(c)[1],
    "reward.model_weight": lambda c: _weights(c)[0],
    "reward.overlong_buffer": lambda c: 256 if OVERLONG in (c["reward_funcs"] or []) else 0,
    "reward.overlong_penalty": lambda c: _weights(c)[2],
    "advantage.estimator": lambda c: {"group": "grpo", "True": "grpo"}.get(c["scale_rewards"], "dr_grpo"),
    "advantage.kl_in": lambda c: "loss" if c["beta"] else KEEP_DEFAULT,
    "advantage.kl_estimator": lambda c: "k3" if c["beta"] else KEEP_DEFAULT,
    "advantage.kl_unbiased": lambda c: c["use_bias_correction_kl"] and c["beta"] != 0,
    "update.mini_batch_size": mini_batch_size,
    "update.micro_batch_tokens": lambda c: c["per_device_train_batch_size"] * _sequence_tokens(c),
    "update.policy_loss": _policy_loss,
    "update.clip_low": lambda c: 1.0 if c["loss_type"] == "cispo" else c["epsilon"],
    "update.clip_high": _clip_high,
    "update.aggregation": _aggregation,
    "update.router_aux_loss_coef": lambda c: (
        c["router_aux_loss_coef"] if "router_aux_loss_coef" in c.given else KEEP_DEFAULT  # for a mixture of experts
    ),
    "update.correction": _correction,
    "update.correction_low": lambda c: _bound(c, "clip_min", 0.0),
    "update.correction_high": lambda c: _bound(c, "clip_max", UNBOUNDED),
    "update.actor.betas": lambda c: [c["adam_beta1"], c["adam_beta2"]],
    "update.actor.warmup_steps": _warmup_steps,
    "update.actor.min_lr_ratio": _min_lr_ratio,
    "checkpoint.every_steps": lambda c: 0 if c["save_only_model"] else _save_steps(c),
    "checkpoint.export_every_steps": lambda c: _save_steps(c) if c["save_only_model"] else 0,
    "checkpoint.export_keep_last": lambda c: (
        c["save_total_limit"] or KEEP_DEFAULT if c["save_only_model"] else KEEP_DEFAULT
    ),
    "run.trackers": lambda c: (
        KEEP_DEFAULT if c["report_to"] is None or "all" in c["report_to"] else known(c["report_to"])
    ),
    "run.project": lambda c: c["project"],
    "checkpoint.keep_last": lambda c: c["save_total_limit"] or KEEP_DEFAULT,
}
"""Setting -> its value; every other setting has the value of the one argument that maps to it."""
