"""The language-model loss on a second data set (ptx), which keeps the policy close to ordinary text."""

import hashlib
import random
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch, pack
from hybrid_rl.config import PtxConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.models.packed import packed_inputs


class Order(Protocol):
    """An endless sequence of texts, which can resume; see hybrid_rl.data.mixing."""

    settings: dict[str, Any]
    """What the sequence depends on, besides the texts."""

    def draw(self, num_draws: int) -> list[int]:
        """Return the numbers of the next texts."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the position as JSON values."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position of a state with the same settings."""
        ...


class PtxLoss:
    """The loss -coef * mean log-prob of all tokens except the first, over batches of an endless stream of texts.

    The order of the stream depends on the seed alone: every epoch has a new order, and a batch may span two epochs. A
    mixture of data sets follows their weights instead, and each of them has epochs of its own. Rank r of n takes every
    n-th text of a batch, starting with the r-th. The caller weights the policy loss by 1 - coef.

    Source: Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), the last term of equation 2.
    """

    def __init__(
        self,
        texts: list[list[int]],
        config: PtxConfig,
        world: World,
        *,
        seed: int,
        undated_texts: list[list[int]] | None = None,
        mixture: Order | None = None,
    ) -> None:
        """Start at the first text.

        Args:
            texts: token ids of each text, at least 2.
            world: ranks that hold different texts.
            seed: of the order of the texts.
            undated_texts: token ids of the same texts on a fixed day, which identify the stream on every day; None if
                no text depends on the day.
            mixture: order of the texts of several data sets with weights; None takes epochs over all texts.
        """
        self._texts = texts
        self._config = config
        self._world = world
        self._seed = seed
        self._position = 0
        self._mixture = mixture
        content = (seed, undated_texts or texts) if mixture is None else (mixture.settings, undated_texts or texts)
        self._fingerprint = hashlib.sha256(repr(content).encode()).hexdigest()[:16]
        self._epoch, self._order = -1, list[int]()

    def next_batch(self) -> "PtxBatch":
        """Return this rank's texts of the next batch, whose gradient an optimizer step of the policy adds."""
        drawn = [self._text(self._position + place) for place in range(self._config.batch_size)]
        self._position += len(drawn)
        return PtxBatch(
            batch=_as_batch(drawn[self._world.rank :: self._world.size]),
            num_tokens=sum(len(text) - 1 for text in drawn),
            coef=self._config.coef,
            world=self._world,
            name=f"texts {self._position - len(drawn) + 1} to {self._position} of the stream of ptx.path",
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream as JSON values, the same on every rank."""
        mixture = {} if self._mixture is None else {"mixture": self._mixture.state_dict()}
        return {"position": self._position, "fingerprint": self._fingerprint, **mixture}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; batch size and number of ranks may differ.

        Raises:
            ConfigError: the texts or the seed differ from the ones of the state.
        """
        check(
            state["fingerprint"] == self._fingerprint,
            f"ptx.path = {self._config.path}: with run.seed = {self._seed} the hash of its texts is "
            f"{self._fingerprint}, and {state['fingerprint']} in the checkpoint; restore data, weights, tokenizer and "
            "seed of the checkpoint, or start a new run with run.resume = never",
        )
        self._position = state["position"]
        if self._mixture is not None:
            self._mixture.load_state_dict(state["mixture"])

    def _text(self, number: int) -> list[int]:
        """Return the text at a position of the stream; positions are asked for in their order."""
        if self._mixture is not None:
            return self._texts[self._mixture.draw(1)[0]]
        epoch, place = divmod(number, len(self._texts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._texts)))
            random.Random(f"ptx {self._seed} {epoch}").shuffle(self._order)
        return self._texts[self._order[place]]


@dataclass(frozen=True, kw_only=True)
class PtxBatch:
    """This rank's texts of one optimizer step, as a part of its loss; see steps.updates.optimizer_step.LossPart."""

    batch: TrainBatch
    num_tokens: int
    """Predicted tokens of the texts of all ranks."""
    coef: float
    world: World
    name: str
    """Name of the texts of all ranks, for error messages."""

    @property
    def lengths(self) -> list[int]:
        """Tokens of each text."""
        return self.batch.sequence_lengths

    @property
    def rows(self) -> list[int]:
        """All texts."""
        return list(range(len(self.batch)))

    def micro_batch(self, engine: TrainEngine, rows: list[int]) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of some of the texts, and its part of the mean negative log-prob per predicted token."""
        packed = pack(self.batch, rows, self.world.device)
        logprobs, _ = engine.forward(
            **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0
        )
        loss = -logprobs.sum() / self.num_tokens
        return self.coef * loss, {"ptx_loss": loss}

    def describe(self, rows: list[int]) -> str:
        """Return the name of the batch, whatever the rows."""
        return self.name


def _as_batch(texts: list[list[int]]) -> TrainBatch:
    """Return a batch whose prompts are the texts' first tokens, so that all other tokens are predicted."""
    return make_train_batch(
        [
            Rollout(
                prompt=Prompt(prompt_id=number, text="", token_ids=text[:1]),
                sequence_id=number,
                response_ids=text[1:],
                rollout_logprobs=[],
                is_truncated=False,
                text="",
            )
            for number, text in enumerate(texts)
        ]
    )
