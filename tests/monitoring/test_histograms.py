"""Histograms with hand-made values."""

import pytest

from hybrid_rl.monitoring.histograms import flatten, make_histogram


def test_integers_of_a_small_range_have_a_bucket_each():
    found = make_histogram([3, 1, 1, 2, 1])
    assert found.edges == (0.5, 1.5, 2.5, 3.5)
    assert found.counts == (3, 1, 1)
    assert (found.num_values, found.total, found.total_squares) == (5, 8.0, 16.0)


def test_other_values_fall_into_buckets_of_equal_width_and_the_last_one_holds_the_largest():
    found = make_histogram([0.0, 0.24, 0.25, 0.5, 1.0], num_buckets=4)
    assert found.edges == (0.0, 0.25, 0.5, 0.75, 1.0)
    assert found.counts == (2, 1, 1, 1)


def test_long_lengths_are_counted_in_at_most_thirty_buckets():
    found = make_histogram(range(1, 1001))
    assert len(found.counts) == 30 and sum(found.counts) == 1000
    assert found.edges[0] == 1.0 and found.edges[-1] == 1000.0


@pytest.mark.parametrize("values", [[0.1], [0.1, 0.1], [-2.5, -2.5, -2.5]])
def test_equal_values_are_one_bucket(values):
    assert make_histogram(values).counts == (len(values),)


def test_no_values_are_no_histogram():
    assert make_histogram([]) is None


def test_quantiles_are_values_that_occur():
    """Of ten values, one is at most the 10 % quantile, five are at most the median, nine at most the 90 % quantile."""
    found = make_histogram([10, 20, 30, 40, 50, 60, 70, 80, 90, 1000])
    assert found.quantiles == {"min": 10, "p10": 10, "p50": 50, "p90": 90, "max": 1000}


def test_metrics_are_named_by_histogram_and_quantile():
    found = {"histogram/reward": make_histogram([0.0, 1.0])}
    assert flatten(found) == {
        "histogram/reward/min": 0.0,
        "histogram/reward/p10": 0.0,
        "histogram/reward/p50": 0.0,
        "histogram/reward/p90": 1.0,
        "histogram/reward/max": 1.0,
    }
