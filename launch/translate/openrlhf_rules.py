"""Rules for settings that depend on several of OpenRLHF's arguments."""

import itertools
import math
from collections.abc import Callable, Mapping
from pathlib import PurePath
from typing import Any

from hybrid_rl.config import RunConfig, check

from .program import KEEP_DEFAULT, Command
from .trackers import known

GPUS_PER_NODE = 8
"""GPUs of a node where those of separate groups are added up."""


def _response_tokens(c: Command) -> int:
    if "generate_max_len" in c.given or "prompt_max_len" in c.given:
        return c["generate_max_len"]
    return c["rollout.max_new_tokens"] or c["data.max_len"] - c["data.max_len"] // 2


def _prompt_tokens(c: Command) -> int:
    if "generate_max_len" in c.given or "prompt_max_len" in c.given:
        return c["prompt_max_len"]
    return max(1, c["data.max_len"] - _response_tokens(c))


def _micro_batch_tokens(c: Command) -> int:
    longest = _prompt_tokens(c) + _response_tokens(c)
    if c["train.dynamic_batch_enable"]:
        return max(longest, c["train.max_tokens_per_gpu"] * c["ds.ring_attn_size"])
    return longest * c["train.micro_batch_size"]


def _num_steps(c: Command) -> Any:
    if "data.max_samples" not in c.given:
        return KEEP_DEFAULT
    return c["train.num_episodes"] * math.ceil(c["data.max_samples"] / c["rollout.batch_size"])


def _warmup_steps(c: Command, role: str) -> int:
    num_steps = RunConfig().num_steps if _num_steps(c) is KEEP_DEFAULT else _num_steps(c)
    responses = c["rollout.batch_size"] * c["rollout.n_samples_per_prompt"]
    updates = num_steps * responses * c["train.max_epochs"] // c["train.batch_size"]
    is_constant = c[f"{role}.lr_scheduler"] == "constant"
    return 0 if is_constant else math.ceil(c[f"{role}.lr_warmup_ratio"] * updates)


def _min_lr_ratio(c: Command, role: str) -> float:
    return c[f"{role}.min_lr_ratio"] if c[f"{role}.lr_scheduler"].endswith("with_min_lr") else 0.0


def has_agent(c: Command) -> bool:
    """Return whether an agent file answers the turns; it gives the rewards, too, and OpenRLHF asks nothing else."""
    return c["train.agent_func_path"] is not None


def is_function(c: Command) -> bool:
    """Return whether a Python file computes the reward."""
    return not has_agent(c) and (c["reward.remote_url"] or "").endswith(".py")


def is_remote(c: Command) -> bool:
    """Return whether no reward model of the run computes the reward."""
    return has_agent(c) or bool(c["reward.remote_url"])


def is_colocated(c: Command) -> bool:
    """Return whether vLLM shares its GPUs with training."""
    return c["train.colocate_all"]


def is_old(c: Command, name: str) -> bool:
    """Return whether a command in the flat spelling relies on an argument's default, which may have changed."""
    return name not in c.given and bool(c.given) and not any("." in spelling for spelling in c.given.values())


def num_gpus(c: Command) -> tuple[int, int] | None:
    """Return GPUs per node and nodes for as many GPUs as OpenRLHF's models and engines have together."""
    if not any(name.endswith((".num_nodes", ".num_gpus_per_node")) or name == "vllm.num_engines" for name in c.given):
        return None
    roles = ("actor", "ref", "critic", "reward")
    of_role = {role: (c[f"{role}.num_nodes"] or 1) * (c[f"{role}.num_gpus_per_node"] or 8) for role in roles}
    total = of_role["actor"]
    if not is_colocated(c) or c["train.async_enable"]:
        total += (c["vllm.num_engines"] or 0) * c["vllm.tensor_parallel_size"]
    if not is_colocated(c):
        has_critic, has_reward = estimator(c) == "gae", not is_remote(c)
        total += of_role["ref"] if has_kl(c) and not c["train.colocate_actor_ref"] else 0
        total += of_role["critic"] if has_critic else 0
        total += of_role["reward"] if has_reward and not (has_critic and c["train.colocate_critic_reward"]) else 0
    nodes = math.ceil(total / GPUS_PER_NODE)
    return math.ceil(total / nodes), nodes


def _swap(c: Command) -> str:
    all_stay = is_colocated(c) and not (c["ds.enable_sleep"] or c["vllm.enable_sleep"])
    return "off" if all_stay or c["ds.zero_stage"] == 0 else "auto"


def _reward_function(c: Command) -> str:
    return f"{c['reward.remote_url']}:reward_func"


def has_kl(c: Command) -> bool:
    """Return whether the run has a KL penalty."""
    return c["algo.kl.init_coef"] != 0


