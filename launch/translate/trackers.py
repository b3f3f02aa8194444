"""Trackers in the command lines of other systems."""

from collections.abc import Iterable

TRACKERS = ("tensorboard", "wandb", "trackio", "mlflow")
"""Trackers of run.trackers."""
NO_OTHERS = "there are tensorboard, wandb, trackio and mlflow, and metrics.jsonl has all metrics"
NO_KEY = "a key is never written to a file: log in by `wandb login`, or set WANDB_API_KEY"
BY_VARIABLE = "set the environment variable {}, which the library reads"


def is_given(text: str) -> bool:
    """Return whether a text, such as a key, turns a tracker on; the text itself is not kept."""
    return text.strip().lower() not in ("", "none", "null", "false")


def known(names: Iterable[str]) -> list[str]:
    """Return the names among TRACKERS, in their order there."""
    found = set(names)
    return [name for name in TRACKERS if name in found]
