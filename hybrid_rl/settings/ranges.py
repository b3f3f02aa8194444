"""The range of every number, and the rules of every text and every list, among the settings of a run."""

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hybrid_rl.config import Config
from hybrid_rl.printable import secret_in_url
from hybrid_rl.settings.types import get_setting, is_optional, setting_types, show


@dataclass(frozen=True)
class Range:
    """The finite numbers from `low` to `high`; a bound is included unless it is open."""

    low: float = -math.inf
    high: float = math.inf
    is_low_open: bool = False
    is_high_open: bool = False

    def broken_rule(self, value: float) -> str | None:
        """Return the rule that a number breaks; None if it lies in the range."""
        if isinstance(value, float) and not math.isfinite(value):
            return "must be finite"
        is_above = value > self.low if self.is_low_open else value >= self.low
        is_below = value < self.high if self.is_high_open else value <= self.high
        if is_above and is_below:
            return None if abs(value) <= sys.float_info.max else "must be finite"
        return f"must be at most {self.high}" if is_above and self.high > 1 else self.rule

    @property
    def rule(self) -> str:
        """What a number of the range must be, without an upper bound that is far from usual numbers."""
        if self.high <= 1:
            brackets = "(" if self.is_low_open else "[", ")" if self.is_high_open else "]"
            return f"must lie in {brackets[0]}{self.low}, {self.high}{brackets[1]}"
        if not math.isfinite(self.low):
            return "must be finite"
        if self.is_low_open:
            return f"must be greater than {self.low}"
        return f"must be at least {self.low}" if self.low else "must not be negative"


MAX_COUNT = 2**31 - 1
"""Largest number of steps, tokens or samples: libraries hold such numbers in 32 bits."""
COUNT = Range(0, MAX_COUNT, is_low_open=True)
COUNT_OR_ZERO = Range(0, MAX_COUNT)
NUM_BYTES = Range(0, 2**63 - 1, is_low_open=True)
FINITE = Range()
POSITIVE = Range(0, is_low_open=True)
NOT_NEGATIVE = Range(0)
FRACTION = Range(0, 1)
POSITIVE_FRACTION = Range(0, 1, is_low_open=True)
INNER_FRACTION = Range(0, 1, is_low_open=True, is_high_open=True)
DECAY = Range(0, 1, is_high_open=True)

MIN_TEMPERATURE = 0.01
"""Lowest temperature: vLLM samples at it where a request asks for less, unless it asks for 0."""

OPTIMIZER = {
    "lr": FRACTION,
    "betas": DECAY,
    "eps": POSITIVE,
    "weight_decay": NOT_NEGATIVE,
    "max_grad_norm": NOT_NEGATIVE,
    "warmup_steps": COUNT_OR_ZERO,
    "min_lr_ratio": FRACTION,
}
RANGES: dict[str, Range] = {
    "run.num_steps": COUNT,
    "run.seed": Range(0, 2**32 - 1),
    "run.eval_every_steps": COUNT_OR_ZERO,
    "run.eval_samples": COUNT,
    "run.eval_temperature": NOT_NEGATIVE,
    "run.eval_top_p": POSITIVE_FRACTION,
    "run.eval_max_response_tokens": COUNT,
    "run.eval_pass_at": COUNT,
    "run.profile_steps": COUNT,
    "run.stop_at_accuracy": POSITIVE_FRACTION,
    "run.stall_timeout_s": POSITIVE,
    "run.keep_rollouts": COUNT,
    "run.tracked_samples": COUNT_OR_ZERO,
    "run.tracked_samples_every_steps": COUNT,
    "run.prometheus_port": Range(1024, 65535),
    "models.reference_sync_steps": COUNT_OR_ZERO,
    "models.reference_mixup_alpha": POSITIVE_FRACTION,
    "models.ema_decay": INNER_FRACTION,
    "models.lora.rank": COUNT_OR_ZERO,
    "models.lora.alpha": POSITIVE,
    "prompts.max_prompt_tokens": COUNT,
    "prompts.num_generated": COUNT,
    "prompts.max_samples": COUNT,
    "prompts.max_eval_samples": COUNT,
    "rollout.tensor_parallel_size": COUNT,
    "rollout.rollout_batch_size": COUNT,
    "rollout.group_size": COUNT,
    "rollout.max_response_tokens": COUNT,
    "rollout.temperature": Range(MIN_TEMPERATURE),
    "rollout.stop_token_ids": COUNT_OR_ZERO,
    "rollout.dynamic_filtering_reward_range": FINITE,
    "rollout.dynamic_filtering_max_retries": COUNT_OR_ZERO,
    "rollout.kv_cache_memory_bytes": NUM_BYTES,
    "rollout.gpu_memory_utilization": POSITIVE_FRACTION,
    "rollout.max_num_seqs": COUNT,
    "rollout.max_logprob_gap": POSITIVE,
    "rollout.restarts": COUNT_OR_ZERO,
    "environment.max_turns": COUNT,
    "environment.max_turn_tokens": COUNT,
    "environment.max_concurrent": COUNT,
    "environment.num_workers": COUNT,
    "environment.timeout_s": POSITIVE,
    "environment.memory_limit_bytes": NUM_BYTES,
    "environment.max_restarts": COUNT_OR_ZERO,
    "reward.weights": FINITE,
    "reward.prompts_per_call": COUNT,
    "reward.model_weight": FINITE,
    "reward.remote_weight": FINITE,
    "reward.remote_timeout_s": POSITIVE,
    "reward.remote_retries": COUNT_OR_ZERO,
    "reward.timeout_s": POSITIVE,
    "reward.num_workers": COUNT,
    "reward.memory_limit_bytes": NUM_BYTES,
    "reward.truncation_penalty": NOT_NEGATIVE,
    "reward.overlong_buffer": COUNT_OR_ZERO,
    "reward.overlong_penalty": NOT_NEGATIVE,
    "reward.clip": POSITIVE,
    "advantage.gamma": FRACTION,
    "advantage.turn_gamma": FRACTION,
    "advantage.gae_lambda": FRACTION,
    "advantage.critic_lambda": FRACTION,
    "advantage.length_adaptive_alpha": POSITIVE,
    "advantage.kl_coef": NOT_NEGATIVE,
    "advantage.kl_target": POSITIVE,
    "advantage.kl_horizon": COUNT,
    "update.num_epochs": COUNT,
    "update.mini_batch_size": COUNT,
    "update.micro_batch_tokens": COUNT,
    "update.sequence_parallel_size": COUNT,
    "update.tensor_parallel_size": COUNT,
    "update.clip_low": FRACTION,
    "update.clip_high": NOT_NEGATIVE,
    "update.dual_clip": Range(1, is_low_open=True),
    "update.correction_low": FRACTION,
    "update.correction_high": Range(1),
    "update.value_clip": POSITIVE,
    "update.entropy_coef": FINITE,
    "update.router_aux_loss_coef": NOT_NEGATIVE,
    "update.critic_warmup_steps": COUNT_OR_ZERO,
    **{f"update.{model}.{name}": bounds for model in ("actor", "critic") for name, bounds in OPTIMIZER.items()},
    "ptx.coef": INNER_FRACTION,
    "ptx.batch_size": COUNT,
    "ptx.max_tokens": Range(2, MAX_COUNT),  # the first token is predicted from nothing, so it has no loss
    "memory.enforce_margin": NOT_NEGATIVE,
    "sync.bucket_bytes": NUM_BYTES,
    "sync.num_verified": COUNT_OR_ZERO,
    "checkpoint.every_steps": COUNT_OR_ZERO,
    "checkpoint.keep_last": COUNT,
    "checkpoint.export_every_steps": COUNT_OR_ZERO,
    "checkpoint.export_keep_last": COUNT,
    "checkpoint.grace_s": POSITIVE,
}
"""Setting -> range of its number, or of every number in its list."""