def estimator(c: Command) -> str:
    """Return OpenRLHF's name of the advantage estimator."""
    return c["algo.advantage.estimator"]


def _clip(c: Command, side: int) -> float:
    return c["actor.eps_clip"] if c["actor.eps_clip_low_high"] is None else c["actor.eps_clip_low_high"][side]


def _aggregation(c: Command) -> str:
    by_sequence = c["actor.policy_loss_type"] == "gspo" or c["actor.loss_agg_mode"] == "seq-mean-token-mean"
    return "sequence_mean" if by_sequence else "token_mean"


def is_corrected(c: Command) -> bool:
    """Return whether log-probs of engine and trainer are corrected, by the arguments of 0.11.2 or earlier ones."""
    return c["algo.advantage.is_correction_enable"] or c["algo.advantage.is_correction_level"] != "off"


def _correction(c: Command) -> str:
    kinds = {"tis": "tis", "icepop": "icepop", "seq-mask-tis": "sequence_mask"}
    match c["algo.advantage.is_correction_level"]:
        case "token":
            return "tis" if c["algo.advantage.is_correction_mode"] == "clip" else "icepop"
        case "seq":
            mode = c["algo.advantage.is_correction_mode"]
            check(mode == "mask", f"--algo.advantage.is_correction_mode {mode}: OpenRLHF only masks whole sequences")
            return "sequence_mask"
    return kinds[c["algo.advantage.is_correction_type"]] if is_corrected(c) else "none"


def _threshold(c: Command, side: int) -> Any:
    bounds = c["algo.advantage.is_correction_threshold"]
    if not is_corrected(c):
        return KEEP_DEFAULT
    return ([0.0, *bounds] if len(bounds) == 1 else bounds)[side]


def _deepspeed(c: Command) -> dict[str, Any] | Any:
    """Return what OpenRLHF writes into DeepSpeed's configuration for its flags."""
    zero: dict[str, Any] = {"overlap_comm": True} if c["ds.overlap_comm"] else {}
    if c["disable_trace_cache"]:
        names = ("stage3_prefetch_bucket_size", "stage3_max_live_parameters", "stage3_max_reuse_distance")
        zero |= dict.fromkeys(names, 0)
    return {"zero_optimization": zero} if zero else KEEP_DEFAULT


def _prompt_sets(c: Command) -> str | list[Any]:
    """Return the data set of the prompts; of several a list, with their probabilities as weights."""
    paths = c["data.prompt_dataset"].split(",")
    weights = c["data.prompt_probs"].split(",") if c["data.prompt_probs"] else []
    if len(paths) == 1:
        return paths[0]
    pairs = itertools.zip_longest(paths, map(float, weights))
    return [path if weight is None else {"path": path, "weight": weight} for path, weight in pairs]


def _eval(c: Command, value: Any) -> Any:
    return KEEP_DEFAULT if c["eval.dataset"] is None else value


def _is_hub_name(path: str | None) -> bool:
    """Return whether a data set is on the hub, where OpenRLHF evaluates its split `train` by default."""
    return path is not None and not PurePath(path).suffix and not path.startswith((".", "/", "~", "$"))


def _ema_decay(c: Command) -> float | None:
    return c["train.ema_beta"] if c["train.enable_ema"] else None


def _lora(c: Command, value: Any) -> Any:
    return value if c["ds.lora.rank"] else KEEP_DEFAULT


def _trackers(c: Command) -> Any:
    """Return the trackers that are on; without any, the default stays."""
    wanted = {"tensorboard": c["logger.tensorboard_dir"], "wandb": c["logger.wandb.key"]}
    return known(name for name, value in wanted.items() if value) or KEEP_DEFAULT


def _save_steps(c: Command) -> int:
    return max(0, c["ckpt.save_steps"])


