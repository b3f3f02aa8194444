"""Scores and rewards by hand, and the exchange of responses between ranks."""

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hybrid_rl.algorithms.estimators import group_advantages
from hybrid_rl.batch import make_train_batch
from hybrid_rl.config import AdvantageConfig, ConfigError, ModelsConfig, RewardConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.errors import RewardLostError
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_value_model
from hybrid_rl.rewards import RunningNormalizer, ScorerPool
from hybrid_rl.rewards.scoring import (
    RewardSources,
    Scored,
    add_rewards,
    balance_by_tokens,
    fail_together,
    normalize_and_clip,
    penalize,
    score_responses,
)
from hybrid_rl.steps.advantages import add_advantages
from hybrid_rl.steps.logprobs import Packing, sequence_values
from tests.conftest import make_rollout

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU)


def scored(scores: list[float], groups: list[int]) -> Scored:
    """Return responses with their scores, each in the group of its prompt."""
    rollouts = [make_rollout(prompt_id=group, sequence_id=i) for i, group in enumerate(groups)]
    values = torch.tensor(scores, dtype=torch.float64)
    return Scored(rollouts=rollouts, scores=values, parts={"rule": values})


def model_of(folder: Path, spoil: float | None = None):
    critic = load_value_model(str(folder / "reward"), ModelsConfig(), CPU, field="models.reward")
    if spoil is not None:
        critic.model.model.embed_tokens.weight.data[5] = spoil  # token 5 is in the sequences of prompts 20 and 23
    packing = Packing(limit=TokenLimit(64), world=WORLD)
    return lambda rollouts: sequence_values(critic, make_train_batch(rollouts), packing)


def test_score_is_the_weighted_sum_of_its_sources(tiny, five_rollouts):
    model = model_of(tiny)
    config = RewardConfig(functions=["exact_match"], model_weight=0.5)
    with ScorerPool(["exact_match"], [2.0], timeout_s=60, on_error="raise", num_workers=1) as scorer:
        found = score_responses(five_rollouts, RewardSources(functions=scorer, model=model), config)
    values = model(five_rollouts)
    torch.testing.assert_close(found.scores, 0.5 * values.double() + torch.tensor([2.0, 0, 0, 0, 0]))
    assert found.sums["reward/model"] == pytest.approx(float(values.sum()), abs=1e-5)
    assert found.sums["reward/exact_match"] == 1 and found.sums["reward/num_failed"] == 0


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_score_that_is_not_finite_names_the_prompt(tiny, five_rollouts, value):
    with pytest.raises(
        ConfigError, match=r"the score of prompt_id 20, sequence_id \d+ is nan \(before weights: model nan"
    ):
        score_responses(five_rollouts, RewardSources(model=model_of(tiny, spoil=value)), RewardConfig())


def test_a_score_beyond_float32_is_an_error():
    with (
        ScorerPool(["exact_match"], [1e39], timeout_s=60, on_error="raise", num_workers=1) as scorer,
        pytest.raises(
            ConfigError, match=r"sequence_id 3 is 1e\+39 \(before weights: exact_match 1\): it must be finite"
        ),
    ):
        rollouts = [make_rollout(prompt_id=n, answer="7", text=text) for n, text in ((2, "8"), (3, "7"))]
        score_responses(rollouts, RewardSources(functions=scorer), RewardConfig())


def test_functions_that_did_not_fail_count_for_a_response_with_a_failure(tmp_path):
    """The second response fails one of three functions: 0.25 * 1 + 4 * 0 + 0.5 * 1."""
    path = tmp_path / "r.py"
    path.write_text(
        "def one(prompt, response): return 1\ndef inverse(prompt, response): return 1 / int(response)\n"
        "def last(prompt, response): return True\n"
    )
    names = [f"{path}:{name}" for name in ("one", "inverse", "last")]
    rollouts = [make_rollout(prompt_id=9, sequence_id=n, text=text) for n, text in ((18, "2"), (19, "0"))]
    with ScorerPool(names, [0.25, 4.0, 0.5], timeout_s=60, on_error="zero", num_workers=1) as scorer:
        found = score_responses(rollouts, RewardSources(functions=scorer), RewardConfig())
    assert found.scores.tolist() == [2.75, 0.75] and found.failed == {19}
    assert {name: part.tolist() for name, part in found.parts.items()} == dict(
        zip(names, ([1, 1], [0.5, 0], [1, 1]), strict=True)
    )
    assert found.sums["reward/num_failed"] == 1 and found.select([0]).sums["reward/num_failed"] == 0
    batch = add_rewards(found, RewardConfig(), max_response_tokens=4, world=WORLD)
    # The 0 counts like any other score in the mean of the group.
    assert group_advantages(batch.rewards, batch.group_ids, estimator="rloo").tolist() == [2.0, -2.0]


