"""Sequence parallelism: DeepSpeed's Ulysses around the attention function of a model.

Each rank of a group computes a slice of the tokens. For attention, Ulysses exchanges them for all tokens of some heads.
"""

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
from hybrid_rl.models.sequence_parallel import check_slices
from hybrid_rl.models.verification import is_close, probe_inputs

Attention = Callable[..., tuple[Tensor, Tensor | None]]
M = TypeVar("M", bound=PackedModel)

_group_of: WeakKeyDictionary[nn.Module, World] = WeakKeyDictionary()
"""Module of a sequence-parallel model -> its group."""


def enable_sequence_parallel(module: M, ranks: World | None, path: str, *, field: str) -> M:
    """Make a module compute a slice of each micro-batch's tokens, and return it; a collective of the group.

    The slices of the hidden states are compared with the hidden states that the module computes without slices.

    Args:
        ranks: sequence-parallel group, with collectives for the run's device; None leaves the module unchanged.
        path: path of the model, for messages.
        field: setting that names the model, for messages.

    Raises:
        ConfigError: the model does not support sequence parallelism.
    """
    if ranks is None:
        return module
    model, (both, _) = module.model, probe_inputs(module.model)
    name = f"update.sequence_parallel_size = {ranks.size}: {field} = {path}: {type(model).__name__}"
    attention = model.config._attn_implementation
    check_slices(model.config, attention, is_padded=module.is_padded, where=name)
    deepspeed.init_distributed()
    _wrap_attention(attention)
    with torch.no_grad():
        whole = module.hidden(**both)
        _group_of.update(dict.fromkeys(model.modules(), ranks))
        module.sequence_parallel_group = ranks
        try:
            part = module.hidden(**both)
        except (AssertionError, ValueError) as error:  # DeepSpeed asserts the shapes of queries, keys and values
            raise ConfigError(
                f"{name} cannot slice its tokens ({str(error).strip().splitlines()[0]}); use 1"
            ) from error
    expected = whole[ranks.rank * len(part) :][: len(part)]
    is_same = is_close(part[: len(expected)], expected, 0.25)
    check(
        all(ranks.all_gather(is_same)), f"{name} gives a sequence other hidden states when its tokens are sliced; use 1"
    )
    return module


@functools.cache
def _wrap_attention(name: str) -> None:
    """Replace an attention function of transformers by one that also serves sequence-parallel models.

    The function keeps its name, because transformers treats some names specially.
    """
    attention: Attention = ALL_ATTENTION_FUNCTIONS[name]

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; query is [1, heads, N, D], or this rank's slice of N."""
        ranks = _group_of.get(module)
        if ranks is None:
            return attention(module, query, key, value, mask, **options)
        # Ulysses requires position ids, which have no effect here, because masks and lengths are of all tokens.
        options["position_ids"] = torch.zeros(1, query.shape[2], dtype=torch.int64, device=query.device)
        exchange = _exchange(attention, query.shape[1], key.shape[1], query.shape[3], ranks.group)
        context, weights = exchange(module, query, key, value, mask, **options)  # [1, n, heads x D]
        return context.unflatten(2, (query.shape[1], -1)), weights

    AttentionInterface.register(name, attend)


@functools.cache
def _exchange(
    attention: Attention, num_heads: int, num_key_heads: int, head_size: int, group: dist.ProcessGroup
) -> UlyssesSPAttentionHF:
    """Return the module that gives this rank all tokens of some heads, attends, and returns its slice of all heads."""
    return UlyssesSPAttentionHF(
        attn=attention,
        batch_size=1,
        attn_head_count=num_heads,
        attn_head_size=head_size,
        kv_head_count=num_key_heads,
        num_hidden_layers=1,  # only for its debugging output
        process_group=group,
        seq_length_is_variable=True,
    )
