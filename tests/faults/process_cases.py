"""Faults of the processes of a run, and what each must lead to. Every row is written by hand."""

from collections.abc import Iterator
from typing import Any

from tests.faults.cases import STALL_TIMEOUT_S, Case, Ends, GoesOn

PHASES = ("sync", "rollout", "score", "update_critic", "update_actor")
STALLED_S = STALL_TIMEOUT_S + 30.0
"""Limit for a run that waits for a process that is stopped."""

KILLED = Ends(code=-9, sentence="")
TERMINATED = Ends(code=143, sentence=r"^ended by SIGTERM$")
INTERRUPTED = Ends(code=130, sentence=r"^ended by SIGINT$")
REWARD_LOST = Ends(code=4, sentence=r"^reward\.functions: .*scorer\.py:judged")
SERVICE_LOST = Ends(code=4, sentence=r"^reward\.remote_urls: ")
ENGINE_KILLED = Ends(code=3, sentence=r"process \d+ of the rollout engine was killed by SIGKILL")
ENGINE_STOPPED = Ends(code=3, sentence=r"process \d+ of the rollout engine is stopped", within_s=STALLED_S)
RANK_1_KILLED = Ends(code=6, sentence=r"rank 1 .*SIGKILL")
RANK_0_KILLED = Ends(code=6, sentence=r"rank 0 .*SIGKILL")
RANK_1_STOPPED = Ends(code=6, sentence=r"rank 1 .*stopped", within_s=STALLED_S)
RANK_0_STOPPED = Ends(code=6, sentence=r"rank 0 .*stopped", within_s=STALLED_S)

QUICK = {
    ("the trainer", "rollout", "SIGKILL"),
    ("the trainer", "checkpoint", "SIGKILL"),
    ("the trainer", "score", "SIGTERM"),
    ("the trainer", "update_actor", "SIGINT"),
    ("a busy scorer", "score", "SIGKILL"),
    ("a busy scorer", "score", "SIGSTOP"),
    ("the busy reward service", "score", "SIGKILL"),
    ("the busy reward service", "score", "SIGSTOP"),
    ("rank 1", "update_actor", "SIGKILL"),
    ("rank 1", "rollout", "SIGSTOP"),
    ("the launcher", "rollout", "SIGKILL"),
    ("the engine's core", "rollout", "SIGKILL"),
    ("the engine's core", "sync", "SIGSTOP"),
}
"""Subject, phase and fault of the cases that `make test-slow` runs."""


def _case(run: str, subject: str, phase: str, fault: str, expected: Ends | GoesOn, **settings: Any) -> Case:
    return Case(
        run=run,
        subject=subject,
        phase=phase,
        fault=fault,
        expected=expected,
        settings={name.replace("__", "."): value for name, value in settings.items()},
        is_in_test_slow=(subject, phase, fault) in QUICK and not settings,
    )


def _trainer() -> Iterator[Case]:
    """Yield the faults of a single rank, which is the command itself."""
    for phase in ("start", *PHASES, "checkpoint"):
        yield _case("one rank", "the trainer", phase, "SIGKILL", KILLED)
        yield _case("one rank", "the trainer", phase, "SIGTERM", TERMINATED)
        yield _case("one rank", "the trainer", phase, "SIGINT", INTERRUPTED)
        yield _case("one rank", "the trainer", phase, "SIGSTOP for 2 s", GoesOn())
    # A step that can still be given up leaves the checkpoint of the step before; otherwise it is finished.
    for phase, step in {"sync": 1, "rollout": 1, "score": 1, "update_critic": 2, "update_actor": 2}.items():
        preempted = Ends(code=75, sentence=rf"preempted by SIGTERM: the checkpoint of step {step} is complete")
        yield _case("one rank", "the trainer", phase, "SIGTERM", preempted, checkpoint__on_sigterm=True)


