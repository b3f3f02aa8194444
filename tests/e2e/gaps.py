"""The gap between an engine's log-probs and the trainer's, of the responses to a run's held-out prompts."""

from collections.abc import Sequence

from hybrid_rl.batch import Rollout, make_train_batch
from hybrid_rl.engines import Generation
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.run import Run
from hybrid_rl.steps.logprobs import Packing, token_logprobs


def largest_gap(run: Run, generations: Sequence[Generation]) -> float:
    """Return the largest absolute difference between a log-prob of the engine and of the trainer.

    Args:
        generations: one response to each held-out prompt.
    """
    rollouts = [
        Rollout(
            prompt=prompt,
            sequence_id=row,
            response_ids=found.token_ids,
            rollout_logprobs=found.logprobs,
            is_truncated=found.is_truncated,
            text="",
        )
        for row, (prompt, found) in enumerate(zip(run.data.eval_prompts, generations, strict=True))
    ]
    batch, packing = make_train_batch(rollouts), Packing(limit=TokenLimit(48), world=run.world)
    ours = token_logprobs(run.actor.forward, batch, packing, temperature=1.0)
    return float((batch.rollout_logprobs - ours).abs()[batch.response_mask].max())
