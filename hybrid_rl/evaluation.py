"""Evaluations of a run: the accuracy on held-out prompts, in the phase ROLLOUT."""

from hybrid_rl.rewards import scoring
from hybrid_rl.run import Metrics, Run
from hybrid_rl.stages import logged, sample
from hybrid_rl.steps import judging


def evaluate(run: Run, step: int, *, is_final: bool = False) -> Metrics:
    """Return the accuracy on held-out prompts where an evaluation is due: first, every few steps and last; else {}."""
    every = run.config.run.eval_every_steps
    has_judge = run.data.eval_scorer is not None or (run.config.is_judged_by_environment and bool(run.data.eval_sets))
    if not has_judge or not (is_final or step == 1 or (step - 1) % every == 0):
        return {}
    metrics = measure_accuracy(run, step)
    run.evaluations.add(metrics)
    return metrics


@logged("evaluation")
def measure_accuracy(run: Run, step: int) -> Metrics:
    """Return accuracy, mean score, response length and pass@k of each set of held-out prompts, over all ranks."""
    config, data, settings = run.config, run.data, run.config.evaluation_rollout
    seed, top_p = config.run.seed + 1, config.run.eval_top_p
    responses = sample(run, data.eval_prompts, settings, seed=seed, step=step, top_p=top_p, environment_step=0)
    with scoring.fail_together(run.world):
        scores, failures = scoring.judge(responses, data.eval_scorer)
    sums, counts = judging.sums_of_sets(
        {name: len(prompts) for name, prompts in data.eval_sets.items()},
        responses,
        scores,
        failures,
        num_samples=settings.group_size,
        pass_at=config.run.eval_pass_at,
    )
    return judging.with_accuracy(run.world.means(sums, counts), list(data.eval_sets), config.run.eval_target)


def is_target_reached(run: Run, evaluation: Metrics) -> bool:
    """Return whether an evaluation reaches run.stop_at_accuracy."""
    target = run.config.run.stop_at_accuracy
    return target is not None and evaluation.get("accuracy", -1.0) >= target
