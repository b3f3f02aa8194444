"""One vLLM engine over two ranks gives the same training as an engine on one GPU; every rank raises its errors.

Run as a program, this file is one of the two ranks: python <file> <folder> <tiny>.
"""

import contextlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch import Tensor

from hybrid_rl import build, trainer
from hybrid_rl.config import Config, as_dict
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.memory.residency import Phase
from hybrid_rl.run import Run
from hybrid_rl.weights.sync import CopySync
from hybrid_rl.weights.verify import SyncError

pytestmark = pytest.mark.slow

SETTINGS = "TENSOR_PARALLEL_SETTINGS"
VICTIM = "model.layers.1.mlp.up_proj.weight"
GREEDY = Sampling(temperature=0.0, max_tokens=4, stop_token_ids=(0,))


def sync_weights(run: Run) -> str:
    """Synchronize the weights, and return the message of a failed verification."""
    with run.memory.phase(Phase.SYNC):
        try:
            run.weight_sync.sync()
        except SyncError as error:
            return str(error)
    return ""


def lose_one_tensor(sync: CopySync) -> tuple[list[Tensor], int, Tensor]:
    """Copy one tensor to memory outside of the bucket; return the list, the index and the view that restore it."""
    for filling in sync.fills:
        if VICTIM in filling.names:
            index = filling.names.index(VICTIM)
            found = filling.views, index, filling.views[index]
            filling.views[index] = torch.empty_like(filling.views[index])
            return found
    raise LookupError(VICTIM)


def refused(run: Run) -> str:
    """Return the error of a generation whose weights are unmapped."""
    run.engine.unmap("weights")
    try:
        run.engine.generate([[5, 9]], GREEDY, None)
    except RuntimeError as error:
        return str(error)
    return ""


def rank_of_two(folder: Path) -> None:
    from launch.colocated import parse

    run = build.build(parse(["--config", os.environ[SETTINGS]])[0])
    rank, sync = run.world.rank, run.weight_sync
    assert isinstance(sync, CopySync)
    found: dict[str, Any] = {}
    try:
        with run.recorder:
            trainer.loop(run)
        found["held"] = run.engine.checksums([name for name, _, _ in run.actor.named_shapes()])
        prompts = [[5, 9], [3, 4, 11], [7]][rank:]  # three prompts on the first rank, two on the second
        with run.memory.phase(Phase.ROLLOUT):
            found["greedy"] = [g.token_ids for g in run.engine.generate(prompts, GREEDY, None)]
        if rank == 1:
            views, index, view = lose_one_tensor(sync)
        found["fault"] = sync_weights(run)
        if rank == 1:
            views[index] = view
        found["after"] = sync_weights(run)
        found["version"] = run.engine.weights_version
        found["refused"] = refused(run)
    finally:
        run.close()
    multiprocessing.active_children()  # joins the processes that have ended
    found["children"] = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # the process has just ended
            if "resource_tracker" not in " ".join(process.cmdline()):
                found["children"].append(process.name())
    torch.save(found, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def settings(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> dict[int, Config]:
    """Settings of a run, by the number of ranks that its engine spans."""
    return {
        size: make_config(
            tmp_path_factory.mktemp(f"engine_of_{size}"),
            rollout={"engine": "vllm", "tensor_parallel_size": size},
            update={"zero_stage": 3},
            sync={"mode": "copy", "num_verified": 100},
        )
        for size in (1, 2)
    }


@pytest.fixture(scope="module")
def ranks(settings: dict[int, Config], on_two_ranks: Callable[[str], list[Any]]) -> Iterator[list[dict[str, Any]]]:
    """Results of the two ranks."""
    path = Path(settings[2].run.dir) / "settings.yaml"
    path.write_text(yaml.safe_dump(as_dict(settings[2])))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(SETTINGS, str(path))
        yield on_two_ranks(__file__)


def test_two_ranks_with_one_engine_train_as_one_rank_does(
    settings: dict[int, Config],
    ranks: list[dict[str, Any]],
    lent_engine: VllmEngine,
    train_here: Callable,
    read_run: Callable,
) -> None:
    expected, found = train_here(settings[1]), read_run(settings[2])
    assert len(found.metrics) == 2
    for row, wanted in zip(found.metrics, expected.metrics, strict=True):
        assert row["rollout/logprob_gap"] < 1e-4
        assert row == pytest.approx(wanted, rel=1e-3, abs=1e-5)
    for rows, wanted in zip(found.rollouts, expected.rollouts, strict=True):
        assert [(r["prompt_id"], r["response"]) for r in rows] == [(r["prompt_id"], r["response"]) for r in wanted]


def test_each_worker_holds_its_shard(ranks: list[dict[str, Any]]) -> None:
    assert ranks[0]["held"] == ranks[1]["held"]
    first, second = ranks[0]["held"]
    slices = [{name: [part for part, _ in parts] for name, parts in held.items()} for held in (first, second)]
    layer = "model.layers.0"
    for worker, held in enumerate(slices):  # 64 x 32 by rows, 32 x 64 by columns; both hold the only key head
        assert held[f"{layer}.mlp.up_proj.weight"] == [((32, 32), (32, 1), worker * 32 * 32)]
        assert held[f"{layer}.mlp.down_proj.weight"] == [((32, 32), (64, 1), worker * 32)]
        assert held[f"{layer}.self_attn.k_proj.weight"] == [((32, 32), (32, 1), 0)]
    assert first[VICTIM] != second[VICTIM]


def test_every_rank_gets_its_own_responses(ranks: list[dict[str, Any]]) -> None:
    first, second = ranks[0]["greedy"], ranks[1]["greedy"]
    assert len(first) == 3 and len(second) == 2
    assert first[1:] == second and first[0] != first[1]


def test_a_stale_tensor_of_one_worker_is_named_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        assert rank["fault"] == f"tensor {VICTIM} differs between trainer and engine worker 1 after the weight sync"
        assert rank["after"] == ""
        assert rank["version"] == 5  # before each of two steps, at the end, and twice in rank_of_two


def test_what_the_engine_raises_is_raised_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    assert {rank["refused"] for rank in ranks} == {
        "generate: the engine's weights were dropped or never filled; sync the trainer's first"
    }


def test_no_process_is_left(ranks: list[dict[str, Any]]) -> None:
    assert [rank["children"] for rank in ranks] == [[], []]


if __name__ == "__main__":
    rank_of_two(Path(sys.argv[1]))
