"""One engine for two ranks, with HuggingFaceEngine as the engine: results of each rank, and errors on both ranks.

Run as a program, this file is one of the two ranks: python <file> <folder> <tiny>.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from hybrid_rl.batch import ConversationStart, Prompt, Rollout
from hybrid_rl.config import Config, ConfigError, RolloutConfig, UpdateConfig
from hybrid_rl.distributed import free_port, join_world
from hybrid_rl.engines import Generation, Request, RequestStream, Sampling
from hybrid_rl.engines.group import GroupEngine, visible_name
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.engines.vllm.environment import engine_environment, group_environment
from hybrid_rl.validate import check_ranks
from hybrid_rl.weights.bucket import IpcBucket, Slot, joint_handle, open_ipc_bucket
from tests.conftest import make_rollout, make_turns

CPU = torch.device("cpu")
PROMPTS = [[5, 9], [3, 4, 11], [7], [8, 8]]
SAMPLED = Sampling(temperature=1.0, max_tokens=6, stop_token_ids=())
SEEDS = [11, 12, 13, 14]
FIRST = 3  # number of prompts of rank 0; rank 1 has the others


def groups_of(size: int) -> Config:
    return Config(rollout=RolloutConfig(tensor_parallel_size=size))


class OddError(Exception):
    """An error that is built from more than a sentence."""

    def __init__(self, *, place: int) -> None:
        super().__init__(f"at place {place}")


class CountingEngine(HuggingFaceEngine):
    """HuggingFaceEngine that records its seeds."""

    def __init__(self, tiny: Path) -> None:
        super().__init__(str(tiny / "policy"), dtype=torch.float32, device=CPU)
        self.seeds: list[int] = []

    def seed(self, seed: int) -> None:
        self.seeds.append(seed)
        super().seed(seed)


def fill(engine: HuggingFaceEngine | GroupEngine, bucket: IpcBucket, tiny: Path) -> None:
    """Synchronize the weights of the policy's checkpoint in one bucket."""
    source = dict(HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU).parameters)
    slots, end = [], 0
    for name, tensor in source.items():
        slots.append(Slot(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, offset=end))
        slots[-1].view(bucket.tensor).copy_(tensor)
        end += slots[-1].nbytes
    engine.open_bucket(bucket.handle(), [slots])
    engine.load_bucket(0)
    engine.finish_sync()


