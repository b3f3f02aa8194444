"""Protocols of the two kinds of engines: RolloutEngine generates responses, TrainEngine trains a model."""

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor

from hybrid_rl.batch import ConversationStart, Rollout
from hybrid_rl.checkpoints.snapshot import Snapshot
from hybrid_rl.config import RolloutConfig
from hybrid_rl.weights.protocols import NamedShape, WeightReceiver, WeightSource

ReportStage = Callable[[str, int, int | None], None]
"""Receives name, start and end of a stage of an engine's start, in nanoseconds of the monotonic clock; the end is None
for a stage that goes on, and is received again when it has ended."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of a generation."""

    temperature: float
    """Divisor of the logits; 0 is greedy decoding."""
    top_p: float = 1.0
    """Tokens are sampled from the likeliest ones whose probabilities add up to this; 1 is all tokens."""
    max_tokens: int
    """Most tokens of a response."""
    stop_token_ids: tuple[int, ...]
    """A sampled token among these ends the response and is kept in it."""
    stop_strings: tuple[str, ...] = ()
    """A token that completes one of these in the text, special tokens included, ends the response and is kept in it."""

    @classmethod
    def of(cls, config: RolloutConfig, stop_token_ids: Sequence[int], *, top_p: float = 1.0) -> "Sampling":
        """Return the sampling parameters of the settings."""
        return cls(
            temperature=config.temperature,
            top_p=top_p,
            max_tokens=config.max_response_tokens,
            stop_token_ids=tuple(stop_token_ids),
            stop_strings=tuple(config.stop_strings),
        )


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sampled response."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-prob of each token under the distribution that it was sampled from; empty for greedy decoding."""
    is_truncated: bool
    """Whether the response ended at max_tokens, without a stop token or stop string."""
    routed_experts: Tensor | None = field(default=None, compare=False)
    """See Rollout; None unless the engine was started with rollout.routing_replay."""


@dataclass(frozen=True, kw_only=True)
class Request:
    """A turn of a conversation that is to be sampled."""

    number: int
    """Names the request in what RequestStream.receive returns."""
    token_ids: list[int]
    """Prompt and conversation so far."""
    max_tokens: int
    """Most tokens of the turn."""
    seed: int | None
    """None draws from the engine's own generator."""


class RequestStream(Protocol):
    """Requests that are added while the engine decodes others."""

    @property
    def num_running(self) -> int:
        """Number of requests that are not finished."""
        ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Add requests, which the engine starts together."""
        ...

    def receive(self) -> list[tuple[int, Generation]]:
        """Return number and response of each request that has finished by now; vLLM's stream does not wait."""
        ...


RunConversations = Callable[[RequestStream, Sequence[ConversationStart]], list[Rollout]]
"""Generates conversations through a stream, and returns them in the order of their starts."""


class RolloutEngine(WeightReceiver, Protocol):
    """An engine that generates responses with the trainer's weights; see WeightReceiver for weight sync.

    Its memory has two tags, `weights` and `kv_cache`, which are unmapped and mapped separately.
    """

    def generate(
        self, prompts: Sequence[list[int]], sampling: Sampling, seeds: Sequence[int] | None
    ) -> list[Generation]:
        """Return one response per prompt, in order.

        Args:
            prompts: token ids of each prompt.
            seeds: one seed per prompt; None draws from the engine's own generator.

        Raises:
            RuntimeError: the weights are not the trainer's, or memory is unmapped.
        """
        ...

    def converse(self, starts: Sequence[ConversationStart], sampling: Sampling, run: RunConversations) -> list[Rollout]:
        """Return one conversation per start, in order, which `run` generates through a stream of this engine.

        Args:
            sampling: of every turn; max_tokens comes from each request.
            run: called on one rank for the starts of all ranks that share the engine.

        Raises:
            RuntimeError: see generate.
        """
        ...

    def seed(self, seed: int) -> None:
        """Seed the engine's own generator, from which requests without a seed draw."""
        ...

    def unmap(self, tag: str) -> None:
        """Release the memory of `weights` or `kv_cache`, whose contents are lost."""
        ...

    def map(self, tag: str) -> None:
        """Allocate the memory of a tag again; the contents are undefined until they are written."""
        ...

    def close(self) -> None:
        """Release the trainer's bucket and end the engine and its processes."""
        ...


