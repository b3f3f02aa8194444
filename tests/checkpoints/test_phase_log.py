"""Logged phases are read after a restart, if all ranks finished them and no earlier step is missing."""

import hashlib
import logging
import pickle
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import Rollout, make_train_batch
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.checkpoints.resume import open_phase_log
from hybrid_rl.config import CheckpointConfig, Config, RewardConfig, RunConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.rewards.scoring import Scored
from tests.conftest import make_rollout, make_turns


def never() -> str:
    raise AssertionError("computed again")


def open_log(tmp_path: Path, world: World, *, first_step: int = 1, key: str = "k") -> PhaseLog:
    return PhaseLog(tmp_path / "log", key=key, first_step=first_step, world=world)


def steps(tmp_path: Path) -> list[str]:
    return sorted(path.name for path in (tmp_path / "log").glob("step_*"))


def test_a_finished_phase_is_read_and_a_lost_one_is_repeated(tmp_path, world):
    log = open_log(tmp_path, world)
    assert log.get_or_compute(1, "rollout", lambda: "first") == "first"
    assert log.get_or_compute(1, "rollout", lambda: "refilled") == "refilled"  # the same phase again in one step
    assert log.get_or_compute(2, "rollout", lambda: "second") == "second"

    again = open_log(tmp_path, world)
    assert again.get_or_compute(1, "rollout", never) == "first"
    assert again.get_or_compute(1, "rollout", never) == "refilled"
    assert again.get_or_compute(1, "scores", lambda: [1.0]) == [1.0]
    assert again.get_or_compute(2, "rollout", never) == "second"
    assert again.get_or_compute(2, "rollout", lambda: "new") == "new"


def test_a_phase_that_fails_is_repeated_under_its_own_number(tmp_path, world):
    log = open_log(tmp_path, world)
    with pytest.raises(AssertionError):
        log.get_or_compute(1, "rollout", never)
    assert log.get_or_compute(1, "rollout", lambda: "first") == "first"
    assert log.get_or_compute(1, "rollout", lambda: "refilled") == "refilled"

    again = open_log(tmp_path, world)
    assert [again.get_or_compute(1, "rollout", never) for _ in range(2)] == ["first", "refilled"]


def test_steps_that_a_checkpoint_contains_are_deleted(tmp_path, world):
    log = open_log(tmp_path, world)
    for step in (1, 2, 3):
        log.get_or_compute(step, "rollout", lambda: "")
    log.delete_up_to(2)
    assert steps(tmp_path) == ["step_000003"]


def test_conversations_and_their_scores_are_read_as_they_were(tmp_path, world):
    rollouts = [
        make_rollout([1, 2], [3, 4, 5], rollout_logprobs=[-0.1, -0.7], turns=make_turns(1, -1, 1)),
        make_rollout([1, 2], [6], sequence_id=1),
    ]
    scored = Scored(
        rollouts=rollouts,
        scores=torch.tensor([0.3, 1.0], dtype=torch.float64),
        parts={},
        token_rewards={0: [(0, 0.1), (2, -0.0)]},
    )
    log = open_log(tmp_path, world)
    log.get_or_compute(1, "rollout", lambda: (rollouts, []), Rollout)
    log.get_or_compute(1, "scores", lambda: scored, Scored)

    again = open_log(tmp_path, world)
    found, greedy = again.get_or_compute(1, "rollout", never, Rollout)
    assert (found, greedy) == (rollouts, [])
    read = again.get_or_compute(1, "scores", never, Scored)
    assert repr(read.token_rewards) == repr(scored.token_rewards) and read.rollouts == rollouts
    for name, value in vars(make_train_batch(rollouts)).items():
        other = getattr(make_train_batch(read.rollouts), name)
        assert torch.equal(value, other) if isinstance(value, torch.Tensor) else repr(value) == repr(other), name


@pytest.mark.parametrize(
    "first_step, left",
    [(1, []), (2, ["step_000002", "step_000003"]), (3, ["step_000003"]), (4, []), (5, ["step_000005"])],
)
def test_only_steps_without_a_gap_are_kept(tmp_path, world, first_step, left):
    log = open_log(tmp_path, world)
    for step in (2, 3, 5):
        log.get_or_compute(step, "rollout", lambda: "")
    open_log(tmp_path, world, first_step=first_step)
    assert steps(tmp_path) == left


def test_another_key_deletes_the_log_with_a_warning(tmp_path, world, caplog):
    open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "old")
    with caplog.at_level(logging.WARNING):
        log = open_log(tmp_path, world, key="other")
    assert "phase log of steps [1] has other settings, another run or another number of ranks" in caplog.text
    assert log.get_or_compute(1, "rollout", lambda: "new") == "new"
    assert open_log(tmp_path, world, key="other").get_or_compute(1, "rollout", never) == "new"


