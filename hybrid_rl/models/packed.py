"""Models on packed sequences: tokens in, log-probs or values of the response tokens out, each as if it were alone."""

import inspect
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from hybrid_rl.batch import Packed
from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.distributed import World
from hybrid_rl.models.attention import PACKED, packing_arguments
from hybrid_rl.models.sequence_parallel import TokenSlice, pad_to_ranks
from hybrid_rl_kernels import fused_logprobs, token_loss_one_pass

_logger = logging.getLogger(__name__)

LossOfLogprobs = Callable[[Tensor, Tensor, slice], Tensor]
"""From log-probs and entropies [n] of a slice of the targets to losses [n], each depending on its token alone."""


@dataclass(frozen=True, kw_only=True)
class LogitShape:
    """What a model does with its head's output: scale it, then cap it by cap * tanh(x / cap)."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the model's logits of its head's output."""
        scaled = logits * self.logit_scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def logit_shape(config: PretrainedConfig) -> LogitShape:
    """Return what a model of this config does; check_head proves it of the model itself."""
    text = config.get_text_config()
    factor = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
    scaling = getattr(text, "logits_scaling", None) or 1.0  # Granite and MiniCPM divide by it, HyperCLOVA X multiplies
    factor = factor * scaling if text.model_type == "hyperclovax" else factor / scaling
    return LogitShape(logit_scale=factor, softcap=getattr(text, "final_logit_softcapping", None))


class LogprobHead(nn.Linear):
    """A model's output projection that can also return log-probs without keeping logits.

    It lives inside the model, so that ZeRO-3's hooks and tied embeddings see an ordinary call of the module.
    """

    shape = LogitShape()
    """Of the log-probs; of logits the model itself takes care."""

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        loss_of_logprobs: LossOfLogprobs | None = None,
    ) -> Any:
        """Return logits [..., V]; with targets [R] and hidden [R, H] return (log-probs [R], entropy [R]) in float32.

        With loss_of_logprobs too, return (sum of the losses, log-probs, entropy); the loss alone has gradients.
        """
        if targets is None:
            return super().forward(hidden)
        shape: dict[str, Any] = {"logit_scale": self.shape.logit_scale, "softcap": self.shape.softcap}
        if loss_of_logprobs is None:
            return fused_logprobs(hidden, self.weight, targets, temperature, self.bias, **shape)
        return token_loss_one_pass(hidden, self.weight, targets, temperature, loss_of_logprobs, self.bias, **shape)


class ValueHead(nn.Linear):
    """A scalar head in float32: bfloat16 would leave a value three significant digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return [...] float32 of hidden [..., H]."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)


class PackedModel(nn.Module):
    """A Hugging Face model that runs on packed sequences, each as if it were alone."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model
        self.is_padded = not _can_pack(model)
        """Whether sequences are laid out in rows of equal length on their way through the model."""
        self.ranks: World | None = None
        """The ranks that share each micro-batch's tokens, see sequence_parallel.py; None runs all of them here."""

    @property
    def packs_freely(self) -> bool:
        """Whether a token costs the same in a pack of any size."""
        return not self.is_padded and self.model.config._attn_implementation in PACKED

    def arguments(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int
    ) -> dict[str, Tensor | int]:
        """Return what the Hugging Face model is called with: one row of N tokens, or [S, L] padded on the right.

        Where ranks share tokens, masks and lengths are of all tokens, and the row is this rank's slice of it.
        """
        if not self.is_padded:
            rank, size = (self.ranks.rank, self.ranks.size) if self.ranks else (0, 1)
            ids, positions, ends, longest = pad_to_ranks(input_ids, position_ids, cu_seqlens, max_length, size)
            arguments = packing_arguments(self.model, ends, longest, ids.shape[1])
            own = {"input_ids": ids.chunk(size, dim=1)[rank], "position_ids": positions.chunk(size, dim=1)[rank]}
            return own | arguments
        mask = _row_mask(cu_seqlens, max_length)
        rows = input_ids.new_zeros(mask.shape).masked_scatter(mask, input_ids)
        return {"input_ids": rows, "attention_mask": mask.long()}

    def hidden(self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int) -> Tensor:
        """Return the last hidden states, [N, H], or of this rank's slice of N."""
        arguments = self.arguments(input_ids, position_ids, cu_seqlens, max_length)
        output = self.model.base_model(use_cache=False, **arguments).last_hidden_state
        return output[_row_mask(cu_seqlens, max_length)] if self.is_padded else output[0]


def _can_pack(model: PreTrainedModel) -> bool:
    """Return whether position ids and masks keep packed sequences apart; ALiBi and recurrences know neither."""
    config = model.config.get_text_config()
    return (
        "position_ids" in inspect.signature(model.base_model.forward).parameters
        and not model._is_stateful
        and not getattr(config, "alibi", False)
        and getattr(config, "attention_chunk_size", None) is None  # chunks start where the row does
    )


