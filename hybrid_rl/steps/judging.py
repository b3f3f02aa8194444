"""The metrics of an evaluation: accuracy, pass@k and others of each set of held-out prompts."""

import math
from collections.abc import Collection, Mapping, Sequence

from hybrid_rl.batch import Rollout

Sums = dict[str, float]
"""Name of a metric -> its sum over prompts."""


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the unbiased estimate of the probability that at least one of k responses to a prompt is correct.

    1 - C(n - c, k) / C(n, k), the fraction of all choices of k of the n responses with one of the c correct ones.

    Source: Chen et al. 2021 (Codex, arXiv 2107.03374), equation 1.

    Args:
        num_samples: n, responses to the prompt.
        num_correct: c, how many of them are correct.
        k: from 1 to n.
    """
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def evaluation_sums(
    responses: Sequence[Rollout],
    scores: Sequence[float],
    is_failed: Sequence[bool],
    *,
    num_samples: int,
    pass_at: Sequence[int] | None = None,
) -> Sums:
    """Return the sums over the prompts of one set of each metric of a prompt.

    Args:
        responses: num_samples consecutive responses per prompt.
        scores: of each response; it is correct if its score is at least 1.
        is_failed: whether the rule function failed for each response.
        pass_at: values of k for pass@k; None is num_samples, and none with one response.
    Returns:
        accuracy: fraction of the prompt's responses that are correct; with several, also mean@n and pass@k.
        score, response_length, truncated, num_failed: means over the prompt's responses.
    """
    is_correct = [score >= 1 for score in scores]
    sums = {
        "accuracy": sum(is_correct) / num_samples,
        "score": sum(scores) / num_samples,
        "response_length": sum(len(r.response_ids) for r in responses) / num_samples,
        "truncated": sum(r.is_truncated for r in responses) / num_samples,
        "num_failed": sum(is_failed) / num_samples,
    }
    if num_samples == 1:
        return sums
    sums[f"mean@{num_samples}"] = sums["accuracy"]
    counts = [sum(is_correct[start : start + num_samples]) for start in range(0, len(is_correct), num_samples)]
    for k in [num_samples] if pass_at is None else pass_at:
        sums[f"pass@{k}"] = sum(pass_at_k(num_samples, count, k) for count in counts)
    return sums


def sums_of_sets(
    sizes: Mapping[str, int],
    responses: Sequence[Rollout],
    scores: Sequence[float],
    failed: Collection[int],
    *,
    num_samples: int,
    pass_at: Sequence[int] | None = None,
) -> tuple[Sums, Sums]:
    """Return the sums of the metrics of all sets, by their names, and the number of prompts of each.

    Args:
        sizes: name of a set -> number of its prompts on this rank.
        responses, scores: of the prompts of all sets, one set after the other.
        failed: rows of the responses for which the rule function failed.
        num_samples, pass_at: see evaluation_sums.
    """
    sums, counts, start = Sums(), Sums(), 0
    for name, size in sizes.items():
        end = start + size * num_samples
        is_failed = [row in failed for row in range(start, end)]
        found = evaluation_sums(
            responses[start:end], scores[start:end], is_failed, num_samples=num_samples, pass_at=pass_at
        )
        sums |= {metric_name(name, metric): value for metric, value in found.items()}
        counts |= {metric_name(name, metric): size for metric in found}
        start = end
    return sums, counts


def metric_name(set_name: str, metric: str) -> str:
    """Return the name of a metric of a set of held-out prompts; the name of a set is empty where there is one."""
    if set_name:
        return f"eval/{set_name}/{metric}"
    return metric if metric == "accuracy" else f"eval/{metric}"


def with_accuracy(metrics: Mapping[str, float], set_names: Sequence[str], target: str | None) -> dict[str, float]:
    """Return the metrics of all sets with `accuracy`, by which evaluations compare.

    Args:
        metrics: name -> value, see metric_name.
        set_names: of all sets.
        target: set whose accuracy it is; None is the mean over the sets.
    """
    chosen = [metrics[metric_name(name, "accuracy")] for name in set_names if target in (None, name)]
    return {"accuracy": sum(chosen) / len(chosen), **metrics}
