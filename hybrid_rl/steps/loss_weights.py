"""Which response tokens the losses see, and the importance weight of each."""

from hybrid_rl.algorithms.correction import importance_weights
from hybrid_rl.batch import TrainBatch
from hybrid_rl.config import UpdateConfig


def add_loss_weights(batch: TrainBatch, config: UpdateConfig) -> tuple[TrainBatch, dict[str, float]]:
    """Return the batch with loss_mask and, where update.correction asks for them, loss_weights.

    Returns:
        batch and this rank's sums over its response tokens: `correction/weight`, and `correction/out`, the tokens whose
        weight a bound changed; no sums without a correction.
    Raises:
        ValueError: a log-prob is not finite.
    """
    mask = batch.response_mask
    loss_mask = mask & ~batch.is_truncated[:, None] if config.mask_truncated else mask
    if config.correction == "none":
        return batch.with_fields(loss_mask=loss_mask), {}
    assert batch.old_logprobs is not None
    weights, is_out = importance_weights(
        batch.old_logprobs,
        batch.rollout_logprobs,
        mask,
        kind=config.correction,
        low=config.correction_low,
        high=config.correction_high,
    )
    sums = {"correction/weight": float(weights[mask].sum()), "correction/out": float(is_out[mask].sum())}
    return batch.with_fields(loss_mask=loss_mask, loss_weights=weights), sums
