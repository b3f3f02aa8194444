"""The arguments of vLLM."""

from hybrid_rl.engines.vllm.arguments import graph_sizes


def test_graphs_are_captured_for_up_to_max_num_seqs_sequences():
    sizes = graph_sizes(1000)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[33:37] == [248, 256, 272, 288]
    assert sizes[50:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert graph_sizes(576)[50:] == [512, 576]
