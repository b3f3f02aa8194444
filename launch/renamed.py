"""Former names of settings, which the command line and settings files still accept."""

from collections.abc import Collection
from functools import partial

from hybrid_rl.config import Findings, check

RENAMED = {
    "checkpoint.overlap": "checkpoint.async_save",
    "models.reference_alpha": "models.reference_mixup_alpha",
    "models.reference_every_steps": "models.reference_sync_steps",
    "prompts.num_eval": "prompts.max_eval_samples",
    "prompts.overlong": "prompts.overlong_prompts",
    "rollout.keep_scores": "rollout.dynamic_filtering_reward_range",
    "rollout.max_refills": "rollout.dynamic_filtering_max_retries",
}
"""Former name of a setting -> its name."""


def check_one_name(names: Collection[str]) -> None:
    """Check that no setting has both of its names among those that are given.

    Raises:
        ConfigError: one sentence for every setting with two names.
    """
    findings = Findings()
    for former, current in RENAMED.items():
        message = f"{former} and {current} are one setting, which has two values: remove {former}, its former name"
        findings.run(partial(check, not {former, current} <= set(names), message))
    findings.raise_any()