def error_of(call: Any) -> str:
    """Return type and message of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def fail(error: Exception) -> None:
    raise error


def start_of(i: int) -> ConversationStart:
    prompt = Prompt(prompt_id=i, text="", token_ids=PROMPTS[i])
    return ConversationStart(prompt=prompt, sequence_id=i, seed=SEEDS[i], environment_seed=0)


def one_turn_each(stream: RequestStream, starts: Sequence[ConversationStart]) -> list[Rollout]:
    """Generate one turn per conversation."""
    stream.submit(
        [
            Request(number=i, token_ids=s.prompt.token_ids, max_tokens=SAMPLED.max_tokens, seed=s.seed)
            for i, s in enumerate(starts)
        ]
    )
    found = dict(stream.receive())
    ids = [found[i].token_ids for i in range(len(starts))]
    return [
        make_rollout(start.prompt.token_ids, own, sequence_id=start.sequence_id, turns=make_turns(len(own)))
        for start, own in zip(starts, ids, strict=True)
    ]


def fails(stream: RequestStream, starts: Sequence[ConversationStart]) -> list[Rollout]:
    raise ConfigError(f"no environment for {len(starts)} conversations")


def rank_of_two(folder: Path, tiny: Path) -> None:
    world = join_world()
    found: dict[str, Any] = {}
    made: list[CountingEngine] = []

    def start(gpus: list[str]) -> CountingEngine:
        found["gpus"] = gpus
        made.append(CountingEngine(tiny))
        return made[0]

    ranks = world.model_parallel_group(2)
    found["no start"] = error_of(lambda: GroupEngine(ranks, lambda gpus: fail(OSError(7))))
    engine = GroupEngine(ranks, start)
    mine = slice(0, FIRST) if world.rank == 0 else slice(FIRST, None)
    found["too early"] = error_of(lambda: engine.generate(PROMPTS[mine], SAMPLED, SEEDS[mine]))
    bucket = IpcBucket(1 << 20, CPU)
    fill(engine, bucket, tiny)
    found["engines"], found["version"] = len(made), engine.weights_version
    found["seeded"] = [asdict(g) for g in engine.generate(PROMPTS[mine], SAMPLED, SEEDS[mine])]
    if world.rank == 1:  # rank 0 has no prompts and does not seed
        engine.seed(5)
    found["unseeded"] = [g.token_ids for g in engine.generate([] if world.rank == 0 else PROMPTS, SAMPLED, None)]
    found["seeds"] = made[0].seeds if made else None
    starts = [start_of(i) for i in range(len(PROMPTS))]
    found["conversations"] = [asdict(r) for r in engine.converse(starts[mine], SAMPLED, one_turn_each)]
    found["no environment"] = error_of(lambda: engine.converse(starts[mine], SAMPLED, fails))
    found["sums"] = engine.checksums(["model.norm.weight"])
    found["odd"] = error_of(lambda: ranks.run_on_main(lambda: fail(OddError(place=3))))
    found["value"] = error_of(lambda: ranks.run_on_main(lambda: fail(ValueError("no"))))
    found["one node"] = world.ranks_on_nodes()
    os.environ["LOCAL_WORLD_SIZE"] = "1"  # as if each rank were on another node
    found["two nodes"] = world.ranks_on_nodes()
    if world.rank == 1:
        try:
            fail(KeyError("alone"))
        except KeyError:
            engine.close()  # returns although rank 0 does not call it
    world.barrier()
    torch.save(found, folder / f"rank{world.rank}.pt")
    if world.rank == 0:
        try:
            fail(KeyError("alone"))
        except KeyError:
            engine.close()


@pytest.fixture(scope="module")
def both(on_two_ranks: Any) -> list[dict[str, Any]]:
    """Results of the two ranks."""
    return on_two_ranks(__file__)


def test_the_engine_is_started_once_with_the_names_of_all_devices(both):
    assert [rank["engines"] for rank in both] == [1, 0]
    assert both[0]["gpus"] == ["cpu", "cpu"]
    assert [rank["version"] for rank in both] == [1, 1]


def test_every_rank_gets_the_responses_of_a_separate_engine(both, tiny):
    alone, bucket = CountingEngine(tiny), IpcBucket(1 << 20, CPU)
    fill(alone, bucket, tiny)
    expected = alone.generate(PROMPTS, SAMPLED, SEEDS)
    found = [Generation(**fields) for rank in both for fields in rank["seeded"]]
    assert [len(rank["seeded"]) for rank in both] == [FIRST, 1]
    assert [g.token_ids for g in found] == [g.token_ids for g in expected]
    assert [x for g in found for x in g.logprobs] == pytest.approx([x for g in expected for x in g.logprobs])


def test_every_rank_gets_its_conversations_from_one_loop(both):
    seeded = [fields["token_ids"] for rank in both for fields in rank["seeded"]]
    assert [len(rank["conversations"]) for rank in both] == [FIRST, 1]
    found = [rollout for rank in both for rollout in rank["conversations"]]
    assert [rollout["sequence_id"] for rollout in found] == list(range(len(found)))
    assert [rollout["response_ids"] for rollout in found] == seeded
    assert all(rollout["turns"][0]["num_tokens"] == len(rollout["response_ids"]) for rollout in found)


def test_a_failing_environment_is_the_error_of_both_ranks(both):
    sentence = f"ConfigError: no environment for {len(PROMPTS)} conversations"
    assert [rank["no environment"] for rank in both] == [sentence, sentence]


def test_the_seed_of_any_rank_reaches_the_engine(both):
    assert [len(rank["unseeded"]) for rank in both] == [0, 4]
    assert both[0]["seeds"] == [5]


def test_all_ranks_see_the_same_checksums(both):
    assert both[0]["sums"] == both[1]["sums"] and list(both[0]["sums"][0]) == ["model.norm.weight"]


def test_an_error_of_the_engine_is_raised_on_both_ranks(both):
    sentence = "RuntimeError: generate: the engine's weights were dropped or never filled; sync the trainer's first"
    assert [rank["too early"] for rank in both] == [sentence, sentence]


@pytest.mark.parametrize(
    "call, sentence", [("no start", "OSError: 7"), ("odd", "OddError: at place 3"), ("value", "ValueError: no")]
)
def test_an_error_of_any_class_reaches_the_other_rank_with_name_and_message(both, call, sentence):
    assert [rank[call] for rank in both] == [sentence, f"RuntimeError: {sentence}"]


def test_every_rank_knows_the_numbers_of_ranks_on_all_nodes(both):
    assert [rank["one node"] for rank in both] == [[2, 2], [2, 2]]
    assert [rank["two nodes"] for rank in both] == [[1, 1], [1, 1]]


def test_groups_must_fill_the_ranks_of_every_node():
    check_ranks(groups_of(2), num_ranks=2, ranks_on_nodes=[2, 2])
    message = "rollout.tensor_parallel_size = 2: must divide the ranks of every node, and a node has 1"
    with pytest.raises(ConfigError, match=f"^{message}$"):
        check_ranks(groups_of(2), num_ranks=2, ranks_on_nodes=[1, 1])
    with pytest.raises(ConfigError, match=r"^rollout.tensor_parallel_size = 3: must divide the number of ranks, 2$"):
        check_ranks(groups_of(3), num_ranks=2, ranks_on_nodes=[1, 1])
    check_ranks(Config(), num_ranks=1, ranks_on_nodes=[1])
    with pytest.raises(ConfigError, match="must divide the number of ranks, 1"):
        check_ranks(groups_of(2), num_ranks=1, ranks_on_nodes=[1])


def test_every_kind_of_group_is_checked():
    for name in ("sequence_parallel_size", "tensor_parallel_size"):
        with pytest.raises(ConfigError, match=f"^update.{name} = 2: must divide the number of ranks, 1$"):
            check_ranks(Config(update=UpdateConfig(**{name: 2})), num_ranks=1, ranks_on_nodes=[1])


def test_each_worker_opens_the_bucket_of_its_device():
    buckets = [IpcBucket(8, CPU) for _ in range(2)]
    for value, bucket in enumerate(buckets):
        bucket.tensor.fill_(value + 1)
    joint = joint_handle({f"cpu {i}": bucket.handle() for i, bucket in enumerate(buckets)})
    assert [open_ipc_bucket(joint, CPU, worker=i).tolist() for i in range(2)] == [[1] * 8, [2] * 8]
    with pytest.raises(RuntimeError, match="no bucket for engine worker 2 on cpu 2, only on cpu 0, cpu 1"):
        open_ipc_bucket(joint, CPU, worker=2)


@pytest.mark.parametrize(
    "visible, index, name", [(None, 1, "1"), ("3", 0, "3"), ("4,6", 1, "6"), ("GPU-1a,GPU-2b", 0, "GPU-1a")]
)
def test_a_gpu_has_the_same_name_in_every_process_of_a_node(monkeypatch, visible, index, name):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert visible_name(torch.device("cuda", index)) == name
    assert visible_name(CPU) == "cpu"


def test_processes_of_the_engine_see_all_gpus_of_the_group():
    assert group_environment([], has_cuda=True) == {}
    assert group_environment(["3", "1"], has_cuda=True) == {"CUDA_VISIBLE_DEVICES": "3,1"}
    assert group_environment(["cpu", "cpu"], has_cuda=False) == {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


JOIN_ALONE = """
import datetime
import sys
import torch.distributed as dist
method = f"tcp://127.0.0.1:{sys.argv[1]}"
dist.init_process_group("gloo", init_method=method, world_size=1, rank=0, timeout=datetime.timedelta(seconds=20))
"""


def test_the_engine_of_a_launched_rank_has_its_own_store(monkeypatch):
    """Like vLLM on a GPU. With the launcher as the owner of the store, it would wait in vain."""
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("RANK", "1")
    with engine_environment():
        subprocess.run([sys.executable, "-c", JOIN_ALONE, str(free_port())], check=True, timeout=60)
    assert (os.environ["TORCHELASTIC_USE_AGENT_STORE"], os.environ["RANK"]) == ("True", "1")


def test_a_single_launched_process_joins_alone():
    code = "from hybrid_rl.distributed import join_world; assert join_world(20.0).sum(__import__('torch').ones(1)) == 1"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--no-python", sys.executable, "-c", code]
    subprocess.run(command, check=True, timeout=100)


if __name__ == "__main__":
    rank_of_two(Path(sys.argv[1]), Path(sys.argv[2]))
