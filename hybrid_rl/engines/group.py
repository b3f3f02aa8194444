"""One rollout engine over the GPUs of several ranks: it runs on the first rank, and all ranks call it together."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

from hybrid_rl.batch import ConversationStart, Rollout
from hybrid_rl.distributed import World
from hybrid_rl.engines import Generation, RolloutEngine, RunConversations, Sampling
from hybrid_rl.machine.visible_devices import name_of_rank
from hybrid_rl.weights.bucket import Slot, device_key, joint_handle
from hybrid_rl.weights.protocols import TensorSlice

T = TypeVar("T")
Request = tuple[list[list[int]], Sequence[int] | None, int | None]
"""Prompts of a rank, a seed for each of them or None, and a seed for the engine's own generator or None."""


def visible_name(device: torch.device) -> str:
    """Return the name of a GPU that every process of the node can put into CUDA_VISIBLE_DEVICES; `cpu` for the CPU."""
    if device.type == "cpu":
        return "cpu"
    return name_of_rank(os.environ, device.index or 0)


class GroupEngine:
    """The interface of each rank of a group to the group's engine; see RolloutEngine for the methods.

    Every method except seed is a collective of the group. An error of the engine is raised on all ranks. The ranks wait
    through gloo, which does not occupy their GPUs.
    """

    def __init__(self, ranks: World, start: Callable[[list[str]], RolloutEngine]) -> None:
        """Start the engine on the first rank.

        Args:
            ranks: the group; see World.model_parallel_group.
            start: returns the engine; its argument are the names of the group's GPUs, see visible_name.
        """
        self._ranks = ranks
        self._engines: list[RolloutEngine] = []  # one on the first rank, none on the others
        self._seed: int | None = None
        self.weights_version = 0
        gpus = ranks.all_gather(visible_name(ranks.device))
        ranks.run_on_main(lambda: self._engines.append(start(gpus)))

    def _ask(self, work: Callable[[RolloutEngine], T]) -> T:
        """Return on every rank the result of a call of the engine."""
        return self._ranks.run_on_main(lambda: work(self._engines[0]), Generation)

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt of this rank, in order; all ranks pass the same sampling parameters."""
        requests = self._ranks.all_gather((list(prompts), seeds, self._seed))
        self._seed = None
        responses = self._ask(lambda engine: _generate(engine, requests, sampling))
        first = sum(len(other) for other, _, _ in requests[: self._ranks.rank])
        return responses[first : first + len(prompts)]

    def converse(self, starts: Sequence[ConversationStart], sampling: Sampling, run: RunConversations) -> list[Rollout]:
        """Return one conversation per start of this rank, in order; the first rank's environments answer all ranks."""
        requests = self._ranks.all_gather((list(starts), self._seed), ConversationStart)
        self._seed = None
        seeds = [seed for _, seed in requests if seed is not None]

        def converse() -> list[Rollout]:
            if seeds:
                self._engines[0].seed(seeds[0])
            return self._engines[0].converse([start for part, _ in requests for start in part], sampling, run)

        conversations = self._ranks.run_on_main(converse, Rollout)
        first = sum(len(other) for other, _ in requests[: self._ranks.rank])
        return conversations[first : first + len(starts)]

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator before the next generation; it suffices that one rank calls this."""
        self._seed = seed

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Let each worker of the engine map the bucket of the rank with the same GPU; all ranks pass the same plan.

        Raises:
            RuntimeError: two ranks have the same GPU.
        """
        handles = self._ranks.all_gather((device_key(self._ranks.device, self._ranks.rank), handle))
        devices = [device for device, _ in handles]
        if len(set(devices)) < len(devices):
            raise RuntimeError(f"each rank of an engine needs its own GPU; the ranks have {devices}")
        joint = joint_handle(dict(handles))
        self._ask(lambda engine: engine.open_bucket(joint, plan))

    def load_bucket(self, index: int) -> None:
        """Start to copy bucket `index` of every rank; all buckets before it are copied when this returns."""
        self._ask(lambda engine: engine.load_bucket(index))

    def finish_sync(self) -> None:
        """Finish the weight sync; weights_version is the same on all ranks. See RolloutEngine."""

        def finish(engine: RolloutEngine) -> int:
            engine.finish_sync()
            return engine.weights_version

        self.weights_version = self._ask(finish)

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksums of all workers of the engine, on every rank; see RolloutEngine."""
        return self._ask(lambda engine: engine.checksums(names))

    def unmap(self, tag: str) -> None:
        """Release the memory of `weights` or `kv_cache` on all GPUs of the group; see RolloutEngine."""
        self._ask(lambda engine: engine.unmap(tag))

    def map(self, tag: str) -> None:
        """Allocate the memory of a tag again, once every rank has released what must give way; see RolloutEngine."""
        self._ask(lambda engine: engine.map(tag))

    def close(self) -> None:
        """End the engine; a rank returns, and may free its bucket, after the engine has ended.

        A rank that closes because of an error does not wait, because the others may be in another collective.
        """
        for engine in self._engines:
            engine.close()
        if sys.exc_info()[0] is None:
            self._ranks.barrier()
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()


def _generate(engine: RolloutEngine, requests: Sequence[Request], sampling: Sampling) -> list[Generation]:
    """Return the responses to the prompts of all ranks, in the order of the ranks."""
    engine_seeds = [seed for _, _, seed in requests if seed is not None]
    if engine_seeds:
        engine.seed(engine_seeds[0])
    prompts = [ids for rank_prompts, _, _ in requests for ids in rank_prompts]
    seeds = [seed for _, rank_seeds, _ in requests if rank_seeds is not None for seed in rank_seeds]
    is_seeded = all(rank_seeds is not None for _, rank_seeds, _ in requests)
    return engine.generate(prompts, sampling, seeds if is_seeded else None)
