"""Verification of a loaded model: packed sequences are independent, and its logits are those of the log-probs."""

import logging
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hybrid_rl.config import ModelsConfig, check
from hybrid_rl.models.packed import Actor, PackedModel, ValueModel

_logger = logging.getLogger(__name__)


def probe_inputs(model: PreTrainedModel) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the inputs of two packed sequences of three and four tokens, and the inputs of the second one alone."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]], device=model.device)
    ids = torch.arange(7, device=model.device)[None] % model.config.get_text_config().vocab_size
    bounds = torch.tensor([0, 3, 7], dtype=torch.int32, device=model.device)
    both = {"input_ids": ids, "position_ids": positions, "cu_seqlens": bounds, "max_length": 4}
    return both, both | {"input_ids": ids[:, 3:], "position_ids": positions[:, 3:], "cu_seqlens": bounds[1:] - 3}


def is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    """Return whether the norm of the difference is small relative to `expected`.

    Args:
        tolerance: largest relative difference in 16 bits; in float32 it is 1e-3.
    """
    limit = 1e-3 if expected.dtype == torch.float32 else tolerance
    return bool((found.float() - expected.float()).norm() <= limit * expected.float().norm())


@torch.no_grad()
def _is_packing_exact(module: PackedModel) -> bool:
    """Return whether a sequence has the same hidden states behind another sequence as alone."""
    both, alone = probe_inputs(module.model)
    try:
        # In 16 bits, another number of rows may route a token to another expert; attention to a neighbour changes
        # every state by far more.
        return is_close(module.hidden(**both)[3:], module.hidden(**alone), 0.25)
    except ValueError:  # varlen attention of a model that does not pass the lengths on
        if module.is_padded:
            raise
        return False


def verify_packing(module: PackedModel, config: ModelsConfig, path: str, *, field: str) -> None:
    """Verify that packed sequences do not influence each other, or else that the model runs padded, with a warning.

    Args:
        module: its `is_padded` and attention implementation change where packing is not exact.
        path, field: folder of the model and setting that names it.
    Raises:
        ConfigError: neither layout is exact, or models.attention cannot run padded.
    """
    model = module.model
    name = f"{field} = {path}: {type(model).__name__}"
    if not module.is_padded and _is_packing_exact(module):
        return
    module.is_padded = True
    _logger.warning("%s cannot keep packed sequences apart and runs them padded to the longest, which costs time", name)
    if model.config._attn_implementation == "varlen":
        check(config.attention == "auto", f"models.attention = varlen: {name} runs padded; use sdpa or auto")
        model.set_attn_implementation("sdpa" if model._supports_sdpa else "eager")
    check(
        _is_packing_exact(module),
        f"{name} computes other hidden states for a sequence in a padded batch than for it alone",
    )


@torch.no_grad()
def verify_logits(actor: Actor, path: str, *, field: str) -> None:
    """Verify that log-probs are computed from the model's own logits.

    Raises:
        ConfigError: the model changes the output of its head in a way that `logit_scaling` does not know.
    """
    model, (_, alone) = actor.model, probe_inputs(actor.model)
    head = model.get_output_embeddings()
    ours = head.scaling.apply(head(actor.hidden(**alone)))
    theirs = model(use_cache=False, **actor.model_inputs(**alone)).logits[0]
    check(
        is_close(ours, theirs, 0.02),
        f"{field} = {path}: {type(model).__name__} changes logits after its head in a way that is not known here; "
        "log-probs would be wrong: use another model",
    )


@torch.no_grad()
def verify_value_head(module: ValueModel, path: str, *, field: str) -> None:
    """Verify that the values are the scores that the model itself computes, where its head is not called `score`.

    Raises:
        ConfigError: the model does more between its last hidden state and its score than its head alone.
    """
    if module.head_name == "score":  # of transformers' classes that share one forward
        return
    model, (_, alone) = module.model, probe_inputs(module.model)
    ours = module.head(module.hidden(**alone))[-1:]
    padding, model.config.pad_token_id = model.config.pad_token_id, None  # the score is then of the last token
    try:
        theirs = model(use_cache=False, **module.model_inputs(**alone)).logits.flatten()
    finally:
        model.config.pad_token_id = padding
    check(
        is_close(ours, theirs, 0.02),
        f"{field} = {path}: {type(model).__name__} computes more than {module.head_name} after its last hidden state; "
        "use a class whose head is one linear layer",
    )
