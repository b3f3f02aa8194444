"""The rules of the settings that can be checked without a file or a device. Imports no torch."""

import dataclasses
from collections.abc import Iterable

from hybrid_rl.algorithms.specs import ESTIMATORS, POLICY_LOSSES
from hybrid_rl.config import Config, check


def group_sizes(config: Config) -> dict[str, int]:
    """Return the number of consecutive ranks of a node that work together, by the setting that gives it."""
    return {
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "update.sequence_parallel_size": config.update.sequence_parallel_size,
        "update.tensor_parallel_size": config.update.tensor_parallel_size,
    }


def check_ranks(config: Config, *, num_ranks: int, ranks_on_nodes: Iterable[int]) -> None:
    """Check that the ranks of a run can form the groups that are set.

    Args:
        num_ranks: number of all ranks.
        ranks_on_nodes: numbers of ranks on the nodes.

    Raises:
        ConfigError: a size does not divide the number of ranks, or the number of ranks of a node.
    """
    ranks_on_nodes = list(ranks_on_nodes)
    for name, size in group_sizes(config).items():
        field = f"{name} = {size}"
        check(num_ranks % size == 0, f"{field}: must divide the number of ranks, {num_ranks}")
        for number in ranks_on_nodes:
            check(number % size == 0, f"{field}: must divide the ranks of every node, and a node has {number}")


def _check_positive(config: Config) -> None:
    for section, names in {
        "run": ["num_steps", "eval_samples"],
        "models": ["ema_decay"],
        "prompts": ["max_prompt_tokens", "num_generated", "max_eval_samples"],
        "rollout": [
            "tensor_parallel_size",
            "rollout_batch_size",
            "group_size",
            "max_response_tokens",
            "temperature",
            "max_num_seqs",
        ],
        "reward": ["timeout_s", "num_workers", "remote_timeout_s", "clip"],
        "advantage": ["length_adaptive_alpha", "kl_target", "kl_horizon"],
        "update": [
            "num_epochs",
            "mini_batch_size",
            "micro_batch_tokens",
            "sequence_parallel_size",
            "tensor_parallel_size",
            "dual_clip",
        ],
        "ptx": ["batch_size", "max_tokens"],
        "sync": ["bucket_bytes"],
        "checkpoint": ["keep_last"],
    }.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            check(value is None or value > 0, f"{section}.{name} = {value}: must be greater than 0")


