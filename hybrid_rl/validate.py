"""Every rule of a configuration that needs no file to check."""

import dataclasses

from hybrid_rl.config import Config, check


def _check_positive(config: Config) -> None:
    for section, names in {
        "run": ["num_steps"],
        "prompts": ["max_prompt_tokens", "num_generated", "num_eval"],
        "rollout": ["rollout_batch_size", "group_size", "max_response_tokens", "temperature", "max_num_seqs"],
        "reward": ["timeout_s", "num_workers"],
        "update": ["num_epochs", "mini_batch_size", "micro_batch_tokens"],
        "sync": ["bucket_bytes"],
        "checkpoint": ["keep_last"],
    }.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            check(value > 0, f"{section}.{name} = {value}: must be greater than 0")


def _check_not_negative(config: Config) -> None:
    update = config.update
    values = {
        "run.eval_every_steps": config.run.eval_every_steps,
        "reward.truncation_penalty": config.reward.truncation_penalty,
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


def validate(config: Config) -> Config:
    """Return the config if every rule that needs no file holds.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    rollout, update, advantage, reward = config.rollout, config.update, config.advantage, config.reward
    _check_positive(config)
    _check_not_negative(config)
    check(bool(config.models.actor), "models.actor is empty: give a Hugging Face folder")
    check(bool(config.prompts.path), "prompts.path is empty: give a file, a dataset folder or reasoning_gym:<task>")
    check(
        config.models.reward is not None or bool(reward.functions),
        "models.reward is null and reward.functions is empty: one of them must score the responses",
    )
    check(
        reward.weights is None or len(reward.weights) == len(reward.functions),
        f"reward.weights has {len(reward.weights or [])} values, reward.functions {len(reward.functions)}: one each",
    )
    check(
        config.has_critic or rollout.group_size >= 2,
        f"rollout.group_size = {rollout.group_size}: advantage.estimator = {advantage.estimator} needs 2 or more",
    )
    for name in ("gamma", "gae_lambda"):
        value = getattr(advantage, name)
        check(0 <= value <= 1, f"advantage.{name} = {value}: must lie in [0, 1]")
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
    check(0 <= update.clip_low < 1, f"update.clip_low = {update.clip_low}: must lie in [0, 1)")
    check(
        config.memory.swap == "off" or update.zero_stage > 0,
        "memory.swap = deepspeed: DeepSpeed cannot offload with update.zero_stage = 0; use 1 to 3 or swap = off",
    )
    return config
