"""The language-model loss on a second data set (ptx), which keeps the policy close to ordinary text."""

import hashlib
import math
import random
from typing import Any

import torch

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch, pack, split
from hybrid_rl.config import PtxConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.engines import TrainEngine
from hybrid_rl.models.packed import packed_inputs


class PtxLoss:
    """The loss -coef * mean log-prob of all tokens except the first, over batches of an endless stream of texts.

    The order of the stream depends on the seed alone: every epoch has a new order, and a batch may span two epochs.
    Rank r of n takes every n-th text of a batch, starting with the r-th. The caller weights the policy loss by
    1 - coef.

    Source: Ouyang et al. 2022 (InstructGPT, arXiv 2203.02155), the last term of equation 2.
    """

    def __init__(
        self, texts: list[list[int]], config: PtxConfig, world: World, *, seed: int, micro_batch_tokens: int
    ) -> None:
        """Start at the first text.

        Args:
            texts:              token ids of each text, at least 2.
            world:              ranks that hold different texts.
            micro_batch_tokens: tokens packed into one forward.
        """
        self._texts = texts
        self._config = config
        self._world = world
        self._seed = seed
        self._micro_batch_tokens = micro_batch_tokens
        self._position = 0
        self._fingerprint = hashlib.sha256(repr((seed, texts)).encode()).hexdigest()[:16]
        self._epoch, self._order = -1, list[int]()

    def backward(self, engine: TrainEngine) -> float:
        """Accumulate the gradient of the next batch of texts; the policy's backward follows, before the optimizer step.

        Returns:
            The mean negative log-prob per predicted token over all ranks, not multiplied by coef.
        Raises:
            FloatingPointError: the mean is not finite.
        """
        drawn = [self._text(self._position + place) for place in range(self._config.batch_size)]
        self._position += len(drawn)
        num_tokens = sum(len(text) - 1 for text in drawn)
        batch = _as_batch(drawn[self._world.rank :: self._world.size])
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for piece in self._world.pad_to_longest(split(batch.sequence_lengths, self._micro_batch_tokens)):
            packed = pack(batch, piece, self._world.device)
            logprobs, _ = engine.forward(
                **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0
            )
            loss = -logprobs.sum() / num_tokens
            engine.backward(self._config.coef * loss, is_last=False)
            total += loss.detach().double()
        mean = float(self._world.sum(total.cpu()))
        if not math.isfinite(mean):
            raise FloatingPointError(f"ptx loss is {mean} up to text {self._position} of the stream")
        return mean

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream as JSON values, the same on every rank."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a state; batch size and number of ranks may differ.

        Raises:
            ConfigError: the texts or the seed differ from the ones of the state.
        """
        check(
            state["fingerprint"] == self._fingerprint,
            f"ptx.path = {self._config.path}: with run.seed = {self._seed} the hash of its texts is "
            f"{self._fingerprint}, and {state['fingerprint']} in the checkpoint; restore data, tokenizer and seed of "
            "the checkpoint, or start a new run with run.resume = never",
        )
        self._position = state["position"]

    def _text(self, number: int) -> list[int]:
        """Return the text at a position of the stream."""
        epoch, place = divmod(number, len(self._texts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._texts)))
            random.Random(f"ptx {self._seed} {epoch}").shuffle(self._order)
        return self._texts[self._order[place]]


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
