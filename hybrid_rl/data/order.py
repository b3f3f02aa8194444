"""The order in which the steps of a run take its prompts."""

import hashlib
import random
from collections.abc import Sequence
from typing import Any, Protocol

from hybrid_rl.batch import Prompt
from hybrid_rl.config import check
from hybrid_rl.data.mixing import Mixture


class Order(Protocol):
    """An endless sequence of rows, which can resume."""

    settings: dict[str, Any]
    """What the sequence depends on, besides the rows."""

    def draw(self, num_draws: int) -> list[int]:
        """Return the next rows."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state with the same settings."""
        ...


class Epochs:
    """Rows in epochs that have each row once; a draw ends with its epoch, so that the last one may be smaller."""

    def __init__(self, size: int, *, seed: int, shuffle: bool) -> None:
        """Start at epoch 0.

        Args:
            size: number of rows.
            seed: of the order of every epoch.
            shuffle: whether the order differs from that of the data set.
        """
        self.settings: dict[str, Any] = {"seed": seed, "shuffle": shuffle, "weights": None}
        self._size = size
        self._start(0)

    def draw(self, num_draws: int) -> list[int]:
        """Return the next rows of the epoch, or the first ones of the next epoch; see Order."""
        if self._position == self._size:
            self._start(self._epoch + 1)
        rows = self._order[self._position : self._position + num_draws]
        self._position += len(rows)
        return rows

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch and the position in it."""
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state; see Order."""
        self._start(state["epoch"])
        self._position = state["position"]

    def _start(self, epoch: int) -> None:
        self._epoch, self._position = epoch, 0
        self._order = list(range(self._size))
        if self.settings["shuffle"]:
            random.Random(f"{self.settings['seed']} {epoch}").shuffle(self._order)


class PromptLoader:
    """An endless sequence of batches of prompts, which can resume at any step.

    The order depends on seed and data alone and is the same on every rank. Without a mixture, rank r of n takes every
    n-th prompt of a batch from the r-th on. Of a mixture each rank takes consecutive prompts, which follow the weights.
    """

    def __init__(
        self,
        prompts: list[Prompt],
        *,
        batch_size: int,
        seed: int,
        shuffle: bool,
        rank: int = 0,
        world_size: int = 1,
        mixture: Mixture | None = None,
    ) -> None:
        """Start at the first step.

        Args:
            batch_size: prompts of one step over all ranks.
            seed: of the order of every epoch.
            shuffle: whether the order differs from that of the data set.
            rank, world_size: of this process.
            mixture: order of the rows of several data sets; None takes epochs over all prompts.
        Raises:
            ConfigError: there are no prompts, or batch_size is not positive.
        """
        check(bool(prompts), "the prompt loader got no prompts")
        check(batch_size > 0, f"batch_size = {batch_size}: must be greater than 0")
        self._prompts = prompts
        self._batch_size = batch_size
        self._rank, self._world_size = rank, world_size
        self._is_mixed = mixture is not None
        self._order: Order = mixture or Epochs(len(prompts), seed=seed, shuffle=shuffle)
        self._fingerprint = _fingerprint(prompts)

    @property
    def prompts(self) -> list[Prompt]:
        """All prompts, over all ranks, in the order of the data set."""
        return self._prompts

    def next_batch(self) -> list[Prompt]:
        """Return this rank's prompts of the next step; may be empty if the batch has fewer prompts than ranks."""
        rows = self._order.draw(self._batch_size)
        if self._is_mixed:
            bounds = [len(rows) * rank // self._world_size for rank in (self._rank, self._rank + 1)]
            return [self._prompts[row] for row in rows[slice(*bounds)]]
        return [self._prompts[row] for row in rows[self._rank :: self._world_size]]

    def batch_sizes(self, num_steps: int) -> list[int]:
        """Return the number of prompts, over all ranks, of each of the first `num_steps` steps from the start on."""
        if self._is_mixed:
            return [self._batch_size] * num_steps
        full, rest = divmod(len(self._prompts), self._batch_size)
        epoch = [self._batch_size] * full + [rest] * (rest > 0)
        return [epoch[step % len(epoch)] for step in range(num_steps)]

    def state_dict(self) -> dict[str, Any]:
        """Return the position of the next step, which is the same on every rank and for any number of ranks."""
        return self._order.state_dict() | {"fingerprint": self._fingerprint} | self._order.settings

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a `state_dict`; `batch_size` and the number of ranks may differ from then.

        Raises:
            ConfigError: the prompts, or the settings of their order, differ from those of the state.
        """
        check(
            state["fingerprint"] == self._fingerprint,
            f"the data set is not the checkpoint's: the hash of its token ids and answers is {self._fingerprint}, was "
            f"{state['fingerprint']}; bring the old data and tokenizer back, or start anew with run.resume = never",
        )
        for name, value in self._order.settings.items():
            saved = state.get(name)
            check(
                saved == value,
                f"{name} = {value}, but the checkpoint's prompt order has {name} = {saved}: keep it to resume",
            )
        self._order.load_state_dict(state)


def _fingerprint(prompts: Sequence[Prompt]) -> str:
    """Return a hash of the token ids and answers of the prompts, in their order, which is the same on every day."""
    digest = hashlib.sha256()
    for prompt in prompts:
        token_ids = prompt.token_ids if prompt.undated_token_ids is None else prompt.undated_token_ids
        digest.update(repr((token_ids, prompt.answer)).encode())
    return digest.hexdigest()[:16]
