"""Errors that end a run in one sentence, each with the exit code of the command."""


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


class PreemptedError(RunError):
    """The run was asked to end and has written a checkpoint, from which the same command continues."""

    exit_code = 75
