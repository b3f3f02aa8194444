"""Models that run on packed sequences and return log-probs or values, the same as for each sequence alone."""

import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hybrid_rl.batch import Packed
from hybrid_rl.distributed import World
from hybrid_rl.models.attention import VARLEN_IMPLEMENTATIONS, packing_arguments
from hybrid_rl.models.heads import LossOfLogprobs
from hybrid_rl.models.routing import Routing
from hybrid_rl.models.sequence_parallel import TokenSlice, pad_to_ranks


class PackedModel(nn.Module):
    """A Hugging Face model that runs on packed sequences without attention between them.

    Shape letters: N packed tokens of S sequences, L tokens of the longest one, R positions that the head reads.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.is_padded = not can_pack(model)
        """Whether the sequences are unpacked into a padded batch inside the model."""
        self.sequence_parallel_group: World | None = None
        """Ranks that each compute a slice of every micro-batch's tokens; None computes all tokens on this rank."""
        self.layer_gathering: Any = None
        """What gathers each layer's weights from the ranks' shards while the model runs; None for whole weights, and in
        a training engine, which gathers by itself."""

    @property
    def uses_varlen(self) -> bool:
        """Whether attention runs per sequence, so that a token costs the same in a micro-batch of any size."""
        return not self.is_padded and self.model.config._attn_implementation in VARLEN_IMPLEMENTATIONS

    def model_inputs(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int
    ) -> dict[str, Tensor | int]:
        """Return the arguments of the Hugging Face model: one row of N tokens, or [S, L] padded on the right.

        With sequence parallelism, the row is this rank's slice of N; masks and lengths describe all N tokens.
        """
        if self.is_padded:
            mask = _token_mask(cu_seqlens, max_length)
            rows = input_ids.new_zeros(mask.shape).masked_scatter(mask, input_ids)
            return {"input_ids": rows, "attention_mask": mask.long()}
        group = self.sequence_parallel_group
        rank, size = (group.rank, group.size) if group else (0, 1)
        ids, positions, bounds, longest = pad_to_ranks(input_ids, position_ids, cu_seqlens, max_length, size)
        arguments = packing_arguments(self.model, bounds, longest, ids.shape[1])
        local = {"input_ids": ids.chunk(size, dim=1)[rank], "position_ids": positions.chunk(size, dim=1)[rank]}
        return local | arguments

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int) -> Tensor:
        """Return the last hidden states, [N, H]; with sequence parallelism, those of this rank's slice of N."""
        inputs = self.model_inputs(input_ids, position_ids, cu_seqlens, max_length)
        output = self.model.base_model(use_cache=False, **inputs).last_hidden_state
        return output[_token_mask(cu_seqlens, max_length)] if self.is_padded else output[0]


def can_pack(model: PreTrainedModel) -> bool:
    """Return whether position ids and masks can separate packed sequences; ALiBi and recurrences use neither."""
    config = model.config.get_text_config()
    return (
        "position_ids" in inspect.signature(model.base_model.forward).parameters
        and not model._is_stateful
        and not getattr(config, "alibi", False)
        and getattr(config, "attention_chunk_size", None) is None  # chunks start at the row's start, not a sequence's
    )


def _token_mask(cu_seqlens: Tensor, max_length: int) -> Tensor:
    """Return [S, L] bool, true where the padded batch, one sequence per row, holds a token."""
    return torch.arange(max_length, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]


class Actor(PackedModel):
    """A causal language model whose forward returns log-probs and entropies of response tokens."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        self._routing = Routing(model)
        self.balance: Tensor | None = None
        """Load-balancing loss of the last forward that measured it, a scalar with gradient."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        index: Tensor,
        targets: Tensor,
        temperature: float,
        loss_of_logprobs: LossOfLogprobs | None = None,
        routed_experts: Tensor | None = None,
        measures_balance: bool = False,
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies of the targets, or a loss of them.

        Args:
            input_ids, position_ids, cu_seqlens, max_length: see Packed.
            index: [R] int64, ascending positions in N that predict the targets.
            targets: [R] int64.
            temperature: divides the logits.
            loss_of_logprobs: loss of the targets; its sum is then returned first, and alone has gradients.
            routed_experts: see Packed; None lets the routers choose.
            measures_balance: whether to compute `balance`, over all N tokens.
        Returns:
            (log-probs, entropies), both [R] float32, or (sum of the losses, log-probs, entropies).
        """
        if self._routing.has_routers:
            self._begin_routing(input_ids, cu_seqlens, max_length, routed_experts, measures_balance)
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        self.balance = self._routing.end()
        head = self.model.get_output_embeddings()
        if self.sequence_parallel_group is None:
            return head(hidden[index], targets, temperature, loss_of_logprobs)
        tokens = TokenSlice(self.sequence_parallel_group, input_ids.shape[1], index)
        local_loss = tokens.localize(loss_of_logprobs)
        *losses, logprobs, entropy = head(hidden[tokens.index], targets[tokens.read], temperature, local_loss)
        return (*map(tokens.total, losses), *tokens.join(logprobs, entropy))

    def _begin_routing(
        self,
        input_ids: Tensor,
        cu_seqlens: Tensor,
        max_length: int,
        routed_experts: Tensor | None,
        measures_balance: bool,
    ) -> None:
        """Prepare the routers for a forward, in which padded sequences have rows of padding."""
        is_token = torch.ones_like(input_ids[0], dtype=torch.bool)
        if self.is_padded:
            is_token = _token_mask(cu_seqlens, max_length).flatten()
        if routed_experts is not None and self.is_padded:
            rows = routed_experts.new_full((len(is_token), *routed_experts.shape[1:]), -1)
            rows[is_token] = routed_experts
            routed_experts = rows
        self._routing.begin(routed_experts, is_token.float() if measures_balance else None)


class ValueModel(PackedModel):
    """A sequence classifier with one label: a critic, read at every token, or a reward model, read at the last one."""

    def __init__(self, model: PreTrainedModel, *, head: str = "score") -> None:
        """Take a model, and the name of the head in it."""
        super().__init__(model)
        self.head_name = head

    @property
    def head(self) -> nn.Module:
        """The layer that maps hidden states to values."""
        return getattr(self.model, self.head_name)

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, index: Tensor
    ) -> Tensor:
        """Return the output of the head at positions index [R] of N, [R] float32."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        if self.sequence_parallel_group is None:
            return self.head(hidden[index])
        tokens = TokenSlice(self.sequence_parallel_group, input_ids.shape[1], index)
        return tokens.join(self.head(hidden[tokens.index]))[0]


def actor_inputs(packed: Packed) -> dict[str, Any]:
    """Return the keyword arguments of an Actor that a packed batch gives."""
    inputs = packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets}
    return inputs if packed.routed_experts is None else inputs | {"routed_experts": packed.routed_experts}


def packed_inputs(packed: Packed) -> dict[str, Any]:
    """Return the keyword arguments that Actor and ValueModel have in common."""
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "cu_seqlens": packed.cu_seqlens,
        "max_length": packed.max_length,
    }
