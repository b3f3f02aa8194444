"""The size of a step on one rank, with every prompt and every response at its full length."""

import functools
from dataclasses import dataclass, replace

import torch

from hybrid_rl.config import Config, UpdateConfig
from hybrid_rl.models.attention import uses_varlen
from hybrid_rl.planning.plan import Machine
from hybrid_rl.planning.shapes import Shapes
from hybrid_rl.weights.choice import SyncChoice, choose_sync
from hybrid_rl.weights.protocols import NamedShape


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A run's settings, GPUs and model sizes, and the numbers of a step that follow from them."""

    config: Config
    machine: Machine
    shapes: Shapes
    shards_frozen: bool = False
    """Whether the ranks divide the parameters of reference and reward model."""

    @property
    def dtype_bytes(self) -> int:
        """Bytes of an element of parameters and activations."""
        return 4 if self.config.models.dtype == "float32" else 2

    @property
    def is_half_on_gpu(self) -> bool:
        """Whether a GPU computes in 16 bits."""
        return self.machine.backend == "triton" and self.dtype_bytes == 2

    @property
    def head_backend(self) -> str:
        """Kernels of the log-probs: chunks of logits in PyTorch also on a card that has no room for the fused ones."""
        card = self.machine.card
        return "reference" if card and not card.has_fused_logprobs else self.machine.backend

    @property
    def prompt_tokens(self) -> int:
        """Tokens of a prompt."""
        return self.config.prompts.max_prompt_tokens

    @property
    def response_tokens(self) -> int:
        """Tokens of a response."""
        return self.config.rollout.max_response_tokens

    @property
    def sequence_tokens(self) -> int:
        """Tokens of a prompt and its response."""
        return self.prompt_tokens + self.response_tokens

    @property
    def num_sequences(self) -> int:
        """Sequences of a rank in a step, rounded up, because the rank with the most sequences delays the others."""
        return -(-self.config.responses_per_step // self.machine.num_ranks)

    @property
    def num_tokens(self) -> int:
        """Tokens of a rank in a step."""
        return self.num_sequences * self.sequence_tokens

    @property
    def max_concurrent_sequences(self) -> int:
        """Sequences that an engine would decode at once if the KV cache had room."""
        rollout = self.config.rollout
        return min(rollout.tensor_parallel_size * self.num_sequences, rollout.max_num_seqs)

    @property
    def forward_pack(self) -> tuple[int, int]:
        """Tokens per rank of a full pack in SCORE, and those that the head reads; see tokens_per_rank."""
        is_gpu = self.machine.backend == "triton"
        is_varlen = uses_varlen(self.config.models.attention, is_gpu=is_gpu)
        max_tokens = forward_tokens(self.config.update, is_varlen=is_varlen)
        return tokens_per_rank(self.config, num_sequences=self._group_sequences, max_tokens=max_tokens)

    @property
    def update_pack(self) -> tuple[int, int]:
        """Tokens per rank of a full micro-batch, and those that the head reads; see tokens_per_rank."""
        update = self.config.update
        num_sequences = min(self._group_sequences, update.mini_batch_size)  # an upper bound with several ranks
        return tokens_per_rank(self.config, num_sequences=num_sequences, max_tokens=update.micro_batch_tokens)

    @property
    def _group_sequences(self) -> int:
        """Sequences of a model-parallel group, whose ranks compute each pack together."""
        update = self.config.update
        return self.num_sequences * update.sequence_parallel_size * update.tensor_parallel_size

    @functools.cached_property
    def actor_tensors(self) -> tuple[NamedShape, ...]:
        """Name, shape and dtype of the actor's parameters, which weight sync sends."""
        dtype = torch.float32 if self.dtype_bytes == 4 else torch.bfloat16
        return tuple((name, shape, dtype) for name, shape in self.shapes.actor.tensors)

    @property
    def aliases_weights(self) -> bool:
        """Whether the engine's parameters are views of the trainer's, so that they exist once."""
        return self.config.rollout.engine == "vllm" and not self.sync.why_copies

    @property
    def shares_critic(self) -> bool:
        """Whether the critic's frozen weights are the actor's, in one memory."""
        return self.aliases_weights and self.sync.shares_critic

    @functools.cached_property
    def sync(self) -> SyncChoice:
        """How the engine gets the trainer's weights; where the settings forbid it, as with sync.mode = auto."""
        config = self.config
        if config.sync.mode == "alias":
            config = replace(config, sync=replace(config.sync, mode="auto"))
        return choose_sync(config, architecture=self.shapes.actor.architecture, tensors=self.actor_tensors)


def forward_tokens(update: UpdateConfig, *, is_varlen: bool) -> int:
    """Return the maximum tokens of a pack in SCORE: four micro-batches with varlen attention, otherwise one.

    A forward without gradient keeps no activations, and larger packs need fewer kernel launches. Attention over a dense
    mask computes every pair of tokens, so that larger packs cost more.
    """
    return (4 if is_varlen else 1) * update.micro_batch_tokens


def tokens_per_rank(config: Config, *, num_sequences: int, max_tokens: int) -> tuple[int, int]:
    """Return the tokens of a full pack that one rank passes through a model, and the tokens that its head reads.

    With sequence parallelism, a rank's slice of tokens may consist of response tokens only.

    Args:
        num_sequences: sequences of a step, of all ranks that compute a pack together.
        max_tokens: maximum tokens of a pack.
    """
    response = config.rollout.max_response_tokens
    length = config.prompts.max_prompt_tokens + response
    packed = min(max_tokens, num_sequences * length)
    tokens = -(-packed // config.update.sequence_parallel_size)
    return tokens, min(tokens, packed * response // length)
