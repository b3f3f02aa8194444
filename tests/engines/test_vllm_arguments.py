"""The arguments of vLLM."""

import pytest

from hybrid_rl.engines.vllm.arguments import graph_sizes, restart_fraction


def test_graphs_are_captured_for_up_to_max_num_seqs_sequences():
    sizes = graph_sizes(1000)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[33:37] == [248, 256, 272, 288]
    assert sizes[50:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert graph_sizes(576)[50:] == [512, 576]


def test_an_engine_that_starts_again_requires_no_more_memory_than_is_free():
    assert restart_fraction(0.5, free_bytes=90, total_bytes=100) == 0.5
    assert restart_fraction(0.5, free_bytes=35, total_bytes=100) == pytest.approx(0.3)
    assert restart_fraction(0.5, free_bytes=2, total_bytes=100) == 0.01  # vLLM takes no fraction of 0