class Interrupted(BaseException):
    pass


def test_an_interrupted_phase_is_not_logged(tmp_path, world):
    def cut_off() -> str:
        raise Interrupted

    log = open_log(tmp_path, world)
    with pytest.raises(Interrupted):
        log.get_or_compute(1, "rollout", cut_off)
    assert open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "whole") == "whole"


def slowly(rank: int) -> int:
    time.sleep(rank)
    return rank + 20


def main() -> None:
    """Run as one of two ranks; rank 1 has no result of its second phase, and is slower in its last one."""
    folder = Path(sys.argv[1])
    world = join_world()
    log = PhaseLog(folder / "log", key="k", first_step=1, world=world)
    for name in ("rollout", "scores"):
        log.get_or_compute(1, name, lambda: world.rank)
    (folder / "log/step_000001/rank_1.scores_0.msgpack").unlink(missing_ok=True)
    again = PhaseLog(folder / "log", key="k", first_step=1, world=world)
    found = {name: again.get_or_compute(1, name, lambda: world.rank + 10) for name in ("rollout", "scores")}
    found["evaluation"] = again.get_or_compute(2, "evaluation", lambda: slowly(world.rank))
    again.delete_all()
    world.barrier()
    found["left"] = steps(folder)
    torch.save(found, folder / f"rank{world.rank}.pt")


@pytest.fixture(scope="module")
def found(on_two_ranks) -> list[dict]:
    return on_two_ranks(__file__)


def test_a_phase_that_one_rank_did_not_finish_is_repeated_on_all(found):
    assert [(rank["rollout"], rank["scores"]) for rank in found] == [(0, 10), (1, 11)]


def test_deleting_the_log_waits_for_the_last_rank(found):
    assert [(rank["evaluation"], rank["left"]) for rank in found] == [(20, []), (21, [])]


if __name__ == "__main__":
    main()


def test_a_damaged_file_is_computed_again(tmp_path, world, caplog):
    open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "first")
    (path,) = (tmp_path / "log" / "step_000001").iterdir()
    content = bytearray(path.read_bytes())
    content[-3] ^= 0x40
    path.write_bytes(content)
    assert open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "again") == "again"
    assert f"{path} is damaged: this phase is computed again" in caplog.text
    assert open_log(tmp_path, world).get_or_compute(1, "rollout", never) == "again"


@dataclass(frozen=True)
class Result:
    values: tuple[float, ...]


def test_a_dataclass_is_read_where_the_caller_names_it(tmp_path, world, caplog):
    open_log(tmp_path, world).get_or_compute(1, "scores", lambda: Result((0.5, -0.0)), Result)
    found = open_log(tmp_path, world).get_or_compute(1, "scores", never, Result)
    assert found == Result((0.5, -0.0)) and isinstance(found, Result)
    assert open_log(tmp_path, world).get_or_compute(1, "scores", lambda: "again") == "again"
    assert "holds the class Result, not only builtin types: this phase is computed again" in caplog.text


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_a_pickle_with_a_valid_checksum_runs_no_code(tmp_path, world, caplog):
    open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "first")
    (path,) = (tmp_path / "log" / "step_000001").iterdir()
    content = pickle.dumps(Opens(tmp_path / "ran"))
    path.write_bytes(hashlib.sha256(content).digest() + content)
    assert open_log(tmp_path, world).get_or_compute(1, "rollout", lambda: "again") == "again"
    assert not (tmp_path / "ran").exists()
    assert f"{path} cannot be decoded" in caplog.text
    pickle.loads(content)
    assert (tmp_path / "ran").exists()  # the test's pickle does run code


def test_an_edited_reward_file_starts_another_log(tmp_path, world):
    file = tmp_path / "rewards.py"
    file.write_text("def length(response, answer): return 1.0\n")
    functions = RewardConfig(functions=[f"{file}:length"])
    run = RunConfig(name="run", dir=str(tmp_path))
    config = Config(run=run, reward=functions, checkpoint=CheckpointConfig(phase_log=True))

    def reopen() -> PhaseLog:
        log = open_phase_log(config, world, 0, run_id="a")
        assert log is not None
        return log

    reopen().get_or_compute(1, "scores", lambda: "first")
    assert reopen().get_or_compute(1, "scores", never) == "first"
    file.write_text("def length(response, answer): return 2.0\n")
    assert reopen().get_or_compute(1, "scores", lambda: "second") == "second"
