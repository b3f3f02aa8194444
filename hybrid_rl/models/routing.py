"""Routing of mixtures of experts: replay of the experts that the engine chose, and the loss that balances experts.

Routing replay makes the trainer compute each token with the experts with which the engine sampled it. Without it,
rounding makes the two sides choose other experts where scores are close, and their log-probs differ.

Source: Ma et al. 2025 (Rollout Routing Replay, arXiv 2510.11370).
"""

import re
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

_TOPK = (torch.topk, Tensor.topk)
_CORRECTION = "e_score_correction_bias"


class _Replayed(TorchFunctionMode):
    """Makes the selection of experts in the body return given experts, with their values."""

    def __init__(self, experts: Tensor, num_experts: int) -> None:
        """Take the experts [N, K] int64 of each token, negative in rows without a choice of the engine."""
        super().__init__()
        self._experts = experts
        self._num_experts = num_experts

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func not in _TOPK or args[0].shape != (len(self._experts), self._num_experts):
            return found
        experts = torch.where(self._experts < 0, found.indices, self._experts)
        return torch.return_types.topk((args[0].gather(-1, experts), experts))


class ReplayingRouter(nn.Module):
    """Mixin in front of a router of transformers, which returns (logits [N, E], factors [N, K], experts [N, K])."""

    num_experts: int
    top_k: int
    replayed: Tensor | None = None
    """Experts of the current micro-batch's tokens, [N, K] int64, negative in rows without any; None replays none."""
    counted: Tensor | None = None
    """[N] float32, 1 for the tokens that the balance counts; None does not compute it."""
    balance: Tensor | None = None
    """Load-balancing loss of the last forward with `counted`, with gradient."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return what the router returns, for the replayed experts where there are any."""
        replaying: AbstractContextManager[Any] = (
            nullcontext() if self.replayed is None else _Replayed(self.replayed, self.num_experts)
        )
        with replaying:
            logits, factors, experts = super().forward(hidden_states)
        if self.counted is not None:
            is_sigmoid = hasattr(self, _CORRECTION)
            self.balance = load_balance(logits, experts, self.counted, is_sigmoid=is_sigmoid)
        return logits, factors, experts


def load_balance(logits: Tensor, experts: Tensor, counted: Tensor, *, is_sigmoid: bool = False) -> Tensor:
    """Return E * sum_e f_e * p_e: 1 if all experts get as many tokens, E if all tokens go to the same ones of K = 1.

    f_e is the share of expert e among all choices, p_e the mean of its probability.

    Args:
        logits: [N, E], of the router.
        experts: [N, K] int64, the chosen ones.
        counted: [N] float32, 1 for tokens that count, else 0; without any the result is 0.
        is_sigmoid: whether probabilities are normalised sigmoids, as in DeepSeek-V3, and not a softmax.

    Source: Fedus et al. 2022 (arXiv 2101.03961), equations 4 to 6, with K choices per token.
    """
    scores = logits.float().sigmoid() if is_sigmoid else logits.float().softmax(-1)
    probabilities = scores / scores.sum(-1, keepdim=True) if is_sigmoid else scores
    num_experts, num_tokens = logits.shape[-1], counted.sum().clamp(min=1)
    choices = F.one_hot(experts, num_experts).sum(1).to(counted.dtype)  # [N, E]
    shares = (counted[:, None] * choices).sum(0) / (num_tokens * experts.shape[-1])
    means = (counted[:, None] * probabilities).sum(0) / num_tokens
    return num_experts * (shares * means).sum()


class Routing:
    """The routers of a mixture of experts, by the number of their decoder layer."""

    def __init__(self, model: nn.Module) -> None:
        """Take a Hugging Face model; see `find_routers`."""
        self._routers = find_routers(model)
        for router in self._routers.values():
            if not isinstance(router, ReplayingRouter):
                kind = type(router)
                router.__class__ = type(f"Replaying{kind.__name__}", (ReplayingRouter, kind), {})

    @property
    def has_routers(self) -> bool:
        """Whether the model is a mixture of experts that is known here."""
        return bool(self._routers)

    def begin(self, replayed: Tensor | None, counted: Tensor | None) -> None:
        """Set what the next forward, and a recomputation of it in the backward pass, replays and measures.

        Args:
            replayed: [N, layers, K] integers, the engine's choices for each token of each decoder layer; None for none.
            counted: see ReplayingRouter.
        """
        for layer, router in self._routers.items():
            router.replayed = None if replayed is None else replayed[:, layer].long()
            router.counted, router.balance = counted, None

    def end(self) -> Tensor | None:
        """Return the mean load-balancing loss of the layers, after a forward; None if nothing was measured.

        The routers keep what `begin` has set, because a recomputation must do the same as the forward.
        """
        found = [router.balance for router in self._routers.values() if router.balance is not None]
        return torch.stack(found).mean() if found else None


class ChosenExperts:
    """Records the experts that the routers of a model choose in the forwards of the body."""

    def __init__(self, model: Any) -> None:
        """Take a Hugging Face model."""
        self._routers = find_routers(model)
        self._num_layers = model.config.get_text_config().num_hidden_layers
        self._found: dict[int, list[Tensor]] = {layer: [] for layer in self._routers}

    def __enter__(self) -> "ChosenExperts":
        self._hooks = [
            router.register_forward_hook(lambda *call, layer=layer: self._found[layer].append(call[2][2]))
            for layer, router in self._routers.items()
        ]
        return self

    def __exit__(self, *_: Any) -> None:
        for hook in self._hooks:
            hook.remove()

    def experts(self, num_rows: int) -> Tensor:
        """Return the experts [rows, tokens, layers, K] int16 of all forwards, each of which had all rows.

        Layers without routers have zeros, as in vLLM.
        """
        found = {
            layer: torch.cat([each.view(num_rows, -1, each.shape[-1]) for each in parts], dim=1)
            for layer, parts in self._found.items()
        }
        like = next(iter(found.values()))
        layers = [found.get(layer, torch.zeros_like(like)) for layer in range(self._num_layers)]
        return torch.stack(layers, dim=2).to("cpu", torch.int16)


def find_routers(model: nn.Module) -> dict[int, Any]:
    """Return the routers of a model whose experts transformers keeps in one tensor per layer, by decoder layer."""
    routers = {}
    for name, module in model.named_modules():
        layer = re.search(r"\.layers\.(\d+)\.", f".{name}.")
        gate = getattr(module, "gate", None)
        is_mixture = getattr(getattr(module, "experts", None), "gate_up_proj", None) is not None
        if layer and is_mixture and hasattr(gate, "top_k") and hasattr(gate, "num_experts"):
            routers[int(layer[1])] = gate
    return routers


def corrections(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers that correct the choices of routers, [E] float32 by name.

    DeepSeek-V3 and its descendants have them. They are weights of a checkpoint that training does not change, and
    parameters of vLLM's models.
    """
    return {name: buffer for name, buffer in model.named_buffers() if name.endswith(f".{_CORRECTION}")}