def _check_not_negative(config: Config) -> None:
    update, rollout = config.update, config.rollout
    values = {
        "run.eval_every_steps": config.run.eval_every_steps,
        "reward.truncation_penalty": config.reward.truncation_penalty,
        "reward.overlong_buffer": config.reward.overlong_buffer,
        "reward.overlong_penalty": config.reward.overlong_penalty,
        "reward.remote_retries": config.reward.remote_retries,
        "models.reference_sync_steps": config.models.reference_sync_steps,
        "models.lora.rank": config.models.lora.rank,
        "rollout.dynamic_filtering_max_retries": rollout.dynamic_filtering_max_retries,
        "advantage.kl_coef": config.advantage.kl_coef,
        "update.clip_high": update.clip_high,
        "update.value_clip": update.value_clip or 0,
        "update.critic_warmup_steps": update.critic_warmup_steps,
        "sync.num_verified": config.sync.num_verified,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for name in ("actor", "critic"):
        optimizer = dataclasses.asdict(getattr(update, name))
        values |= {f"update.{name}.{key}": value for key, value in optimizer.items() if isinstance(value, int | float)}
    for key, value in values.items():
        check(value >= 0, f"{key} = {value}: must not be negative")


def _check_algorithms(config: Config) -> None:
    """The algorithms exist and take the settings that are given; a Config made in code has passed no parser."""
    estimator, policy_loss = config.advantage.estimator, config.update.policy_loss
    _check_choice("advantage.estimator", estimator, ESTIMATORS)
    _check_choice("update.policy_loss", policy_loss, POLICY_LOSSES)
    check(
        not ESTIMATORS[estimator].compares_group or config.rollout.group_size >= 2,
        f"rollout.group_size = {config.rollout.group_size}: advantage.estimator = {estimator} needs 2 or more",
    )
    with_critic = " or ".join(name for name, spec in ESTIMATORS.items() if spec.needs_critic)
    for name in ("critic_lambda", "length_adaptive_alpha"):
        value = getattr(config.advantage, name)
        check(
            value is None or ESTIMATORS[estimator].needs_critic,
            f"advantage.{name} = {value}: needs advantage.estimator = {with_critic}",
        )
    clip_low, dual_clip = config.update.clip_low, config.update.dual_clip
    is_unbounded = clip_low == 1 and POLICY_LOSSES[policy_loss].is_lower_bound_optional
    check(0 <= clip_low < 1 or is_unbounded, f"update.clip_low = {clip_low}: must lie in [0, 1)")
    if dual_clip is not None:
        check(dual_clip > 1, f"update.dual_clip = {dual_clip}: must be greater than 1")
        with_dual_clip = " or ".join(name for name, spec in POLICY_LOSSES.items() if spec.takes_dual_clip)
        check(
            POLICY_LOSSES[policy_loss].takes_dual_clip,
            f"update.dual_clip = {dual_clip}: needs update.policy_loss = {with_dual_clip}, not {policy_loss}",
        )


def _check_choice(field: str, value: str, choices: Iterable[str]) -> None:
    check(value in choices, f"{field} = {value}: must be one of {', '.join(choices)}")


def _check_sources(config: Config) -> None:
    """There is a model to train, there are prompts, and there is a source of scores."""
    reward, profiled = config.reward, config.run.profile_steps
    check(
        profiled is None or 1 <= profiled[0] <= profiled[1],
        f"run.profile_steps = {list(profiled or [])}: must be a first and a last step, from 1 on",
    )
    check(bool(config.models.actor), "models.actor is empty: give a Hugging Face folder")
    check(bool(config.prompts.path), "prompts.path is empty: give a file, a dataset folder or reasoning_gym:<task>")
    check(
        config.models.reward is not None or bool(reward.functions) or bool(reward.remote_urls),
        "models.reward is null, reward.functions and reward.remote_urls are empty: one must score the responses",
    )
    check(
        reward.weights is None or len(reward.weights) == len(reward.functions),
        f"reward.weights has {len(reward.weights or [])} values, reward.functions {len(reward.functions)}: one each",
    )


def _check_sizes(config: Config) -> None:
    """Batches divide, and sequences fit."""
    rollout, update = config.rollout, config.update
    check(
        config.responses_per_step % update.mini_batch_size == 0,
        f"update.mini_batch_size = {update.mini_batch_size}: must divide the {config.responses_per_step} responses "
        f"of a step "
        f"(rollout.rollout_batch_size {rollout.rollout_batch_size} x rollout.group_size {rollout.group_size})",
    )
    total = config.prompts.max_prompt_tokens + rollout.max_response_tokens
    check(
        total <= update.micro_batch_tokens,
        f"update.micro_batch_tokens = {update.micro_batch_tokens}: must hold one sequence, prompts.max_prompt_tokens "
        f"{config.prompts.max_prompt_tokens} + rollout.max_response_tokens {rollout.max_response_tokens} = {total}",
    )
    check(
        config.reward.overlong_buffer <= rollout.max_response_tokens,
        f"reward.overlong_buffer = {config.reward.overlong_buffer}: must not exceed rollout.max_response_tokens "
        f"= {rollout.max_response_tokens}",
    )
    check(
        config.ptx.path is None or config.ptx.max_tokens <= update.micro_batch_tokens,
        f"ptx.max_tokens = {config.ptx.max_tokens}: must not exceed update.micro_batch_tokens "
        f"= {update.micro_batch_tokens}",
    )


def _check_advantage(config: Config) -> None:
    """Discounts are fractions, and the settings of the KL penalty fit together."""
    advantage = config.advantage
    for name in ("gamma", "gae_lambda", "critic_lambda"):
        value = getattr(advantage, name)
        check(value is None or 0 <= value <= 1, f"advantage.{name} = {value}: must lie in [0, 1]")
    check(
        not advantage.kl_unbiased or advantage.kl_in == "loss",
        "advantage.kl_unbiased = true: needs advantage.kl_in = loss; a KL in the reward has no gradient of its own",
    )
    check(
        advantage.kl_target is None or config.responses_per_step < 5 * advantage.kl_horizon,
        f"advantage.kl_horizon = {advantage.kl_horizon}: must be above a fifth of the {config.responses_per_step} "
        "responses of a step, or one step could take kl_coef to 0",
    )
    check(
        advantage.kl_target is None or advantage.kl_coef > 0,
        f"advantage.kl_target = {advantage.kl_target}: needs advantage.kl_coef > 0 to start from",
    )


def _check_reference_and_ema(config: Config) -> None:
    """A reference that moves is a model of its own, and copies move by a fraction."""
    models = config.models
    if models.reference_sync_steps:
        check(
            config.has_reference and not config.reference_is_actor,
            f"models.reference_sync_steps = {models.reference_sync_steps}: needs a reference of its own; set "
            "advantage.kl_coef above 0 and, with models.lora, models.reference",
        )
    alpha = models.reference_mixup_alpha
    check(0 < alpha <= 1, f"models.reference_mixup_alpha = {alpha}: must lie in (0, 1]")
    check(
        models.ema_decay is None or models.ema_decay < 1, f"models.ema_decay = {models.ema_decay}: must lie in (0, 1)"
    )


def _check_rollout(config: Config) -> None:
    """Responses can be generated, and groups filtered."""
    check("" not in config.rollout.stop_strings, "rollout.stop_strings holds an empty text, which ends every response")
    size, engine = config.rollout.tensor_parallel_size, config.rollout.engine
    check(
        size == 1 or engine == "vllm",
        f"rollout.tensor_parallel_size = {size}: needs rollout.engine = vllm, not {engine}",
    )
    bounds, group_size = config.rollout.dynamic_filtering_reward_range, config.rollout.group_size
    if bounds is not None:
        field = "rollout.dynamic_filtering_reward_range"
        check(bounds[0] < bounds[1], f"{field} = {list(bounds)}: the first must be below the second")
        check(group_size >= 2, f"rollout.group_size = {group_size}: {field} needs 2 or more")


def _check_losses(config: Config) -> None:
    """Importance weights have a ratio and bounds around it, and the losses of policy and texts add up."""
    update = config.update
    check(
        0 <= update.correction_low <= 1 <= update.correction_high,
        f"update.correction_low = {update.correction_low}, correction_high = {update.correction_high}: "
        "must lie on both sides of 1, the lower one not below 0",
    )
    check(
        update.old_logprobs == "trainer" or update.correction == "none",
        f"update.correction = {update.correction}: update.old_logprobs = rollout leaves no ratio between the engines",
    )
    check(config.ptx.path is None or 0 < config.ptx.coef < 1, f"ptx.coef = {config.ptx.coef}: must lie in (0, 1)")


def _check_training_state(config: Config) -> None:
    """DeepSpeed can hold the optimizer where the settings want it, and the phase log ends."""
    update = config.update
    check(
        config.memory.swap != "deepspeed" or update.zero_stage > 0,
        "memory.swap = deepspeed: DeepSpeed cannot offload update.zero_stage = 0; use 1 to 3, or swap = vmm or off",
    )
    for name in ("actor", "critic"):
        check(
            getattr(update, name).kind == "adamw" or update.zero_stage > 0,
            f"update.{name}.kind = cpu_adam: needs update.zero_stage 1 to 3",
        )
    check(
        config.checkpoint.every_steps > 0 or not config.checkpoint.phase_log,
        "checkpoint.phase_log = true: needs checkpoint.every_steps > 0, or the log would grow without end",
    )


def _check_tensor_parallel(config: Config) -> None:
    """Tensor parallelism excludes ZeRO-3, adapters and sequence parallelism."""
    update, rank = config.update, config.models.lora.rank
    if update.tensor_parallel_size == 1:
        return
    field, size = f"update.tensor_parallel_size = {update.tensor_parallel_size}", update.sequence_parallel_size
    check(update.zero_stage < 3, f"{field}: needs update.zero_stage 0 to 2, not {update.zero_stage}")
    check(rank == 0, f"{field}: needs models.lora.rank = 0, not {rank}; DeepSpeed shards no layer with adapters")
    check(size == 1, f"{field}: needs update.sequence_parallel_size = 1, not {size}")


def validate(config: Config) -> Config:
    """Return the config if it breaks none of the rules.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    for rule in (
        _check_positive,
        _check_not_negative,
        _check_sources,
        _check_sizes,
        _check_algorithms,
        _check_advantage,
        _check_reference_and_ema,
        _check_rollout,
        _check_losses,
        _check_training_state,
        _check_tensor_parallel,
    ):
        rule(config)
    return config