MAY_BE_EMPTY = {"prompts.system_message"}
"""Texts for which nothing is a meaning of its own."""
KEEPS_BLANKS = {"prompts.system_message", "rollout.stop_strings"}
"""Texts that may consist of blanks and line ends."""
MAY_REPEAT = {"reward.weights"}
"""Lists in which an item may stand twice, and which may be empty."""
REMEDIES = {
    "models.actor": "give a Hugging Face folder",
    "prompts.path": "give a file, a dataset folder, a name on the hub or reasoning_gym:<task>",
}
"""Text -> what to give instead of nothing."""

SECRET_REMEDIES = {
    "reward.remote_urls": "put it into ~/.netrc, or name an environment variable in reward.remote_headers",
}
"""Text -> where the secret of a URL is read from instead."""


def broken_values(config: Config) -> Iterator[tuple[str, str]]:
    """Yield the name of every setting whose value breaks a rule on its own, and a sentence; types must be right."""
    for name in setting_types():
        value = get_setting(config, name)
        sentence = _number_sentence(name, value) or _text_sentence(name, value) or _list_sentence(name, value)
        sentence = sentence or _secret_sentence(name, value)
        if sentence:
            yield name, sentence


def _number_sentence(name: str, value: Any) -> str | None:
    if name not in RANGES or value is None:
        return None
    for number in value if isinstance(value, list | tuple) else [value]:
        rule = RANGES[name].broken_rule(number)
        if rule:
            return f"{name} = {show(value)}: {rule}"
    return None


def _text_sentence(name: str, value: Any) -> str | None:
    items = value if isinstance(value, list | tuple) else [value]
    for text in (item for item in items if isinstance(item, str)):
        if name not in MAY_BE_EMPTY and not (text if name in KEEPS_BLANKS else text.strip()):
            remedy = REMEDIES.get(name, "give a value" + (", or null" if is_optional(setting_types()[name]) else ""))
            return f"{name} holds an empty text: remove it" if isinstance(value, list) else f"{name} is empty: {remedy}"
        if name not in KEEPS_BLANKS and not text.isprintable():
            return f"{name} = {show(value)}: must hold no line end and no control character"
    return None


def _secret_sentence(name: str, value: Any) -> str | None:
    """Return the sentence for a secret in a URL, at any depth of the value."""
    if isinstance(value, str):
        secret = secret_in_url(value)
        remedy = SECRET_REMEDIES.get(name, "give a URL without it, or the path of a file")
        shown = "which config.yaml, messages and trackers would show"
        return f"{name} holds a URL with {secret}, {shown}: {remedy}" if secret else None
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return next((sentence for item in items if (sentence := _secret_sentence(name, item))), None)


def _list_sentence(name: str, value: Any) -> str | None:
    if not isinstance(value, list) or name in MAY_REPEAT:
        return None
    if not value and is_optional(setting_types()[name]):
        return f"{name} is an empty list: give at least one item, or null"
    twice = [item for place, item in enumerate(value) if item in value[:place]]
    return f"{name} = {show(value)}: holds {show(twice[0])} twice" if twice else None