FORMS = """
def reward_func(queries, prompts, labels):
    right = float(queries[0].removeprefix(prompts[0]) == labels[0])
    return {"rewards": [right - 0.5], "scores": [right], "extra_logs": {"length": len(queries[0])}}
def form(prompt, response): return {"score": response != "9", "seen": response}
def math_only(completions, kind, **kwargs): return [2.0 if k == "math" else None for k in kind]
def steps(prompt, response): return {"score": 1, "step_rewards": [(1, 0.5)]}
"""


def judged(tmp_path, *names, rows, weights=None, gates=(), on_error="raise", token_ends=None):
    """Return the scored responses of rows (text, kind) to different prompts by functions in FORMS."""
    path = tmp_path / "f.py"
    path.write_text(FORMS)
    names, gates = [f"{path}:{name}" for name in names], [f"{path}:{gate}" for gate in gates]
    rollouts = [
        replace(made, prompt=replace(made.prompt, metadata={"kind": kind}))
        for n, (text, kind) in enumerate(rows)
        for made in [make_rollout(response_ids=[4, 5], prompt_id=n, text=text, answer="7")]
    ]
    config = RewardConfig(functions=names, gates=gates, on_error=on_error)
    with ScorerPool(names, weights, timeout_s=60, on_error=on_error, num_workers=1) as scorer:
        found = score_responses(rollouts, RewardSources(functions=scorer, token_ends=token_ends), config)
    return found, {key.rpartition("f.py:")[2]: value for key, value in found.sums.items()}


def test_a_gate_multiplies_the_other_functions_and_their_rewards_of_tokens(tmp_path):
    """The step ends at the first token and pays 0.5 of 1.5; a response 9 has no valid form."""
    rows = [("7", "math"), ("9", "math")]
    found, _ = judged(
        tmp_path, "form", "steps", rows=rows, weights=[1.0, 2.0], gates=["form"], token_ends=lambda _: [1, 2]
    )
    assert found.scores.tolist() == [1 + 2 * 1.5, 0] and found.token_rewards == {0: [(0, 1.0)]}
    batch = add_rewards(found, RewardConfig(), max_response_tokens=4, world=WORLD)
    assert batch.rewards.tolist() == [4, 0] and batch.token_rewards.tolist() == [[1, 0], [0, 0]]


@pytest.mark.parametrize(
    "estimator, expected",
    [
        ("reinforce_pp", [[0.5 + 0.5 * 1, 1], [0.5 * 1, 1]]),  # the step pays 0.5 of 1.5 at the first token
        ("dr_grpo", [[0.25, 0.25], [-0.25, -0.25]]),  # the sums 1.5 and 1 are compared
    ],
)
def test_rewards_of_steps_reach_the_advantages_of_their_tokens(tmp_path, estimator, expected):
    found, _ = judged(tmp_path, "steps", rows=[("7", "math")], token_ends=lambda _: [1, 2])
    other = replace(found.rollouts[0], sequence_id=1)
    found += replace(found, rollouts=[other], scores=torch.tensor([1.0], dtype=torch.float64), token_rewards={})
    batch = add_rewards(found, RewardConfig(), max_response_tokens=4, world=WORLD)
    batch = batch.with_fields(old_logprobs=torch.zeros(2, 2))
    config = AdvantageConfig(estimator=estimator, gamma=0.5, whiten=False, kl_coef=0)
    batch, _ = add_advantages(batch, config, WORLD)
    assert batch.advantages.tolist() == expected


def test_a_function_that_does_not_apply_counts_neither_in_the_score_nor_in_its_mean(tmp_path):
    rows = [("7", "math"), ("7", "code"), ("7", "math")]
    found, sums = judged(tmp_path, "form", "math_only", rows=rows)
    assert found.scores.tolist() == [3, 1, 3] and sums["math_only"] == 4
    counts = {name.rpartition("f.py:")[2]: count for name, count in found.counts.items()}
    assert counts["math_only"] == 2 and counts["form"] == 3
    scores = [{name.rpartition(":")[2]: value for name, value in row["scores"].items()} for row in found.details]
    assert scores == [{"form": 1, "math_only": 2}, {"form": 1}, {"form": 1, "math_only": 2}]


