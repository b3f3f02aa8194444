"""A rollout engine in plain PyTorch around a Hugging Face model: the reference of tests, and of vLLM's speed."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedTokenizerBase

from hybrid_rl.batch import ConversationStart, Rollout
from hybrid_rl.config import LoraConfig
from hybrid_rl.engines import Generation, Request, RunConversations, Sampling
from hybrid_rl.models.loading import load_dense
from hybrid_rl.models.lora import adapter_factors, add_adapters
from hybrid_rl.models.routing import ChosenExperts, corrections
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.weights.bucket import AliasedWeights, Slot, open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
from hybrid_rl.weights.protocols import TensorSlice


class HuggingFaceEngine:
    """A copy, or an alias, of the actor in the trainer's process; see RolloutEngine for the methods.

    `model` is the Hugging Face model, `parameters` are its parameters by name, tied ones once.
    """

    def __init__(
        self,
        model: str,
        *,
        dtype: torch.dtype,
        device: torch.device,
        aliased: AliasedWeights | None = None,
        adapters: LoraConfig | None = None,
        returns_experts: bool = False,
        trust_remote_code: bool = False,
    ) -> None:
        """Load the model.

        Args:
            model: folder or hub name of the model, and of its tokenizer if there are stop strings.
            aliased: the trainer's weights, which the parameters become views of; None for copies.
            adapters: settings of adapters that the engine gets beside the weights; None for none.
            returns_experts: whether responses have the experts that computed them; see Generation.
            trust_remote_code: see ModelsConfig.
        """
        self._returns_experts = returns_experts
        self.model = load_dense(model, dtype, trust_remote_code=trust_remote_code)
        self.model.to(device)
        self.parameters = dict(self.model.named_parameters()) | corrections(self.model)
        if adapters:
            self.parameters |= self._add_adapters(adapters)
        self.model.requires_grad_(False).eval()
        self._device = device
        self._folder = model
        self._trust_remote_code = trust_remote_code
        self._weights_valid = False
        self._received: set[str] = set()
        self.weights_version = 0
        if aliased:
            bucket = open_ipc_bucket(aliased.handle, device)
            for slot in aliased.slots:
                self.parameters[slot.name].data = slot.view(bucket)
                self._received.add(slot.name)

    def _add_adapters(self, adapters: LoraConfig) -> dict[str, Any]:
        """Return the matrices of new adapters by name; the trainer multiplies the scale into them."""
        unscaled = replace(adapters, alpha=float(adapters.rank), rslora=False)
        add_adapters(self.model, unscaled, heads=[self.model.get_output_embeddings()])
        return {name: factor.base for name, factor in adapter_factors(self.model).items()}

    @torch.no_grad()
    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt; prompts of equal length are one batch, so that nothing is padded."""
        if not self._weights_valid:
            raise RuntimeError("generate: the engine's weights were dropped or never filled; sync the trainer's first")
        results: dict[int, Generation] = {}
        for length in sorted({len(ids) for ids in prompts}):
            rows = [i for i, ids in enumerate(prompts) if len(ids) == length]
            generators = [self._generator(None if seeds is None else seeds[i]) for i in rows]
            with ChosenExperts(self.model) as chosen:
                ids = torch.tensor([prompts[i] for i in rows], device=self._device)
                outputs = self._decode(ids, sampling, generators)
            if self._returns_experts:
                outputs = [
                    replace(output, routed_experts=experts[: length + len(output.token_ids) - 1])
                    for output, experts in zip(outputs, chosen.experts(len(rows)), strict=True)
                ]
            results.update(zip(rows, outputs, strict=True))
        return [results[i] for i in range(len(prompts))]

    def converse(self, starts: Sequence[ConversationStart], sampling: Sampling, run: RunConversations) -> list[Rollout]:
        """Return one conversation per start, in order; see RolloutEngine."""
        return run(_Stream(self, sampling), starts)

    def _generator(self, seed: int | None) -> torch.Generator | None:
        return None if seed is None else torch.Generator(self._device).manual_seed(seed)

    def _decode(
        self, input_ids: Tensor, sampling: Sampling, generators: Sequence[torch.Generator | None]
    ) -> list[Generation]:
        """Return the responses to prompts of one length.

        Args:
            input_ids: [S, L] int64.
            generators: one per prompt; None draws from the global generator.
        """
        cache = DynamicCache()
        stops = torch.tensor(sampling.stop_token_ids, device=self._device)
        is_done = torch.zeros(len(input_ids), dtype=torch.bool, device=self._device)
        tokens, logprobs, lengths = [], [], torch.zeros(len(input_ids), dtype=torch.int64, device=self._device)
        for _ in range(sampling.max_tokens):
            logits = self.model(input_ids, past_key_values=cache, use_cache=True).logits[:, -1].float()
            scaled = (logits / (sampling.temperature or 1.0)).log_softmax(-1)
            if sampling.top_p < 1:
                scaled = nucleus(scaled, sampling.top_p)
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
        """Return whether each response contains a stop string, [S] bool.

        Args:
            tokens: tokens of each decode step so far, [S] each.
        """
        if not stop_strings:
            return torch.zeros(len(tokens[0]), dtype=torch.bool, device=self._device)
        sequences = torch.stack(list(tokens), 1).tolist()
        texts = [self._tokenizer.decode(ids, clean_up_tokenization_spaces=False) for ids in sequences]
        found = [any(string in text for string in stop_strings) for text in texts]
        return torch.tensor(found, device=self._device)

    @functools.cached_property
    def _tokenizer(self) -> PreTrainedTokenizerBase:
        return load_tokenizer(self._folder, trust_remote_code=self._trust_remote_code)

    @staticmethod
    def _sample(probabilities: Tensor, generators: Sequence[torch.Generator | None]) -> Tensor:
        """Return one token per row, [S], each drawn from the generator of its row."""
        draws = [torch.multinomial(p, 1, generator=g) for p, g in zip(probabilities, generators, strict=True)]
        return torch.cat(draws)

    def seed(self, seed: int) -> None:
        """Seed PyTorch's global generator; see RolloutEngine."""
        torch.manual_seed(seed)

    def open_bucket(self, handle: bytes, plan: list[list[Slot]]) -> None:
        """Map the trainer's bucket; see RolloutEngine."""
        self._plan = plan
        self._bucket = open_ipc_bucket(handle, self._device)

    @torch.no_grad()
    def load_bucket(self, index: int) -> None:
        """Copy bucket `index` of the plan into the parameters; see RolloutEngine.

        Raises:
            RuntimeError: the model has no parameter of a tensor's name.
        """
        self._weights_valid = False
        for slot in self._plan[index]:
            if slot.name not in self.parameters:
                raise RuntimeError(f"no engine parameter takes these trainer tensors: {slot.name}")
            self.parameters[slot.name].copy_(slot.view(self._bucket))
            self._received.add(slot.name)

    def finish_sync(self) -> None:
        """Increment weights_version; see RolloutEngine."""
        missing = sorted(set(self.parameters) - self._received)
        if missing:
            raise RuntimeError(f"engine parameter {missing[0]}: nothing comes from the trainer")
        self._weights_valid = True
        self.weights_version += 1

    def checksums(self, names: Sequence[str]) -> list[dict[str, list[tuple[TensorSlice, int]]]]:
        """Return the checksum of every named parameter, each as one slice; see RolloutEngine."""
        held: dict[str, list[tuple[TensorSlice, int]]] = {}
        for name in names:
            flat = self.parameters[name].flatten()
            held[name] = [(((len(flat),), (1,), 0), checksum(flat))]
        return [held]

    def unmap(self, tag: str) -> None:
        """Mark the weights as dropped; no memory is released."""
        if tag == "weights":
            self._weights_valid = False

    def map(self, tag: str) -> None:
        """Do nothing, because unmap releases nothing."""

    def close(self) -> None:
        """Do nothing, because the engine has no process."""


