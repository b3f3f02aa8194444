"""Transformers' own generate as a rollout engine: the oracle of the tests, and the baseline that vLLM must beat."""

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedTokenizerBase

from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.models.loading import dense_attention
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.weights.bucket import AliasedWeights, Slot, open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.weights.protocols import TensorSlice


class HuggingFaceEngine:
    """A copy of the actor in this process; see hybrid_rl.engines.RolloutEngine for its contract."""

    def __init__(
        self, model: str, *, dtype: torch.dtype, device: torch.device, aliased: AliasedWeights | None = None
    ) -> None:
        attention = dense_attention(model)
        self._model = AutoModelForCausalLM.from_pretrained(model, dtype=dtype, attn_implementation=attention)
        self._model.to(device).requires_grad_(False).eval()
        self._parameters = dict(self._model.named_parameters())
        self._device = device
        self._folder = model
        self._weights_valid = False
        self._received: set[str] = set()
        self.weights_version = 0
        if aliased:
            bucket = open_ipc_bucket(aliased.handle, device)
            for slot in aliased.slots:
                self._parameters[slot.name].data = slot.view(bucket)
                self._received.add(slot.name)

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order; prompts of equal length run together, so nothing is padded."""
        if not self._weights_valid:
            raise RuntimeError("generate: the engine's weights were dropped or never filled; sync the trainer's first")
        results: dict[int, Generation] = {}
        for length in sorted({len(ids) for ids in prompts}):
            rows = [i for i, ids in enumerate(prompts) if len(ids) == length]
            generators = [self._generator(None if seeds is None else seeds[i]) for i in rows]
            outputs = self._decode(torch.tensor([prompts[i] for i in rows], device=self._device), sampling, generators)
            results.update(zip(rows, outputs, strict=True))
        return [results[i] for i in range(len(prompts))]

    def _generator(self, seed: int | None) -> torch.Generator | None:
        return None if seed is None else torch.Generator(self._device).manual_seed(seed)

    def _decode(
        self, input_ids: Tensor, sampling: Sampling, generators: Sequence[torch.Generator | None]
    ) -> list[Generation]:
        """Return the responses of prompts [S, L] of one length."""
        cache = DynamicCache()
        stops = torch.tensor(sampling.stop_token_ids, device=self._device)
        is_done = torch.zeros(len(input_ids), dtype=torch.bool, device=self._device)
        tokens, logprobs, lengths = [], [], torch.zeros(len(input_ids), dtype=torch.int64, device=self._device)
        for _ in range(sampling.max_tokens):
            logits = self._model(input_ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
            scaled = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            token = scaled.argmax(-1) if sampling.temperature == 0 else self._sample(scaled.exp(), generators)
            tokens.append(token)
            logprobs.append(scaled.gather(-1, token[:, None]).squeeze(-1))
            lengths += ~is_done
            is_done = is_done | torch.isin(token, stops) | self._has_stop_string(tokens, sampling.stop_strings)
            if is_done.all():
                break
            input_ids = token[:, None]
        columns, rows = torch.stack(tokens, 1).tolist(), torch.stack(logprobs, 1).tolist()
        greedy = sampling.temperature == 0
        return [
            Generation(token_ids=ids[:n], logprobs=[] if greedy else values[:n], is_truncated=not done)
            for ids, values, n, done in zip(columns, rows, lengths.tolist(), is_done.tolist(), strict=True)
        ]

    def _has_stop_string(self, tokens: Sequence[Tensor], stop_strings: Sequence[str]) -> Tensor:
        """Return, [S] bool, whether the text of each row of the tokens so far (each [S]) contains a stop string."""
        if not stop_strings:
            return torch.zeros(len(tokens[0]), dtype=torch.bool, device=self._device)
        texts = [self._tokenizer.decode(ids) for ids in torch.stack(list(tokens), 1).tolist()]
        found = [any(string in text for string in stop_strings) for text in texts]
        return torch.tensor(found, device=self._device)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder)

    @staticmethod
    def _sample(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
        """Return one token per row [S], each from its own generator."""
        draws = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=True)]
        return torch.cat(draws)

    def seed(self, seed: int) -> None:
        """Seed the global generator, which requests without a seed use."""
        torch.manual_seed(seed)

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket and remember what each fill of it will hold."""
        self._plan = plan
        self._bucket = open_ipc_bucket(handle, self._device)

    @torch.no_grad()
    def load_bucket(self, index: int) -> None:
        """Copy bucket `index` into the parameters."""
        self._weights_valid = False
        for slot in self._plan[index]:
            if slot.name not in self._parameters:
                raise RuntimeError(f"no engine parameter takes these trainer tensors: {slot.name}")
            self._parameters[slot.name].copy_(slot.view(self._bucket))
            self._received.add(slot.name)

    def finish_sync(self) -> None:
        """Count a hand-over; every parameter must have been filled."""
        missing = sorted(set(self._parameters) - self._received)
        if missing:
            raise RuntimeError(f"engine parameter {missing[0]}: nothing comes from the trainer")
        self._weights_valid = True
        self.weights_version += 1

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksum of every named parameter, each as one whole region."""
        held: dict[str, list[tuple[TensorSlice, int]]] = {}
        for name in names:
            flat = self._parameters[name].flatten()
            held[name] = [(((len(flat),), (1,), 0), checksum(flat))]
        return [held]

    def unmap(self, tag: str) -> None:
        """Count the weights as dropped; the memory stays, for an oracle needs no thrift."""
        if tag == "weights":
            self._weights_valid = False

    def map(self, tag: str) -> None:
        """Nothing was unmapped."""

    def close(self) -> None:
        """Nothing runs."""
