"""Heads of packed models: log-probs without stored logits for policies, float32 scalars for value and reward models."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from hybrid_rl_kernels import fused_logprobs, token_loss_one_pass

LossOfLogprobs = Callable[[Tensor, Tensor, slice], Tensor]
"""Maps log-probs and entropies [n] of a slice of the targets to losses [n]; each loss depends on its own token only."""


@dataclass(frozen=True, kw_only=True)
class LogitScaling:
    """What a model does to the output of its head: scale it, then cap it by softcap * tanh(x / softcap)."""

    logit_scale: float = 1.0
    softcap: float | None = None

    def apply(self, logits: Tensor) -> Tensor:
        """Return the model's logits, given the output of its head."""
        scaled = logits * self.logit_scale
        return scaled if self.softcap is None else self.softcap * torch.tanh(scaled / self.softcap)


def logit_scaling(config: PretrainedConfig) -> LogitScaling:
    """Return the logit scaling that a config names; `verify_logits` compares it with the logits of the loaded model."""
    text = config.get_text_config()
    factor = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
    scaling = getattr(text, "logits_scaling", None) or 1.0  # Granite and MiniCPM divide by it, HyperCLOVA X multiplies
    factor = factor * scaling if text.model_type == "hyperclovax" else factor / scaling
    return LogitScaling(logit_scale=factor, softcap=getattr(text, "final_logit_softcapping", None))


class LogprobHead(nn.Linear):
    """The output projection of a causal language model, which can return log-probs without storing logits.

    It stays a submodule of the model, so ZeRO-3's hooks and tied embeddings see an ordinary call of the module.
    """

    scaling = LogitScaling()
    """Applied before log-probs are taken; when forward returns logits, the model applies its own."""

    def forward(
        self,
        hidden: Tensor,
        targets: Tensor | None = None,
        temperature: float = 1.0,
        loss_of_logprobs: LossOfLogprobs | None = None,
    ) -> Any:
        """Return logits, log-probs and entropies, or a loss of them, depending on the arguments.

        Args:
            hidden: [..., H] without targets, else [R, H].
            targets: [R] int64, the tokens whose log-probs are computed.
            temperature: divides the logits.
            loss_of_logprobs: loss of the targets, computed together with its gradients.
        Returns:
            Without targets, logits [..., V]. With targets, (log-probs, entropies), both [R] float32. With
            loss_of_logprobs too, (sum of the losses, log-probs, entropies), of which only the sum has gradients.
        """
        if targets is None:
            return super().forward(hidden)
        scaling: dict[str, Any] = {"logit_scale": self.scaling.logit_scale, "softcap": self.scaling.softcap}
        if loss_of_logprobs is None:
            return fused_logprobs(hidden, self.weight, targets, temperature, self.bias, **scaling)
        return token_loss_one_pass(hidden, self.weight, targets, temperature, loss_of_logprobs, self.bias, **scaling)


class ValueHead(nn.Linear):
    """A scalar head that computes in float32: bfloat16 would leave a value three significant digits."""

    def forward(self, hidden: Tensor) -> Tensor:
        """Return one scalar per position, [...] float32, of hidden states [..., H]."""
        bias = None if self.bias is None else self.bias.float()
        return nn.functional.linear(hidden.float(), self.weight.float(), bias).squeeze(-1)
