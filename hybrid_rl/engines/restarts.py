"""A rollout engine that a new one can replace after it was lost, on all ranks at once."""

from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from hybrid_rl.batch import ConversationStart, Rollout
from hybrid_rl.distributed import World
from hybrid_rl.engines import Generation, RolloutEngine, RunConversations, Sampling
from hybrid_rl.errors import EngineLostError
from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.protocols import TensorSlice

T = TypeVar("T")


class StartEngine(Protocol):
    """Starts an engine without the trainer's weights, or with aliases of them."""

    def __call__(self, *, is_restart: bool = False) -> RolloutEngine:
        """Return the engine; is_restart: whether the trainer's models are loaded."""
        ...


class RestartableEngine:
    """The rollout engine of this rank; see RolloutEngine for the methods.

    The loss of one rank's engine is an error of all ranks: every method except seed, unmap and close is a collective of
    all ranks, which call them in one order. `restart` starts the engines of all ranks again.
    """

    def __init__(self, start: StartEngine, ranks: World) -> None:
        """Start the engine.

        Args:
            start: starts an engine; a new one may start when the one before is closed.
            ranks: all ranks.
        """
        self._start = start
        self._ranks = ranks
        self._loss: EngineLostError | None = None
        self._engine = start()
        self.num_restarts = 0
        self.weights_version = 0

    def restart(self) -> None:
        """End the engine, in whatever state it is, and start a new one; a collective.

        Raises:
            EngineLostError: the new engine of a rank is lost while it starts.
        """
        self.num_restarts += 1
        self._engine.close()
        self._loss = None
        self.weights_version = 0
        self._engine = self._together(lambda: self._start(is_restart=True))

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order; see RolloutEngine."""
        return self._together(lambda: self._engine.generate(prompts, sampling, seeds))

    def converse(self, starts: Sequence[ConversationStart], sampling: Sampling, run: RunConversations) -> list[Rollout]:
        """Return one conversation per start, in order; see RolloutEngine."""
        return self._together(lambda: self._engine.converse(starts, sampling, run))

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator; an engine that is lost is noticed by the next generation."""
        try:
            self._engine.seed(seed)
        except EngineLostError as error:
            self._loss = error

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket; see RolloutEngine."""
        self._together(lambda: self._engine.open_bucket(handle, plan))

    def load_bucket(self, index: int) -> None:
        """Start to copy a bucket; see RolloutEngine."""
        self._together(lambda: self._engine.load_bucket(index))

    def finish_sync(self) -> None:
        """Finish the weight sync; see RolloutEngine."""
        self._together(self._engine.finish_sync)
        self.weights_version = self._engine.weights_version

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksums of the named tensors; see RolloutEngine."""
        return self._together(lambda: self._engine.checksums(names))

    def unmap(self, tag: str) -> None:
        """Release the memory of a tag. An engine that is lost is closed, which releases all; its next use raises."""
        if self._loss is None:
            try:
                self._engine.unmap(tag)
            except EngineLostError as error:
                self._loss = error
                self._engine.close()

    def map(self, tag: str) -> None:
        """Allocate the memory of a tag again; see RolloutEngine."""
        self._together(lambda: self._engine.map(tag))

    def close(self) -> None:
        """End the engine and its processes."""
        self._engine.close()

    def _together(self, work: Callable[[], T]) -> T:
        """Return the result of a call of the engine; a collective.

        Raises:
            EngineLostError: the engine of any rank is lost; on all ranks the error of the first of them.
        """
        result: list[T] = []
        other: Exception | None = None
        if self._loss is None:
            try:
                result.append(work())
            except EngineLostError as error:
                self._loss = error
            except Exception as error:  # of an environment; the other ranks learn of it where they wait next
                other = error
        losses = [loss for loss in self._ranks.all_gather(str(self._loss or "")) if loss]
        if losses:
            raise EngineLostError(losses[0]) from self._loss
        if other:
            raise other
        return result[0]