def test_a_response_to_which_no_function_applies_is_an_error_or_counts_as_a_failure(tmp_path):
    rows = [("7", "math"), ("7", "code")]
    with pytest.raises(ConfigError, match="none applies to prompt_id 1, sequence_id 1: every function returns None"):
        judged(tmp_path, "math_only", rows=rows)
    found, _ = judged(tmp_path, "math_only", rows=rows, on_error="zero")
    assert found.scores.tolist() == [2, 0] and found.failed == {1}


def test_scores_of_openrlhf_drive_the_filter_and_extra_logs_are_metrics(tmp_path):
    found, sums = judged(tmp_path, "reward_func", rows=[("7", "math"), ("123", "math")])
    assert found.scores.tolist() == [0.5, -0.5] and found.filtered_scores.tolist() == [1, 0]
    assert sums["reward_func"] == 0 and sums["reward_func/length"] == 4
    assert found.select([1]).filtered_scores.tolist() == [0]


def test_batches_with_and_without_further_values_become_one(tmp_path):
    """The scores of responses without scores for the filter take their place."""
    first, _ = judged(tmp_path, "reward_func", rows=[("7", "math")])
    second, _ = judged(tmp_path, "form", rows=[("8", "math")])
    both = first + second
    assert both.filtered_scores.tolist() == [1, 1] and both.scores.tolist() == [0.5, 1]
    assert sorted(both.counts.values()) == [1, 1, 1] and both.texts[0].popitem()[1] == "8"


def test_sums_of_scores_are_exact_where_float32_would_round():
    """2**24 + 1 has no float32."""
    found = scored([2.0**24, 1.0, 1.0], [1, 1, 1])
    assert found.sums["reward/score"] == found.sums["reward/rule"] == 2**24 + 2


def test_equal_rewards_stay_equal_in_spite_of_rounding():
    """0.7 + 0.2 + 0.1 and 1, and 0.3 less 0.1 and 0.2, differ in float64; in float32 subtraction the latter do."""
    whole = penalize(
        torch.tensor([0.7 + 0.2 + 0.1, 1.0, 1.3], dtype=torch.float64),
        torch.tensor([1, 1, 4]),
        torch.tensor([False, False, True]),
        RewardConfig(truncation_penalty=0.3),
        max_response_tokens=4,
    )
    assert whole.dtype == torch.float32 and whole.tolist() == [1, 1, 1]


def test_rewards_by_hand():
    """Lengths 2, 9 and 10 of 10, buffer 4: from 6 on, 3/4 and 4/4 of the penalty; the last is truncated."""
    config = RewardConfig(truncation_penalty=0.5, overlong_buffer=4, overlong_penalty=2.0)
    arguments = (torch.tensor([1.0, 1.0, 1.0]), torch.tensor([2, 9, 10]), torch.tensor([False, False, True]))
    assert penalize(*arguments, config, max_response_tokens=10).tolist() == [1.0, -0.5, -1.5]
    config = RewardConfig(truncation_penalty=9.0, clip=0.25)
    clipped = normalize_and_clip(penalize(*arguments, config, max_response_tokens=10), config, None)
    assert clipped.tolist() == [0.25, 0.25, -0.25]


def test_rewards_are_normalised_by_all_rewards_so_far():
    """Scores 0 and 2 have mean 1 and standard deviation 1; with 4 and 6 the mean is 3 and the deviation sqrt(5)."""
    normalizer = RunningNormalizer()
    config = RewardConfig(normalize=True, clip=1.2)
    make = {"max_response_tokens": 4, "world": WORLD, "normalizer": normalizer}
    assert add_rewards(scored([0, 2], [1, 1]), config, **make).rewards.tolist() == pytest.approx([-1, 1], abs=1e-5)
    later = add_rewards(scored([4, 6], [1, 1]), config, **make).rewards.tolist()
    assert later == pytest.approx([1 / math.sqrt(5), 1.2], abs=1e-5)


def test_baselines_follow_their_prompts():
    found = Scored(
        rollouts=scored([1, 0, 1], [7, 8, 7]).rollouts,
        scores=torch.tensor([1.0, 0.0, 1.0]),
        parts={},
        baselines={7: 0.25, 8: 3.0},
    )
    batch = add_rewards(found, RewardConfig(clip=2.0), max_response_tokens=4, world=WORLD)
    assert batch.baselines.tolist() == [0.25, 2.0, 0.25]


