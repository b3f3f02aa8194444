"""The language-model loss on a second data set, which keeps the policy close to ordinary text (ptx)."""

import hashlib
import math
import random
from pathlib import Path
from typing import Any

import jinja2
import torch
from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch, pack, split
from hybrid_rl.config import ConfigError, PtxConfig, check
from hybrid_rl.data.files import column_of, is_chat, read_rows
from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed.engine import TrainEngine
from hybrid_rl.models.loading import packed_inputs


def load_texts(config: PtxConfig, tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of every row of `ptx.path`: what the tokenizer makes of it, one EOS, cut to `max_tokens`.

    Chat messages go through the tokenizer's template; a BOS that both of them add stands there once.

    Raises:
        ConfigError: names the field, the file, the row and the columns that are there; a row has fewer than two tokens.
    """
    assert config.path is not None
    source = f"ptx.path = {config.path}"
    rows = read_rows(Path(config.path), source=source, text_column=config.column)
    check(bool(rows), f"{source}: holds no rows")
    check(tokenizer.eos_token_id is not None, f"{source}: the tokenizer {tokenizer.name_or_path!r} has no EOS token")
    texts = []
    for number, row in enumerate(rows):
        where = f"{source}: row {number}"
        value = column_of(row, config.column, field="ptx.column", where=where)
        token_ids = _close(tokenizer, _encode(tokenizer, value, config, where))[: config.max_tokens]
        check(
            len(token_ids) >= 2,
            f"{where}: gives {len(token_ids)} of at most ptx.max_tokens = {config.max_tokens} tokens, needs 2 or more",
        )
        texts.append(token_ids)
    return texts


def _encode(tokenizer: PreTrainedTokenizerBase, value: Any, config: PtxConfig, where: str) -> list[int]:
    if not isinstance(value, str):
        check(
            is_chat(value),
            f"{where}: '{config.column}' (ptx.column) must be text, or a list of messages with text in `role` and "
            f"`content`; got {str(value)[:80]!r}",
        )
        check(
            bool(tokenizer.chat_template),
            f"{where} is a chat but the tokenizer {tokenizer.name_or_path!r} has no chat template: give text",
        )
        try:
            value = tokenizer.apply_chat_template(value, tokenize=False)
        except jinja2.TemplateError as error:
            raise ConfigError(f"{where}: the tokenizer's chat template refuses its messages: {error}") from error
    token_ids = list(tokenizer(value)["input_ids"])
    has_two_bos = tokenizer.bos_token_id is not None and token_ids[:2] == [tokenizer.bos_token_id] * 2
    return token_ids[1:] if has_two_bos else token_ids


def _close(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[int]:
    """Return the ids up to an EOS at their end, which a template may have followed by a line break, or with one added.

    What comes after its EOS, the policy never samples.
    """
    end = tokenizer.eos_token_id
    if end in token_ids[1:]:
        last = len(token_ids) - 1 - token_ids[::-1].index(end)
        if not tokenizer.decode(token_ids[last + 1 :]).strip():
            return token_ids[: last + 1]
    return [*token_ids, end]


class PtxLoss:
    """An endless stream of texts, and the loss of its next ones: -coef * mean log-prob of all tokens but the first.

    The stream is a function of the seed alone: a new order in every epoch, and a batch may span two. Of each batch,
    rank r of n takes every n-th text from the r-th on.

    Source: InstructGPT (arXiv 2203.02155), the last term of equation 2; whoever calls it weights the policy 1 - coef.
    """

    def __init__(
        self, texts: list[list[int]], config: PtxConfig, world: World, *, seed: int, micro_batch_tokens: int
    ) -> None:
        self._texts = texts
        self._config = config
        self._world = world
        self._seed = seed
        self._micro_batch_tokens = micro_batch_tokens
        self._position = 0
        self._fingerprint = hashlib.sha256(repr((seed, texts)).encode()).hexdigest()[:16]
        self._epoch, self._order = -1, list[int]()

    def backward(self, engine: TrainEngine) -> float:
        """Add the next texts' gradient to the policy's, in forwards of at most `micro_batch_tokens`.

        The normaliser is the number of predicted tokens on all ranks. Never the last backward before a step.

        Returns:
            The mean negative log-prob per token over all ranks, without coef.
        Raises:
            FloatingPointError: it is not finite.
        """
        drawn = [self._text(self._position + place) for place in range(self._config.batch_size)]
        self._position += len(drawn)
        num_tokens = sum(len(text) - 1 for text in drawn)
        batch = _as_batch(drawn[self._world.rank :: self._world.size])
        total = torch.zeros((), dtype=torch.float64, device=self._world.device)
        for piece in self._world.in_step(split(batch.sequence_lengths, self._micro_batch_tokens)):
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
        """Return the place in the stream, as plain values that are the same on every rank."""
        return {"position": self._position, "fingerprint": self._fingerprint}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the state was taken; batch size and number of ranks may differ.

        Raises:
            ConfigError: the texts or the seed are not those of the state.
        """
        check(
            state["fingerprint"] == self._fingerprint,
            f"ptx.path = {self._config.path}: with run.seed = {self._seed} the hash of its texts is "
            f"{self._fingerprint}, the checkpoint's was {state['fingerprint']}; bring the old data, tokenizer and seed "
            "back, or start anew with run.resume = never",
        )
        self._position = state["position"]

    def _text(self, number: int) -> list[int]:
        """Return a text of the endless stream."""
        epoch, place = divmod(number, len(self._texts))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, list(range(len(self._texts)))
            random.Random(f"ptx {self._seed} {epoch}").shuffle(self._order)
        return self._texts[self._order[place]]


def _as_batch(texts: list[list[int]]) -> TrainBatch:
    """Return texts as rollouts whose prompt is the first token, so that all others are predicted."""
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