def _row_mask(cu_seqlens: Tensor, max_length: int) -> Tensor:
    """Return [S, L] bool, true where a sequence has a token when each starts a row of its own."""
    return torch.arange(max_length, device=cu_seqlens.device) < cu_seqlens.diff()[:, None]


class Actor(PackedModel):
    """A causal language model; forward returns what the loss needs of the response tokens."""

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
    ) -> tuple[Tensor, ...]:
        """Return log-probs and entropies, both [R] float32, of targets [R] predicted at positions index [R] of N.

        With loss_of_logprobs, what LogprobHead returns then.
        """
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        head = self.model.get_output_embeddings()
        if self.ranks is None:
            return head(hidden[index], targets, temperature, loss_of_logprobs)
        share = TokenSlice(self.ranks, input_ids.shape[1], index)
        own_loss = share.shifted(loss_of_logprobs)
        *losses, logprobs, entropy = head(hidden[share.index], targets[share.read], temperature, own_loss)
        return (*map(share.total, losses), *share.join(logprobs, entropy))


class ValueModel(PackedModel):
    """A sequence classifier with one label: the critic, read at every token, or the reward model, read at the last."""

    def forward(
        self, input_ids: Tensor, position_ids: Tensor, cu_seqlens: Tensor, max_length: int, index: Tensor
    ) -> Tensor:
        """Return the head's output at positions index [R] of N, [R] float32."""
        hidden = self.hidden(input_ids, position_ids, cu_seqlens, max_length)
        if self.ranks is None:
            return self.model.score(hidden[index])
        share = TokenSlice(self.ranks, input_ids.shape[1], index)
        return share.join(self.model.score(hidden[share.index]))[0]


def packed_inputs(packed: Packed) -> dict[str, Any]:
    """Return the arguments that Actor and ValueModel share."""
    return {
        "input_ids": packed.input_ids,
        "position_ids": packed.position_ids,
        "cu_seqlens": packed.cu_seqlens,
        "max_length": packed.max_length,
    }


def probe_inputs(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of two packed sequences, and of the second alone, its four tokens the last of seven."""
    places = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=model.device)
    ids = torch.arange(7, device=model.device)[None] % model.config.get_text_config().vocab_size
    ends = torch.tensor([0, 3, 7], dtype=torch.int32, device=model.device)
    both = {"input_ids": ids, "position_ids": places, "cu_seqlens": ends, "max_length": 4}
    return both, both | {"input_ids": ids[:, 3:], "position_ids": places[:, 3:], "cu_seqlens": ends[1:] - 3}


def is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether the difference is small beside the values: in float32 1e-3, in 16 bits `tolerance`."""
    limit = 1e-3 if expected.dtype == torch.float32 else tolerance
    return bool((found.float() - expected.float()).norm() <= limit * expected.float().norm())


@torch.no_grad()
def _is_packed_like_alone(module: PackedModel) -> bool:
    """Return whether a sequence gets beside another one what it gets alone."""
    both, alone = probe_inputs(module.model)
    try:
        # In 16 bits another number of rows may send a token to another expert; a neighbour that is seen changes all.
        return is_close(module.hidden(**both)[3:], module.hidden(**alone), 0.25)
    except ValueError:  # varlen attention, of a model that does not hand on the lengths
        if module.is_padded:
            raise
        return False


def settle_layout(module: PackedModel, config: ModelsConfig, path: str, *, field: str) -> None:
    """Prove that the model keeps packed sequences apart; where it does not, run them padded, and prove that.

    Raises:
        ConfigError: neither works, or the attention that was set cannot run padded.
    """
    model = module.model
    name = f"{field} = {path}: {type(model).__name__}"
    if not module.is_padded and _is_packed_like_alone(module):
        return
    module.is_padded = True
    _logger.warning("%s cannot keep packed sequences apart and runs them padded to the longest, which costs time", name)
    if model.config._attn_implementation == "varlen":
        check(config.attention == "auto", f"models.attention = varlen: {name} runs padded; use sdpa or auto")
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    check(_is_packed_like_alone(module), f"{name} gives a sequence other hidden states beside another one than alone")


@torch.no_grad()
def check_head(actor: Actor, path: str, *, field: str) -> None:
    """Prove that the model's own logits are those that log-probs are taken of.

    Raises:
        ConfigError: the model does more to them than logit_shape knows.
    """
    model, (_, alone) = actor.model, probe_inputs(actor.model)
    head = model.get_output_embeddings()
    ours = head.shape.apply(head(actor.hidden(**alone)))
    theirs = model(use_cache=False, **actor.arguments(**alone)).logits[0]
    check(
        is_close(ours, theirs, 0.02),
        f"{field} = {path}: {type(model).__name__} changes logits after its head in a way that is not known here",
    )
