"""A mixture follows its weights in every window, passes over each data set, and resumes where it stopped."""

import json
from collections import Counter
from fractions import Fraction

import pytest

from hybrid_rl.batch import Prompt
from hybrid_rl.config import ConfigError
from hybrid_rl.data.mixing import Mixture
from hybrid_rl.data.order import PromptLoader

SIZES = [10, 30, 7]
WEIGHTS = [0.2, 0.7, 0.1]


def make_mixture(*, sizes=SIZES, weights=WEIGHTS, seed=3, shuffle=True):
    return Mixture(sizes, weights, seed=seed, shuffle=shuffle)


def sets_of(rows, sizes=SIZES):
    """Return the number of the data set of each row."""
    ends = [sum(sizes[: place + 1]) for place in range(len(sizes))]
    return [next(place for place, end in enumerate(ends) if row < end) for row in rows]


def test_equal_weights_alternate_and_two_to_one_takes_every_third_from_the_second():
    assert sets_of(make_mixture(sizes=[9, 9], weights=[1, 1]).draw(6), [9, 9]) == [0, 1, 0, 1, 0, 1]
    drawn = sets_of(make_mixture(sizes=[9, 9], weights=[4, 2]).draw(6), [9, 9])
    assert [drawn[start : start + 3].count(1) for start in (0, 3)] == [1, 1]


@pytest.mark.parametrize("weights", [WEIGHTS, [1, 1, 1], [5, 1, 0.01], [1000, 1, 1]])
def test_every_beginning_has_the_shares_within_one_draw_and_every_window_within_two(weights):
    mixture = make_mixture(weights=weights)
    drawn = sets_of(mixture.draw(300))
    shares = [Fraction(str(weight)) / sum(Fraction(str(w)) for w in weights) for weight in weights]
    for place, share in enumerate(shares):
        counts = [0, *(drawn[:end].count(place) for end in range(1, 301))]
        assert all(abs(count - share * number) < 1 for number, count in enumerate(counts))
        for length in (3, 8, 20):
            windows = [counts[end] - counts[end - length] for end in range(length, 301)]
            assert all(abs(number - share * length) < 2 for number in windows)
            assert max(windows) <= mixture.most_in(length)[place]


def test_each_pass_over_a_data_set_has_every_row_once_in_an_order_of_its_own():
    rows = make_mixture().draw(400)
    first = [row for row in rows if row < 10]
    passes = [first[start : start + 10] for start in range(0, 70, 10)]
    assert all(sorted(each) == list(range(10)) for each in passes)
    assert len(set(map(tuple, passes))) > 1
    kept = [row for row in make_mixture(shuffle=False).draw(60) if row < 10]
    assert kept[:10] == list(range(10))


def test_no_row_occurs_twice_in_a_draw_also_where_a_pass_ends_within_it():
    mixture = make_mixture(sizes=[4, 9], weights=[1, 2])
    assert mixture.most_in(9) == [4, 7]
    drawn = [mixture.draw(9) for _ in range(50)]
    assert all(len(set(rows)) == 9 for rows in drawn)
    first = [row for rows in drawn for row in rows if row < 4]
    assert all(sorted(first[start : start + 4]) == [0, 1, 2, 3] for start in range(0, len(first) - 3, 4))


def test_the_draws_depend_on_the_seed_and_not_on_their_number_at_a_time():
    whole = make_mixture().draw(60)
    assert make_mixture().draw(60) == whole != make_mixture(seed=4).draw(60)
    mixture = make_mixture()
    assert sets_of([row for _ in range(20) for row in mixture.draw(3)]) == sets_of(whole)


@pytest.mark.parametrize("num_before", [0, 1, 4, 9])
def test_resumed_equals_uninterrupted(num_before):
    expected, before, resumed = make_mixture(), make_mixture(), make_mixture()
    steps = [expected.draw(8) for _ in range(20)]
    for _ in range(num_before):
        before.draw(8)
    resumed.draw(5)
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert [resumed.draw(8) for _ in range(20 - num_before)] == steps[num_before:]


# --- the loader of a mixture


def make_loader(*, weights=WEIGHTS, rank=0, world_size=1, batch_size=10, seed=3):
    prompts = [Prompt(prompt_id=n, text=str(n), token_ids=[n, n + 1]) for n in range(sum(SIZES))]
    return PromptLoader(
        prompts,
        batch_size=batch_size,
        seed=seed,
        shuffle=True,
        rank=rank,
        world_size=world_size,
        mixture=make_mixture(weights=weights, seed=seed),
    )


def take(loader, num_steps):
    return [[prompt.prompt_id for prompt in loader.next_batch()] for _ in range(num_steps)]


def test_ranks_divide_each_batch_and_each_of_them_follows_the_weights():
    whole = take(make_loader(weights=[1, 1, 2], batch_size=8), 6)
    ranks = [take(make_loader(weights=[1, 1, 2], batch_size=8, rank=rank, world_size=2), 6) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == whole
    for rank in ranks:
        assert all(Counter(sets_of(rows))[2] == 2 for rows in rank)
    thirds = [take(make_loader(batch_size=10, rank=rank, world_size=3), 2) for rank in range(3)]
    assert sorted(len(rows) for rows in (third[0] for third in thirds)) == [3, 3, 4]


def test_every_step_of_a_mixture_has_a_whole_batch():
    assert make_loader().batch_sizes(7) == [10] * 7
    assert [len(rows) for rows in take(make_loader(), 7)] == [10] * 7


def test_a_loader_resumes_with_another_number_of_ranks():
    expected = take(make_loader(), 12)
    before = make_loader(rank=1, world_size=2)
    take(before, 5)
    resumed = make_loader()
    resumed.load_state_dict(json.loads(json.dumps(before.state_dict())))
    assert take(resumed, 7) == expected[5:]


def test_other_weights_and_none_are_refused_where_a_run_continues():
    state = make_loader().state_dict()
    with pytest.raises(ConfigError, match=r"weights = \[0.2, 0.6, 0.2\], but the checkpoint's prompt order has"):
        make_loader(weights=[0.2, 0.6, 0.2]).load_state_dict(state)
    prompts = make_loader().prompts
    joined = PromptLoader(prompts, batch_size=10, seed=3, shuffle=True)
    with pytest.raises(ConfigError, match="weights = None"):
        joined.load_state_dict(state)
    earlier = {name: value for name, value in joined.state_dict().items() if name != "weights"}
    joined.load_state_dict(earlier)  # a checkpoint of a version without mixtures