class FirstWait(enum.Enum):
    """Where in an optimizer step ranks first wait for each other in a collective.

    Before it a rank whose micro-batch runs out of memory can still tell the others, and the step starts again.
    """

    FORWARD = "forward"
    """In every layer of a forward: weights or activations are sharded over ranks."""
    BACKWARD = "backward"
    """In every backward, which reduces the gradients of its micro-batch."""
    STEP = "step"
    """In the optimizer step, which reduces the gradients of all micro-batches; or never, on a single rank."""


class TrainEngine(Protocol):
    """A model with its gradients and its optimizer, sharded over the ranks."""

    @property
    def module(self) -> Any:
        """The Actor or ValueModel that the engine trains."""
        ...

    @property
    def model(self) -> Any:
        """The Hugging Face model inside the module."""
        ...

    @property
    def lr(self) -> float:
        """Learning rate of the next optimizer step."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether only low-rank adapters are trained, and the model itself is frozen."""
        ...

    @property
    def base(self) -> WeightSource:
        """Every weight without its adapter."""
        ...

    @property
    def adapters(self) -> WeightSource:
        """The matrices of the adapters, named as in peft's files, with the scale of a product in its second factor."""
        ...

    @property
    def checkpoint_bytes(self) -> int:
        """Bytes of the engine's part of a checkpoint, over all ranks."""
        ...

    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the module; under ZeRO-3 every rank must call it equally often."""
        ...

    def reference_forward(self, **inputs: Any) -> Any:
        """Return the outputs of the module without adapters and without gradient, see forward."""
        ...

    def backward(self, loss: Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss.

        Args:
            loss: scalar, normalised over all ranks and micro-batches of the optimizer step.
            is_last: whether it is the last micro-batch before step.
        """
        ...

    @property
    def first_wait(self) -> FirstWait:
        """Where ranks first wait for each other."""
        ...

    def drop_gradients(self) -> None:
        """Drop all gradients since the last step, of a forward or backward that raised too; no collective."""
        ...

    def step(self) -> float:
        """Clip gradients, take an optimizer step and a step of the schedule; return the gradient norm before clipping.

        Raises:
            FloatingPointError: the gradient norm is not finite.
        """
        ...

    def named_shapes(self) -> list[NamedShape]:
        """Return name, full shape and dtype of every weight; tied weights appear once.

        Adapters do not appear: they are merged into the weights that they change.
        """
        ...

    def gathered(self, names: Sequence[str]) -> AbstractContextManager[Mapping[str, Tensor]]:
        """Yield the named weights unsharded; a collective where ranks hold shards of them."""
        ...

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapters under the names of peft's files, on the host; under ZeRO-3 a collective."""
        ...

    def offload(self) -> None:
        """Move gradients, float32 master weights and optimizer moments to the host."""
        ...

    def reload(self) -> None:
        """Move them back to the device."""
        ...

    def optimizer_tensors(self) -> list[Tensor]:
        """Return this rank's float32 master weights and moments; the moments are allocated if they do not exist."""
        ...

    def optimizer_bytes(self) -> int:
        """Return the bytes that offload moves on this rank."""
        ...

    def gradient_buffers(self) -> list[Tensor]:
        """Return the buffers in which gradients are reduced; they may be zeroed between two steps."""
        ...

    def weight_tensors(self) -> list[Tensor]:
        """Return the weights and buffers that forward reads, this rank's shard of them under ZeRO-3."""
        ...

    def drop_gathered(self) -> None:
        """Free the unsharded weights that ZeRO-3 keeps for the next forward."""
        ...

    def snapshot(self) -> Snapshot:
        """Return this rank's part of the training state, copied to the host; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Read what the ranks' snapshots wrote, for any number of ranks and any ZeRO stage."""
        ...