class _Stream:
    """A RequestStream that generates when its responses are asked for."""

    def __init__(self, engine: HuggingFaceEngine, sampling: Sampling) -> None:
        self._engine = engine
        self._sampling = sampling
        self._requests: list[Request] = []

    @property
    def num_running(self) -> int:
        return len(self._requests)

    def submit(self, requests: Sequence[Request]) -> None:
        self._requests += requests

    def receive(self) -> list[tuple[int, Generation]]:
        """Return the responses to all requests; those with one limit and one length are decoded together."""
        requests, self._requests = self._requests, []
        found: list[tuple[int, Generation]] = []
        for limit in sorted({request.max_tokens for request in requests}):
            part = [request for request in requests if request.max_tokens == limit]
            seeds = [request.seed for request in part]
            responses = self._engine.generate(
                [request.token_ids for request in part],
                replace(self._sampling, max_tokens=limit),
                None if None in seeds else [seed for seed in seeds if seed is not None],
            )
            found += zip([request.number for request in part], responses, strict=True)
        return found


def nucleus(logprobs: Tensor, top_p: float) -> Tensor:
    """Return the log-probs of the distribution that is cut to the likeliest tokens, -inf for all others, [S, V].

    Source: Holtzman et al. 2020 (nucleus sampling, arXiv 1904.09751), section 3.1.

    Args:
        logprobs: [S, V], of a distribution.
        top_p: the fewest tokens that reach this probability are kept, at least one.
    """
    values, tokens = logprobs.sort(-1, descending=True)
    before = values.exp().cumsum(-1) - values.exp()  # probability of all likelier tokens
    kept = torch.zeros_like(before, dtype=torch.bool).scatter(-1, tokens, before < top_p)
    return logprobs.masked_fill(~kept, -torch.inf).log_softmax(-1)