def _rewards() -> Iterator[Case]:
    """Yield the faults of scorers and of the reward service."""
    for subject in ("a busy scorer", "a busy scorer's parent"):
        yield _case("one rank", subject, "score", "SIGKILL", REWARD_LOST)
    yield _case("one rank", "a busy scorer", "score", "SIGSTOP", REWARD_LOST)
    yield _case("one rank", "a busy scorer", "score", "SIGSTOP for 2 s", GoesOn())
    zero = GoesOn(is_same=False, warning="1 of 8 responses have a failed score")
    yield _case("one rank", "a busy scorer", "score", "SIGKILL", zero, reward__on_error="zero")
    yield _case("one rank", "a busy scorer", "score", "SIGSTOP", zero, reward__on_error="zero")
    for phase in ("sync", "rollout", "update_actor"):
        yield _case("one rank", "an idle scorer", phase, "SIGKILL", GoesOn())
    yield _case("one rank", "an idle scorer", "rollout", "SIGSTOP", REWARD_LOST)
    for subject, phase in (("the busy reward service", "score"), ("the reward service", "rollout")):
        yield _case("one rank", subject, phase, "SIGKILL", SERVICE_LOST)
        yield _case("one rank", subject, phase, "SIGSTOP", SERVICE_LOST)
    yield _case("one rank", "the busy reward service", "score", "SIGSTOP for 2 s", GoesOn())


def _ranks() -> Iterator[Case]:
    """Yield the faults of two ranks and of their launcher."""
    for phase in ("start", "rollout", "score", "update_actor"):
        yield _case("two ranks", "rank 1", phase, "SIGKILL", RANK_1_KILLED)
        yield _case("two ranks", "rank 0", phase, "SIGKILL", RANK_0_KILLED)
        yield _case("two ranks", "the launcher", phase, "SIGKILL", KILLED)
        yield _case("two ranks", "the launcher", phase, "SIGTERM", TERMINATED)
    yield _case("two ranks", "the launcher", "rollout", "SIGINT", INTERRUPTED)
    for phase in ("rollout", "update_actor"):
        yield _case("two ranks", "rank 1", phase, "SIGSTOP", RANK_1_STOPPED)
        yield _case("two ranks", "rank 1", phase, "SIGSTOP for 2 s", GoesOn())
    yield _case("two ranks", "a busy scorer", "score", "SIGKILL", REWARD_LOST)
    yield _case("two ranks", "the busy reward service", "score", "SIGSTOP", SERVICE_LOST)


def _engine() -> Iterator[Case]:
    """Yield the faults of vLLM's processes, and of a trainer that has an engine."""
    for phase in ("start", "sync", "rollout", "score"):
        yield _case("vllm", "the engine's core", phase, "SIGKILL", ENGINE_KILLED)
    for phase in ("start", "sync", "rollout"):
        yield _case("vllm", "the engine's core", phase, "SIGSTOP", ENGINE_STOPPED)
    yield _case("vllm", "the engine's core", "rollout", "SIGSTOP for 2 s", GoesOn())
    for phase in ("start", "sync", "rollout"):
        yield _case("vllm", "the trainer", phase, "SIGKILL", KILLED)
        yield _case("vllm", "the trainer", phase, "SIGTERM", TERMINATED)
    for phase in ("sync", "rollout"):
        yield _case("vllm on two ranks", "the engine's second worker", phase, "SIGKILL", ENGINE_KILLED)
        yield _case("vllm on two ranks", "the engine's second worker", phase, "SIGSTOP", ENGINE_STOPPED)
    yield _case("vllm on two ranks", "rank 1", "rollout", "SIGKILL", RANK_1_KILLED)


def _restarts() -> Iterator[Case]:
    """Yield the faults of vLLM's processes after which a run goes on with a new engine."""
    again = GoesOn(warning=r"restart 1 of rollout\.restarts = 1, step 2 generates again")
    for phase in ("sync", "rollout", "score"):  # an engine that is lost in score is noticed by the next sync
        step = GoesOn(warning="step 3 generates again") if phase == "score" else again
        yield _case("vllm", "the engine's core", phase, "SIGKILL", step, rollout__restarts=1)
    yield _case("vllm", "the engine's core", "sync", "SIGKILL", again, rollout__restarts=1, sync__mode="copy")
    yield _case("vllm", "the engine's core", "rollout", "SIGSTOP", again, rollout__restarts=1)
    yield _case("vllm, evaluations", "the engine's core", "rollout", "SIGKILL", again, rollout__restarts=1)
    for phase in ("sync", "rollout"):
        yield _case("vllm on two ranks", "the engine's second worker", phase, "SIGKILL", again, rollout__restarts=1)


CASES = {case.name: case for group in (_trainer(), _rewards(), _ranks(), _engine(), _restarts()) for case in group}
"""All cases by their names."""
