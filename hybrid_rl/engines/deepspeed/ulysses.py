"""Attention of ranks that share tokens: DeepSpeed's Ulysses around the attention function that a model has anyway."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime.sequence_parallel.ulysses_sp import UlyssesSPAttentionHF
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hybrid_rl.config import ConfigError, check
from hybrid_rl.distributed import World
from hybrid_rl.models.packed import PackedModel
from hybrid_rl.models.verification import is_close, probe_inputs

Attention = Callable[..., tuple[Tensor, Tensor | None]]
M = TypeVar("M", bound=PackedModel)

# Each gets its sequences from arguments, which may speak of all tokens; eager is no function that can be wrapped.
SHAREABLE = ("varlen", "flash_attention_2", "sdpa")
_ranks_of: WeakKeyDictionary[nn.Module, World] = WeakKeyDictionary()
"""The layers that share their tokens, and with whom."""


def enable_sequence_parallel(module: M, ranks: World | None, path: str, *, field: str) -> M:
    """Return the module, made to compute its slice of each micro-batch's tokens; every rank of the group calls it.

    The proof is that the ranks have between them the hidden states that each of them had alone.

    Args:
        ranks: that share tokens, with collectives for the run's device; None leaves the module as it is.
    Raises:
        ConfigError: the model cannot run like that.
    """
    if ranks is None:
        return module
    model, (both, _) = module.model, probe_inputs(module.model)
    name = f"update.sequence_parallel_size = {ranks.size}: {field} = {path}: {type(model).__name__}"
    attention = model.config._attn_implementation
    check(not module.is_padded, f"{name} runs padded, which leaves no packed tokens to share; use 1")
    check(
        attention in SHAREABLE,
        f"{name} runs with models.attention = {attention}; tokens are shared with {', '.join(SHAREABLE)}",
    )
    check(
        attention != "sdpa" or getattr(model.config.get_text_config(), "sliding_window", None) is None,
        f"{name} has a sliding window, for which models.attention = sdpa makes masks of a rank's own tokens; "
        "use varlen or flash_attention_2",
    )
    deepspeed.init_distributed()
    _make_shareable(attention)
    with torch.no_grad():
        whole = module.hidden(**both)
        _ranks_of.update(dict.fromkeys(model.modules(), ranks))
        module.sequence_parallel_group = ranks
        try:
            part = module.hidden(**both)
        except (AssertionError, ValueError) as error:  # DeepSpeed asserts the shapes of queries, keys and values
            raise ConfigError(f"{name} cannot share its tokens ({str(error).strip().splitlines()[0]})") from error
    expected = whole[ranks.rank * len(part) :][: len(part)]
    is_same = is_close(part[: len(expected)], expected, 0.25)
    check(all(ranks.all_gather(is_same)), f"{name} gives a sequence other hidden states when ranks share its tokens")
    return module


@functools.cache
def _make_shareable(name: str) -> None:
    """Let transformers' attention of this name serve layers that share their tokens too.

    A name of its own would miss what transformers does for this one, and flash-attn is found by its name.
    """
    attention: Attention = ALL_ATTENTION_FUNCTIONS[name]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; query is [1, heads, N, D], or this rank's slice of N."""
        ranks = _ranks_of.get(module)
        if ranks is None:
            return attention(module, query, key, value, mask, **options)
        # Ulysses gathers them and wants them; masks and lengths come whole, so their values tell nothing here.
        options["position_ids"] = torch.zeros(1, query.shape[2], dtype=torch.int64, device=query.device)
        exchange = _exchange(attention, query.shape[1], key.shape[1], query.shape[3], ranks.group)
        context, weights = exchange(module, query, key, value, mask, **options)  # [1, n, heads x D], which not all take
        return context.unflatten(2, (query.shape[1], -1)), weights

    AttentionInterface.register(name, attend)


@functools.cache
def _exchange(
    attention: Attention, num_heads: int, num_key_heads: int, head_size: int, group: dist.ProcessGroup
) -> UlyssesSPAttentionHF:
    """Return what gives each rank all tokens of some heads, attends, and gives the tokens back."""
    return UlyssesSPAttentionHF(
        attn=attention,
        batch_size=1,
        attn_head_count=num_heads,
        attn_head_size=head_size,
        kv_head_count=num_key_heads,
        num_hidden_layers=1,  # of use for its debugging alone
        process_group=group,
        seq_length_is_variable=True,
    )
