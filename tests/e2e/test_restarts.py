"""A run whose rollout engine is lost goes on with a new one, to the results of a run whose engine was never lost.

Run as a program, this file launches ranks of which one loses its engine.
"""

import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import yaml

from hybrid_rl.config import Config, as_dict
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.errors import EngineLostError
from launch import colocated, ranks

LOSS = "process 7 of the rollout engine was killed by SIGKILL"


class LostEngine(HuggingFaceEngine):
    """The Hugging Face engine, which is lost as often as `losses` says: in a call of a method, by its number."""

    losses: ClassVar[list[tuple[str, int]]] = []
    calls: ClassVar[list[str]] = []
    is_lost = False

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in ("generate", "load_bucket", "finish_sync", "checksums", "map", "unmap", "open_bucket"):
            return found

        def counted(*arguments: Any) -> Any:
            LostEngine.calls.append(name)
            self.is_lost |= (name, LostEngine.calls.count(name)) in LostEngine.losses
            if self.is_lost:
                raise EngineLostError(LOSS)
            return found(*arguments)

        return counted


def lose(*losses: tuple[str, int]) -> None:
    """Let the engines that start from now on be lost in these calls."""
    LostEngine.losses, LostEngine.calls = list(losses), []


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def lost_engines(monkeypatch) -> None:
    monkeypatch.setattr("hybrid_rl.engines.huggingface.HuggingFaceEngine", LostEngine)


@pytest.fixture(scope="module")
def undisturbed(make_config, train_here, tmp_path_factory):
    return train_here(make_config(tmp_path_factory.mktemp("undisturbed")))


def without_restarts(metrics: list[dict[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in row.items() if name != "rollout/restarts"} for row in metrics]


# Each step evaluates, then generates for training; a copy needs several calls of load_bucket.
@pytest.mark.parametrize(
    "mode, losses",
    [
        ("alias", [("generate", 1)]),
        ("alias", [("generate", 4)]),
        ("alias", [("generate", 5)]),
        ("alias", [("finish_sync", 2)]),
        ("copy", [("load_bucket", 8)]),
        ("copy", [("checksums", 2)]),
        ("copy", [("generate", 2), ("open_bucket", 2), ("generate", 4)]),
    ],
)
def test_a_run_goes_on_with_a_new_engine_to_the_same_results(
    undisturbed, make_config, train_here, lost_engines, tmp_path, mode, losses
):
    lose(*losses)
    rollout = {"restarts": len(losses)}
    found = train_here(make_config(tmp_path, rollout=rollout, sync={"mode": mode}, checkpoint={"phase_log": True}))
    assert without_restarts(found.metrics) == undisturbed.metrics
    assert found.rollouts == undisturbed.rollouts
    assert found.state == undisturbed.state
    for name, weights in undisturbed.weights.items():
        assert all(torch.equal(found.weights[name][key], weight) for key, weight in weights.items())
    assert json.loads((tmp_path / "run" / "heartbeat.json").read_text())["engine_restarts"] == len(losses)


def test_restarts_are_counted_in_the_metrics(make_config, train_here, lost_engines, tmp_path):
    lose(("generate", 4))
    found = train_here(make_config(tmp_path, rollout={"restarts": 2}))
    assert [row["rollout/restarts"] for row in found.metrics] == [0, 1]


def test_a_run_whose_restarts_are_used_up_ends_with_the_last_loss(make_config, train_here, lost_engines, tmp_path):
    lose(("generate", 2), ("generate", 3))
    with pytest.raises(EngineLostError, match=rf"^{LOSS}; rollout\.restarts = 1 are used up$"):
        train_here(make_config(tmp_path, rollout={"restarts": 1}))


def test_without_restarts_the_first_loss_ends_the_run(make_config, train_here, lost_engines, tmp_path):
    lose(("generate", 2))
    with pytest.raises(EngineLostError, match=f"^{LOSS}$"):
        train_here(make_config(tmp_path))


def run_rank_with_loss(config: Config) -> None:
    """Train; on rank 1 the engine is lost where LOST_IN says."""
    import hybrid_rl.engines.huggingface as module

    module.HuggingFaceEngine = LostEngine  # type: ignore[misc]
    if os.environ["RANK"] == "1":
        name, _, number = os.environ["LOST_IN"].partition(" ")
        lose((name, int(number)))
    ranks.run_rank(config)


def main() -> None:
    """Run the launcher's two ranks with the settings of a file."""
    config, num_processes = colocated.parse()
    colocated.choose_accelerator()
    assert num_processes
    ranks.launch_ranks(colocated.prepare(config), num_processes, run_rank_with_loss)


@pytest.mark.slow
@pytest.mark.parametrize("zero_stage, lost_in", [(2, "generate 3"), (3, "load_bucket 8")])
def test_all_ranks_go_on_with_new_engines_where_one_has_lost_its_own(
    make_config: Callable[..., Config], run_forked, read_run, tmp_path: Path, monkeypatch, zero_stage, lost_in
):
    found = []
    for number in (1000, int(lost_in.partition(" ")[2])):
        monkeypatch.setenv("LOST_IN", f"{lost_in.partition(' ')[0]} {number}")
        folder = tmp_path / str(number)
        folder.mkdir()
        update = {"zero_stage": zero_stage, "mini_batch_size": 8}
        config = make_config(folder, rollout={"restarts": 1}, update=update, sync={"mode": "copy"})
        (folder / "settings.yaml").write_text(yaml.safe_dump(as_dict(config)))
        ended = run_forked(__file__, "--config", str(folder / "settings.yaml"), "--num_processes", "2")
        assert ended.code == 0, ended.output
        found.append(read_run(config))
    expected, restarted = found
    assert [row["rollout/restarts"] for row in expected.metrics] == [0, 0]
    assert restarted.metrics[-1]["rollout/restarts"] == 1
    same = dataclasses.replace(restarted, metrics=without_restarts(restarted.metrics))
    assert same == dataclasses.replace(expected, metrics=without_restarts(expected.metrics))


if __name__ == "__main__":
    main()
