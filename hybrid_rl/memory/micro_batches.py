"""Micro-batches that run out of memory: all ranks start again with smaller ones, or the run ends with one sentence."""

import functools
import gc
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hybrid_rl.config import Config
from hybrid_rl.distributed import World
from hybrid_rl.errors import OutOfMemoryError

logger = logging.getLogger(__name__)

SAVERS = (
    "models.gradient_checkpointing = true, memory.swap = auto, or with several GPUs update.zero_stage = 3 or "
    "update.sequence_parallel_size = 2"
)
"""Settings that leave more memory for a sequence."""


@dataclass(frozen=True, kw_only=True)
class Shortage:
    """A micro-batch that ran out of memory."""

    rank: int
    num_sequences: int
    num_tokens: int


class TokenLimit:
    """Maximum tokens of a micro-batch, which falls where one runs out of memory, for the rest of the run."""

    def __init__(
        self, tokens: int, *, work: str = "SCORE", rank: int = 0, per_setting: int = 1, min_setting: int = 1
    ) -> None:
        """Start at a maximum.

        Args:
            tokens: maximum at the start of the run.
            work: what the micro-batches compute, for messages.
            rank: this rank among all ranks.
            per_setting: the maximum divided by update.micro_batch_tokens.
            min_setting: smallest update.micro_batch_tokens that a run accepts.
        """
        self.tokens = tokens
        self.work = work
        self.rank = rank
        self._per_setting = per_setting
        self._min_setting = min_setting

    def lower(self, shortages: Sequence[Shortage], *, is_logged: bool) -> None:
        """Lower the maximum to half of the smallest micro-batch that ran out of memory, and log the setting for it.

        Raises:
            OutOfMemoryError: one of them has no second sequence that could be split off.
        """
        for shortage in shortages:
            if shortage.num_sequences < 2:
                raise OutOfMemoryError(
                    f"out of memory in {self.work} on rank {shortage.rank}: a sequence of {shortage.num_tokens} tokens "
                    f"does not fit alone; lower rollout.max_response_tokens, or set {SAVERS}"
                )
        smallest = min(shortages, key=lambda shortage: shortage.num_tokens)
        self.tokens = smallest.num_tokens // 2
        if is_logged:
            logger.warning(
                "out of memory in %s on rank %d: a micro-batch of %d sequences and %d tokens does not fit, so it "
                "starts again with at most %d tokens, which hold for the rest of the run; %s avoids this",
                *(self.work, smallest.rank, smallest.num_sequences, smallest.num_tokens, self.tokens, self._remedy()),
            )

    def end(self, shortage: Shortage) -> OutOfMemoryError:
        """Return the error that ends the run where other ranks wait for this one in the middle of the work."""
        smaller = TokenLimit(shortage.num_tokens // 2, per_setting=self._per_setting, min_setting=self._min_setting)
        remedy = smaller._remedy() if shortage.num_sequences > 1 else SAVERS
        return OutOfMemoryError(
            f"out of memory in {self.work} on rank {shortage.rank}: a micro-batch of {shortage.num_sequences} "
            f"sequences and {shortage.num_tokens} tokens does not fit, and it cannot start again, because other ranks "
            f"wait for this one in a collective; set {remedy}"
        )

    def _remedy(self) -> str:
        """Return the setting that gives the maximum, or settings that help where a run accepts no such value."""
        setting = self.tokens // self._per_setting
        if setting >= self._min_setting:
            return f"update.micro_batch_tokens = {setting}"
        return f"update.micro_batch_tokens = {self._min_setting} with {SAVERS}"


@dataclass(frozen=True, kw_only=True)
class TokenLimits:
    """The limits of a run's micro-batches."""

    forward: TokenLimit
    """Forwards without gradient, of all models in SCORE."""
    actor: TokenLimit
    critic: TokenLimit


def make_limits(config: Config, forward_tokens: int, *, rank: int) -> TokenLimits:
    """Return the limits at the start of a run.

    Args:
        forward_tokens: maximum tokens of a forward without gradient, a multiple of update.micro_batch_tokens.
        rank: this rank among all ranks, for messages.
    """
    tokens, rollout = config.update.micro_batch_tokens, config.rollout
    min_setting = config.prompts.max_prompt_tokens + rollout.max_response_tokens
    if config.ptx.path is not None:
        min_setting = max(min_setting, config.ptx.max_tokens)
    start = functools.partial(TokenLimit, rank=rank, min_setting=min_setting)
    return TokenLimits(
        forward=start(forward_tokens, work="SCORE", per_setting=forward_tokens // tokens),
        actor=start(tokens, work="UPDATE_ACTOR"),
        critic=start(tokens, work="UPDATE_CRITIC"),
    )


class Attempt:
    """One try to compute micro-batches on all ranks; it ends early on a rank whose micro-batch does not fit."""

    def __init__(self, limit: TokenLimit, world: World) -> None:
        """Start.

        Args:
            limit: maximum tokens of a micro-batch, which `succeeded` lowers.
            world: ranks that start again together.
        """
        self._limit = limit
        self._world = world
        self._shortage: Shortage | None = None

    @contextmanager
    def micro_batch(self, lengths: Sequence[int], *, do_others_wait: bool) -> Iterator[None]:
        """Catch an out-of-memory error of the body.

        Args:
            lengths: tokens of each sequence of the micro-batch.
            do_others_wait: whether other ranks may be in a collective that this rank joins in the body.
        Raises:
            OutOfMemoryError: the body ran out of memory, and others wait.
        """
        try:
            yield
        except torch.OutOfMemoryError:
            rank = self._limit.rank
            self._shortage = Shortage(rank=rank, num_sequences=len(lengths), num_tokens=sum(lengths))
            if do_others_wait:
                raise self._limit.end(self._shortage) from None

    @property
    def has_room(self) -> bool:
        """Whether no micro-batch of this rank has run out of memory."""
        return self._shortage is None

    def do_all_have_room(self) -> bool:
        """Return whether no micro-batch of any rank has run out of memory; a collective."""
        return not self._world.max(int(not self.has_room))

    def succeeded(self) -> bool:
        """Return whether all micro-batches of all ranks fit; if not, lower the limit. A collective.

        Raises:
            OutOfMemoryError: a micro-batch cannot be smaller.
        """
        if self.do_all_have_room():
            return True
        shortages = [shortage for shortage in self._world.all_gather(self._shortage, Shortage) if shortage]
        self._limit.lower(shortages, is_logged=self._world.is_main)
        return False


def free_memory(device: torch.device) -> None:
    """Return the memory of a failed attempt to the device; no variable may refer to its tensors any more."""
    gc.collect()  # an exception and its traceback refer to each other, and to the tensors of its frames
    if device.type == "cuda":
        torch.cuda.empty_cache()
