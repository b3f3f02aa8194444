"""One rollout engine over the GPUs of several ranks: the first of them leads it, and all call it together."""

import os
import pickle
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar, cast

import torch

from hybrid_rl.config import Config, check
from hybrid_rl.distributed import World
from hybrid_rl.engines import Generation, RolloutEngine, Sampling
from hybrid_rl.weights.bucket import Slot, device_key, joint_handle
from hybrid_rl.weights.protocols import TensorSlice

T = TypeVar("T")
Request = tuple[list[list[int]], Sequence[int] | None, int | None]
"""What a rank wants generated: prompts, a seed for each or None, and a seed for the engine's own generator or None."""


def group_sizes(config: Config) -> dict[str, int]:
    """Return by setting how many consecutive ranks of a node work together."""
    return {
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "update.sequence_parallel_size": config.update.sequence_parallel_size,
        "update.tensor_parallel_size": config.update.tensor_parallel_size,
    }


def check_groups(config: Config, world: World) -> None:
    """Check that the ranks can form the groups that are set; every rank calls it.

    Raises:
        ConfigError: they cannot.
    """
    on_nodes = world.all_gather(int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    for name, size in group_sizes(config).items():
        field, odd = f"{name} = {size}", [number for number in on_nodes if number % size]
        check(world.size % size == 0, f"{field}: must divide the number of ranks, {world.size}")
        check(not odd, f"{field}: must divide the ranks of every node, for no group spans two; a node has {odd[:1]}")


def visible_name(device: torch.device) -> str:
    """Return the name that CUDA_VISIBLE_DEVICES of any process of the node has for a GPU; `cpu` for the CPU."""
    if device.type == "cpu":
        return "cpu"
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    index = device.index or 0
    return names.split(",")[index] if names else str(index)


def lead(ranks: World, work: Callable[[], T]) -> T:
    """Return on every rank what work gives on the first, which begins when all ranks are here and the others wait.

    Raises:
        Exception: what work raised, on every rank; a RuntimeError with its words where it cannot be pickled.
    """
    ranks.barrier()
    result: T | None = None
    error: Exception | None = None
    if ranks.is_main:
        try:
            result = work()
        except Exception as caught:
            error = caught
    result, told = ranks.all_gather((result, _portable(error)))[0]
    if error or told:
        raise error or told
    return cast(T, result)


def _portable(error: Exception | None) -> Exception | None:
    """Return an error that another process can read."""
    try:
        return cast(Exception | None, pickle.loads(pickle.dumps(error)))
    except Exception:  # whatever an exception's own __reduce__ or __init__ may raise
        return RuntimeError(f"{type(error).__name__}: {error}")


class GroupEngine:
    """A rank's share of one engine; see hybrid_rl.engines.RolloutEngine for its contract.

    Every method but seed is a collective of the group: all its ranks call it, in the same order. What the engine raises
    is raised on all of them. The ranks wait over gloo, so that no GPU is kept busy with waiting.
    """

    def __init__(self, ranks: World, start: Callable[[list[str]], RolloutEngine]) -> None:
        """Start the engine on the first rank.

        Args:
            ranks: of the group, see World.model_parallel_group.
            start: gets the names of the group's GPUs, see visible_name.
        """
        self._ranks = ranks
        self._engines: list[RolloutEngine] = []  # one where this rank leads
        self._seed: int | None = None
        self.weights_version = 0
        gpus = ranks.all_gather(visible_name(ranks.device))
        lead(ranks, lambda: self._engines.append(start(gpus)))

    def _ask(self, work: Callable[[RolloutEngine], T]) -> T:
        return lead(self._ranks, lambda: work(self._engines[0]))

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt of this rank, in order; sampling is the same on all ranks."""
        requests = self._ranks.all_gather((list(prompts), seeds, self._seed))
        self._seed = None
        responses = self._ask(lambda engine: _generate(engine, requests, sampling))
        first = sum(len(theirs) for theirs, _, _ in requests[: self._ranks.rank])
        return responses[first : first + len(prompts)]

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator before the next generation; a rank without prompts need not call it."""
        self._seed = seed

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Let each engine worker map the bucket of the rank whose GPU it works on; the plan is the same on all ranks.

        Raises:
            RuntimeError: two ranks are on one GPU.
        """
        handles = self._ranks.all_gather((device_key(self._ranks.device, self._ranks.rank), handle))
        places = [place for place, _ in handles]
        if len(set(places)) < len(places):
            raise RuntimeError(f"the ranks of an engine must have a GPU each; theirs are {places}")
        joint = joint_handle(dict(handles))
        self._ask(lambda engine: engine.open_bucket(joint, plan))

    def load_bucket(self, index: int) -> None:
        """Begin to copy the plan's bucket `index` of every rank; on none has one before it still to be copied."""
        self._ask(lambda engine: engine.load_bucket(index))

    def finish_sync(self) -> None:
        """Forget everything computed with older weights and count a hand-over, the same on all ranks."""

        def finish(engine: RolloutEngine) -> int:
            engine.finish_sync()
            return engine.weights_version

        self.weights_version = self._ask(finish)

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksums of all engine workers, on all ranks."""
        return self._ask(lambda engine: engine.checksums(names))

    def unmap(self, tag: str) -> None:
        """Give up `weights` or `kv_cache` on all GPUs of the group."""
        self._ask(lambda engine: engine.unmap(tag))

    def map(self, tag: str) -> None:
        """Take that memory again, once every rank has made room."""
        self._ask(lambda engine: engine.map(tag))

    def close(self) -> None:
        """End the engine; only then may a rank free the bucket that a worker has open.

        A rank that ends with an error does not wait: the others may be in another collective, and would never come.
        """
        for engine in self._engines:
            engine.close()
        if sys.exc_info()[0] is None:
            self._ranks.barrier()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _generate(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
    """Return the responses to all ranks' prompts, rank by rank."""
    engine_seeds = [seed for _, _, seed in requests if seed is not None]
    if engine_seeds:
        engine.seed(engine_seeds[0])
    prompts = [ids for theirs, _, _ in requests for ids in theirs]
    seeds = [seed for _, theirs, _ in requests if theirs is not None for seed in theirs]
    is_seeded = all(theirs is not None for _, theirs, _ in requests)
    return engine.generate(prompts, sampling, seeds if is_seeded else None)
