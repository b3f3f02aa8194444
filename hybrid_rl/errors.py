"""Errors that end a run in one sentence, each with the exit code of the command."""

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)


class RunError(RuntimeError):
    """What ends a run after it has started, in one sentence with the remedy."""

    exit_code: int = 1
    """Exit code of the command."""


class EngineLostError(RunError):
    """A process of the rollout engine has ended, or makes no progress."""

    exit_code = 3


class RewardLostError(RunError):
    """A reward service or a scorer cannot be reached, or makes no progress."""

    exit_code = 4


class OutOfMemoryError(RunError):
    """The memory of a GPU, of the host or of /dev/shm does not suffice."""

    exit_code = 5


class RankLostError(RunError):
    """Another rank has ended, or makes no progress."""

    exit_code = 6


class FileWriteError(RunError):
    """A file of the run cannot be written, for example because the disk is full."""

    exit_code = 7


class PreemptedError(RunError):
    """The run was asked to end and has written a checkpoint, from which the same command continues."""

    exit_code = 75


def close_each(*parts: Callable[[], None], error: BaseException | None = None) -> None:
    """Call every function, also after one has failed; the first error is the one that is raised.

    Args:
        parts: functions that close a part of a run each.
        error: what ends the run already; an error of a function is then logged and not raised.
    """
    is_closing_alone = error is None
    for part in parts:
        try:
            part()
        except BaseException as caught:
            if error is None:
                error = caught
            else:
                is_same_disk = isinstance(error, FileWriteError) and isinstance(caught, FileWriteError)
                level = logging.INFO if is_same_disk else logging.WARNING
                logger.log(level, "a part of the run could not be closed: %s: %s", type(caught).__name__, caught)
    if is_closing_alone and error is not None:
        raise error