RULES: Mapping[str, Callable[[Command], Any]] = {
    "run.name": lambda c: PurePath(c["ckpt.output_dir"]).name,
    "run.dir": lambda c: str(PurePath(c["ckpt.output_dir"]).parent),
    "run.num_steps": _num_steps,
    "run.trackers": _trackers,
    "run.project": lambda c: c["logger.wandb.project"] if c["logger.wandb.key"] else None,
    "run.eval_every_steps": lambda c: _eval(c, max(0, c["eval.steps"])),
    "run.eval_samples": lambda c: _eval(c, c["eval.n_samples_per_prompt"]),
    "run.eval_temperature": lambda c: _eval(c, c["eval.temperature"]),
    "run.eval_function": lambda c: _eval(c, _reward_function(c) if is_function(c) else KEEP_DEFAULT),
    "models.reward": lambda c: None if is_remote(c) else (c["reward.model_name_or_path"] or "").split(",")[0] or None,
    "models.critic": lambda c: c["critic.model_name_or_path"] if estimator(c) == "gae" else None,
    "models.ema_decay": _ema_decay,
    "models.lora.alpha": lambda c: _lora(c, c["ds.lora.alpha"]),
    "models.lora.target_modules": lambda c: (
        KEEP_DEFAULT if c["ds.lora.target_modules"] == ["all-linear"] else _lora(c, c["ds.lora.target_modules"])
    ),
    "prompts.path": _prompt_sets,
    "prompts.split": lambda c: KEEP_DEFAULT if c["data.prompt_split"] == "train" else c["data.prompt_split"],
    "prompts.eval_split": lambda c: (
        _eval(c, c["eval.split"]) if "eval.split" in c.given or _is_hub_name(c["eval.dataset"]) else KEEP_DEFAULT
    ),
    "prompts.max_samples": lambda c: c["data.max_samples"] if "data.max_samples" in c.given else None,
    "prompts.max_prompt_tokens": _prompt_tokens,
    "prompts.overlong_prompts": lambda c: "drop",
    "rollout.max_response_tokens": _response_tokens,
    "rollout.dynamic_filtering_reward_range": lambda c: (
        c["algo.dynamic_filtering_range"] if c["algo.dynamic_filtering_enable"] else None
    ),
    "rollout.kv_cache_memory_bytes": lambda c: None,
    "rollout.gpu_memory_utilization": lambda c: c["vllm.gpu_memory_utilization"] if is_colocated(c) else KEEP_DEFAULT,
    "environment.name": lambda c: "openrlhf" if has_agent(c) else KEEP_DEFAULT,
    "environment.arguments": lambda c: {"path": c["train.agent_func_path"]} if has_agent(c) else KEEP_DEFAULT,
    "environment.rewritten_history": lambda c: "keep" if has_agent(c) else KEEP_DEFAULT,  # it appends tokens
    "environment.max_turns": lambda c: _response_tokens(c) if has_agent(c) else KEEP_DEFAULT,  # no limit of turns
    "reward.functions": lambda c: [_reward_function(c)] if is_function(c) else [],
    "reward.remote_urls": lambda c: (
        c["reward.remote_url"].split(",") if is_remote(c) and not has_agent(c) and not is_function(c) else []
    ),
    "reward.clip": lambda c: max(map(abs, c["reward.clip_range"])),
    "reward.normalize": lambda c: c["reward.normalize_enable"] and not is_remote(c),
    "reward.overlong_buffer": lambda c: int(c["reward.overlong_buffer_len"] or 0),
    "advantage.kl_estimator": lambda c: "k3" if c["use_kl_estimator_k3"] else c["algo.kl.estimator"],
    "advantage.kl_unbiased": lambda c: c["algo.kl.unbiased_gradient"] and c["algo.kl.use_loss"],
    "update.micro_batch_tokens": _micro_batch_tokens,
    "update.clip_low": lambda c: _clip(c, 0),
    "update.clip_high": lambda c: _clip(c, 1),
    "update.aggregation": _aggregation,
    "update.correction": _correction,
    "update.correction_low": lambda c: _threshold(c, 0),
    "update.correction_high": lambda c: _threshold(c, 1),
    "update.entropy_coef": lambda c: c["actor.entropy_coef"] or 0.0,
    "update.critic_warmup_steps": lambda c: max(0, c["critic.freezing_steps"]) if estimator(c) == "gae" else 0,
    "update.actor.warmup_steps": lambda c: _warmup_steps(c, "actor"),
    "update.actor.min_lr_ratio": lambda c: _min_lr_ratio(c, "actor"),
    "update.critic.warmup_steps": lambda c: _warmup_steps(c, "critic"),
    "update.critic.min_lr_ratio": lambda c: _min_lr_ratio(c, "critic"),
    "update.actor.kind": lambda c: "cpu_adam" if c["ds.adam_offload"] else "adamw",
    "update.critic.kind": lambda c: "cpu_adam" if c["ds.adam_offload"] else "adamw",
    "update.deepspeed": _deepspeed,
    "memory.swap": _swap,
    "checkpoint.every_steps": lambda c: 0 if c["ckpt.disable_ds"] else _save_steps(c),
    "checkpoint.export_every_steps": lambda c: _save_steps(c) if c["ckpt.save_hf"] else 0,
    "checkpoint.export_keep_last": lambda c: (
        c["ckpt.max_num"] if c["ckpt.save_hf"] and _save_steps(c) else KEEP_DEFAULT
    ),
    "checkpoint.export_critic": lambda c: c["critic.save_value_network"] and estimator(c) == "gae",
    "checkpoint.keep_best": lambda c: c["eval.dataset"] is not None and c["ckpt.best_metric_key"] != "none",
}
"""Setting -> its value; every other setting has the value of the one argument that maps to it."""
