"""The actor's loss of one micro-batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from hybrid_rl.algorithms.kl import kl_loss
from hybrid_rl.algorithms.policy_loss import policy_loss
from hybrid_rl.algorithms.specs import POLICY_LOSSES
from hybrid_rl.batch import Packed, TrainBatch, to_device
from hybrid_rl.config import UpdateConfig
from hybrid_rl.steps.updates.optimizer_step import Sums


@dataclass(frozen=True, kw_only=True)
class KlInLoss:
    """The KL to the reference as a part of the actor's loss."""

    coef: float
    estimator: str
    """A name in specs.KL_ESTIMATORS."""
    is_unbiased: bool
    """Weight by the ratio to the old policy; see `kl_loss`."""


class ActorLoss:
    """The actor's loss of one micro-batch, token by token; [R] are its response tokens."""

    def __init__(
        self, packed: Packed, batch: TrainBatch, weights: Tensor, config: UpdateConfig, kl: KlInLoss | None
    ) -> None:
        """Gather the fields that the loss reads, [R] each; `mini_batch_weights` gives the weights [R]."""
        assert batch.old_logprobs is not None and batch.advantages is not None
        self._config = config
        self._kl = kl
        self._weights = weights
        self._policy_weights = weights if batch.loss_weights is None else weights * packed.gather(batch.loss_weights)
        self._old = packed.gather(batch.old_logprobs)
        self._advantages = packed.gather(batch.advantages)
        self._ref: Tensor | None = None
        if kl is not None:
            assert batch.ref_logprobs is not None
            self._ref = packed.gather(batch.ref_logprobs)
        self._sequences = to_device(packed.token_rows, weights.device)
        self._num_sequences = len(batch)

    @property
    def is_elementwise(self) -> bool:
        """Whether a token's loss depends on no other token, so that it can be computed in slices."""
        return not POLICY_LOSSES[self._config.policy_loss].is_sequence_level

    def __call__(self, logprobs: Tensor, entropy: Tensor, tokens: slice) -> Tensor:
        """Return the weighted losses [n] of some tokens, given their log-probs and entropies [n]."""
        loss = self._policy_weights[tokens] * self._policy_loss(logprobs, tokens)[0]
        if self._config.entropy_coef:
            loss = loss - self._config.entropy_coef * self._weights[tokens] * entropy
        if self._kl is not None:
            loss = loss + self._kl.coef * self._weights[tokens] * self._kl_loss(self._kl, logprobs, tokens)
        return loss

    def _policy_loss(self, logprobs: Tensor, tokens: slice) -> tuple[Tensor, Tensor]:
        config = self._config
        return policy_loss(
            logprobs,
            self._old[tokens],
            self._advantages[tokens],
            kind=config.policy_loss,
            clip_low=config.clip_low,
            clip_high=config.clip_high,
            dual_clip=config.dual_clip,
            sequence_index=self._sequences[tokens],
            num_sequences=self._num_sequences,
        )

    def _kl_loss(self, kl: KlInLoss, logprobs: Tensor, tokens: slice) -> Tensor:
        assert self._ref is not None
        return kl_loss(logprobs, self._old[tokens], self._ref[tokens], kl.estimator, unbiased=kl.is_unbiased)

    @torch.no_grad()
    def sums(self, logprobs: Tensor, entropy: Tensor) -> Sums:
        """Return the sums for the metrics over all tokens, given their log-probs and entropies [R]."""
        everything, log_ratio = slice(0, len(logprobs)), logprobs - self._old
        token_loss, is_clipped = self._policy_loss(logprobs, everything)
        found = {
            "loss": (self._policy_weights * token_loss).sum(),
            "clip_fraction": (self._weights * is_clipped).sum(),
            "ratio": (self._weights * log_ratio.exp()).sum(),
            "log_ratio": (self._weights * log_ratio.abs()).sum(),
            "entropy": (self._weights * entropy).sum(),
        }
        if self._kl is not None:
            found["kl_loss"] = (self._weights * self._kl_loss(self._kl, logprobs, everything)).sum()
        return found