def test_penalties_of_sampled_responses_do_not_change_baselines():
    """The sampled responses are truncated, the greedy ones are not."""
    plain = scored([1, 1], [7, 8])
    truncated = [replace(rollout, is_truncated=True) for rollout in plain.rollouts]
    found = replace(plain, rollouts=truncated, baselines={7: 0.5, 8: 1.0})
    batch = add_rewards(found, RewardConfig(truncation_penalty=0.25), max_response_tokens=1, world=WORLD)
    assert batch.rewards.tolist() == [0.75, 0.75] and batch.baselines.tolist() == [0.5, 1.0]


# Several ranks


# Prompt id -> lengths of its two responses; prompts have one token. Rank 0 draws all long responses.
DRAWN = [{0: (9, 9), 2: (8, 8), 4: (7, 7)}, {1: (1, 0), 3: (2, 2)}]


FAILED = [{1, 5, 8}, {2}]
"""Sequence ids of each rank's responses for which a function failed."""


def drawn(rank: int) -> Scored:
    """Return the responses of a rank; the score of each is its sequence id, twice its prompt's id plus 0 or 1."""
    rollouts = [
        make_rollout([1], [4] * length, prompt_id=group, sequence_id=2 * group + place)
        for group, lengths in DRAWN[rank].items()
        for place, length in enumerate(lengths)
    ]
    scores = torch.tensor([float(rollout.sequence_id) for rollout in rollouts])
    baselines = {group: group / 10 for group in DRAWN[rank]}
    return Scored(
        rollouts=rollouts, scores=scores, parts={"rule": -scores}, baselines=baselines, failed=frozenset(FAILED[rank])
    )


def error_of(world: World, error: ConfigError | RewardLostError) -> str:
    """Return what the ranks raise together when the second one fails and then all of them succeed."""
    for is_wrong in (False, world.rank == 1):
        try:
            with fail_together(world):
                if is_wrong:
                    raise error
        except (ConfigError, RewardLostError) as raised:
            return f"{type(raised).__name__}: {raised}"
    return ""


def main() -> None:
    """Run as one of two ranks, and save the responses after the exchange."""
    world = join_world()
    local = balance_by_tokens(drawn(world.rank), world, world)
    together = balance_by_tokens(drawn(world.rank), world, world.data_parallel_group(2))
    rows = [(r.prompt.prompt_id, r.sequence_id, len(r.response_ids)) for r in local.rollouts]
    baselines = [local.baselines[r.prompt.prompt_id] for r in local.rollouts]
    result = {"rows": rows, "scores": local.scores, "parts": local.parts, "baselines": baselines}
    result |= {"together": [r.sequence_id for r in together.rollouts], "all_failed": sorted(together.failed)}
    errors = [error_of(world, error) for error in (ConfigError("a mistake"), RewardLostError("a loss"))]
    torch.save(result | {"failed": sorted(local.failed), "errors": errors}, Path(sys.argv[1]) / f"rank{world.rank}.pt")


def test_responses_are_balanced_by_tokens_with_their_scores_and_baselines(on_two_ranks):
    """Groups of 20, 18, 16, 6 and 3 tokens: 20 | 18, then 16 to the 18, 6 and 3 to the 20."""
    ranks = on_two_ranks(__file__)
    expected = [
        [(0, 0, 9), (0, 1, 9), (1, 2, 1), (1, 3, 0), (3, 6, 2), (3, 7, 2)],
        [(2, 4, 8), (2, 5, 8), (4, 8, 7), (4, 9, 7)],
    ]
    for found, rows in zip(ranks, expected, strict=True):
        assert found["rows"] == rows
        assert found["scores"].tolist() == [sequence_id for _, sequence_id, _ in rows]
        assert found["parts"]["rule"].tolist() == [-sequence_id for _, sequence_id, _ in rows]
        assert found["baselines"] == [group / 10 for group, _, _ in rows]
    assert [found["failed"] for found in ranks] == [[1, 2], [5, 8]]
    for found in ranks:  # ranks of one model-parallel group get the same responses, here all
        assert found["together"] == list(range(10)) and found["all_failed"] == [1, 2, 5, 8]
    # Only the second rank has made a mistake, or lost a source.
    assert [found["errors"] for found in ranks] == 2 * [["ConfigError: a mistake", "RewardLostError: a loss"]]


def test_a_single_rank_keeps_its_responses():
    assert balance_by_tokens(drawn(0), WORLD, WORLD).rollouts == drawn(0).rollouts


if __name__ == "__main__":
    main()
