"""One engine for two ranks, with the oracle as the engine: who gets what, and that nobody waits for ever.

As a program this file is one of the two ranks: python <file> <folder> <tiny>.
"""

import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.config import Config, ConfigError, RolloutConfig, UpdateConfig
from hybrid_rl.distributed import World, free_port, join_world
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.group import GroupEngine, check_groups, lead, visible_name
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.engines.vllm.environment import engine_environment, group_environment
from hybrid_rl.weights.bucket import IpcBucket, Slot, joint_handle, open_ipc_bucket

CPU = torch.device("cpu")
PROMPTS = [[5, 9], [3, 4, 11], [7], [8, 8]]
SAMPLED = Sampling(temperature=1.0, max_tokens=6, stop_token_ids=())
SEEDS = [11, 12, 13, 14]
FIRST = 3  # prompts of rank 0; rank 1 has the others


def groups_of(size: int) -> Config:
    return Config(rollout=RolloutConfig(tensor_parallel_size=size))


class OddError(Exception):
    """Cannot be read back by another process."""

    def __init__(self, *, place: int) -> None:
        super().__init__(f"at place {place}")


class CountingEngine(HuggingFaceEngine):
    """The oracle, which writes down its seeds."""

    def __init__(self, tiny: Path) -> None:
        super().__init__(str(tiny / "policy"), dtype=torch.float32, device=CPU)
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)
        super().seed(seed)


def fill(engine: HuggingFaceEngine | GroupEngine, bucket: IpcBucket, tiny: Path) -> None:
    """Hand the policy's own weights over in one fill; the bucket has room for them."""
    source = dict(HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)._parameters)
    slots, end = [], 0
    for name, tensor in source.items():
        slots.append(Slot(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=end))
        slots[-1].view(bucket.tensor).copy_(tensor)
        end += slots[-1].nbytes
    engine.open_bucket(bucket.handle(), [slots])
    engine.load_bucket(0)
    engine.finish_sync()


def words(call: Any) -> str:
    """Return type and words of what a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail(error: Exception) -> None:
    raise error


def rank_of_two(folder: Path, tiny: Path) -> None:
    world = join_world()
    found: dict[str, Any] = {}
    made: list[CountingEngine] = []

    def start(gpus: list[str]) -> CountingEngine:
        found["gpus"] = gpus
        made.append(CountingEngine(tiny))
        return made[0]

    ranks = world.model_parallel_group(2)
    found["no start"] = words(lambda: GroupEngine(ranks, lambda gpus: fail(OSError(7))))
    engine = GroupEngine(ranks, start)
    mine = slice(0, FIRST) if world.rank == 0 else slice(FIRST, None)
    found["too early"] = words(lambda: engine.generate(PROMPTS[mine], SAMPLED, SEEDS[mine]))
    bucket = IpcBucket(1 << 20, CPU)
    fill(engine, bucket, tiny)
    bucket.unlink()
    found["engines"], found["version"] = len(made), engine.weights_version
    found["seeded"] = [asdict(g) for g in engine.generate(PROMPTS[mine], SAMPLED, SEEDS[mine])]
    if world.rank == 1:  # a rank without prompts does not seed
        engine.seed(5)
    found["unseeded"] = [g.token_ids for g in engine.generate([] if world.rank == 0 else PROMPTS, SAMPLED, None)]
    found["seeds"] = made[0].seeds if made else None
    found["sums"] = engine.checksums(["model.norm.weight"])
    found["odd"] = words(lambda: lead(ranks, lambda: fail(OddError(place=3))))
    found["value"] = words(lambda: lead(ranks, lambda: fail(ValueError("no"))))
    found["nodes"] = words(lambda: check_groups(groups_of(2), world))
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each were on a node of its own
    found["apart"] = words(lambda: check_groups(groups_of(2), world))
    found["three"] = words(lambda: check_groups(groups_of(3), world))
    if world.rank == 1:
        try:
            fail(KeyError("alone"))
        except KeyError:
            engine.close()  # returns, although rank 0 is not in it
    world.barrier()
    torch.save(found, folder / f"rank{world.rank}.pt")
    if world.rank == 0:
        try:
            fail(KeyError("alone"))
        except KeyError:
            engine.close()


@pytest.fixture(scope="module")
def both(on_two_ranks: Any) -> list[dict[str, Any]]:
    """What the two ranks saw."""
    return on_two_ranks(__file__)


def test_the_engine_is_started_once_and_told_of_every_device(both):
    assert [rank["engines"] for rank in both] == [1, 0]
    assert both[0]["gpus"] == ["cpu", "cpu"]
    assert [rank["version"] for rank in both] == [1, 1]


def test_every_rank_gets_what_an_engine_of_its_own_would_give(both, tiny):
    alone = CountingEngine(tiny)
    fill(alone, IpcBucket(1 << 20, CPU), tiny)
    expected = alone.generate(PROMPTS, SAMPLED, SEEDS)
    found = [Generation(**fields) for rank in both for fields in rank["seeded"]]
    assert [len(rank["seeded"]) for rank in both] == [FIRST, 1]
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [x for g in found for x in g.logprobs] == pytest.approx([x for g in expected for x in g.logprobs])


def test_a_seed_of_any_rank_reaches_the_engine(both):
    assert [len(rank["unseeded"]) for rank in both] == [0, 4]
    assert both[0]["seeds"] == [5]


def test_all_ranks_see_the_same_checksums(both):
    assert both[0]["sums"] == both[1]["sums"] and list(both[0]["sums"][0]) == ["model.norm.weight"]


@pytest.mark.parametrize(
    "call, sentence",
    [
        ("no start", "OSError: 7"),
        ("too early", "RuntimeError: generate: the engine's weights were dropped or never filled"),
        ("value", "ValueError: no"),
    ],
)
def test_what_the_first_rank_raises_is_raised_on_both(both, call, sentence):
    assert both[0][call] == both[1][call] and both[0][call].startswith(sentence)


def test_an_error_that_cannot_be_sent_is_told_in_its_words(both):
    assert [rank["odd"] for rank in both] == ["OddError: at place 3", "RuntimeError: OddError: at place 3"]


def test_groups_must_fill_the_ranks_of_every_node(both):
    assert [rank["nodes"] for rank in both] == ["", ""]
    told = "ConfigError: rollout.tensor_parallel_size = 2: must divide the ranks of every node, for no group spans two"
    assert all(rank["apart"].startswith(told) for rank in both)
    assert both[0]["three"] == "ConfigError: rollout.tensor_parallel_size = 3: must divide the number of ranks, 2"
    nodes = World(rank=0, size=1, local_rank=0, device=CPU)
    check_groups(Config(), nodes)
    with pytest.raises(ConfigError, match="must divide the number of ranks, 1"):
        check_groups(groups_of(2), nodes)


def test_every_kind_of_group_is_checked():
    nodes = World(rank=0, size=1, local_rank=0, device=CPU)
    for name in ("sequence_parallel_size", "tensor_parallel_size"):
        with pytest.raises(ConfigError, match=f"^update.{name} = 2: must divide the number of ranks, 1$"):
            check_groups(Config(update=UpdateConfig(**{name: 2})), nodes)


def test_each_worker_opens_the_bucket_at_its_place():
    buckets = [IpcBucket(8, CPU) for _ in range(2)]
    for value, bucket in enumerate(buckets):
        bucket.tensor.fill_(value + 1)
    joint = joint_handle({f"cpu {i}": bucket.handle() for i, bucket in enumerate(buckets)})
    assert [open_ipc_bucket(joint, CPU, worker=i).tolist() for i in range(2)] == [[1] * 8, [2] * 8]
    with pytest.raises(RuntimeError, match="no bucket for engine worker 2 on cpu 2, only on cpu 0, cpu 1"):
        open_ipc_bucket(joint, CPU, worker=2)
    for bucket in buckets:
        bucket.unlink()


@pytest.mark.parametrize(
    "visible, index, name", [(None, 1, "1"), ("3", 0, "3"), ("4,6", 1, "6"), ("GPU-1a,GPU-2b", 0, "GPU-1a")]
)
def test_a_gpu_has_one_name_on_its_node(monkeypatch, visible, index, name):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_name(torch.device("cuda", index)) == name
    assert visible_name(CPU) == "cpu"


def test_the_engines_processes_see_all_gpus_of_the_group():
    assert group_environment([], has_cuda=True) == {}
    assert group_environment(["3", "1"], has_cuda=True) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert group_environment(["cpu", "cpu"], has_cuda=False) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


MEETS_ITSELF = """
import datetime
import sys
import torch.distributed as dist
method = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=method, world_size=1, rank=0, timeout=datetime.timedelta(seconds=20))
"""


def test_an_engine_of_a_launched_rank_meets_at_a_store_of_its_own(monkeypatch):
    """As vLLM does on a GPU; told that the launcher serves the store, it would wait for one that is not there."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")
    with engine_environment():
        subprocess.run([sys.executable, "-c", MEETS_ITSELF, str(free_port())], check=True, timeout=60)
    assert (os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["RANK"]) == ("True", "1")


def test_one_process_of_a_launcher_joins_itself():
    code = "from hybrid_rl.distributed import join_world; assert join_world(20.0).sum(__import__('torch').ones(1)) == 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=100)


if __name__ == "__main__":
    rank_of_two(Path(sys.argv[1]), Path(sys.argv[2]))
