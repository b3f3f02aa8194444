"""Two runs with the same seed and as many ranks are equal, bit for bit."""

import time

import torch


def test_two_runs_with_vllm_are_equal_bit_for_bit(make_config, train_here, lent_engine, tmp_path, monkeypatch):
    """In the second run the requests reach the engine slowly, one after the other."""
    rollout = {"engine": "vllm", "rollout_batch_size": 10, "group_size": 4, "stop_strings": []}
    sections = {"rollout": rollout, "update": {"mini_batch_size": 20}, "sync": {"mode": "copy"}}
    first = train_here(make_config(tmp_path / "first", **sections))
    core = lent_engine.llm.llm_engine.engine_core
    send = core.add_request

    def send_slowly(request):
        send(request)
        time.sleep(0.02)

    monkeypatch.setattr(core, "add_request", send_slowly)
    second = train_here(make_config(tmp_path / "second", **sections))
    assert len(first.metrics) == 2 and first.metrics == second.metrics
    assert first.rollouts == second.rollouts and len(first.rollouts[0]) == 40
    for name, weights in first.weights.items():
        assert all(torch.equal(tensor, second.weights[name][key]) for key, tensor in weights.items())
    assert any(row["rollout/logprob_gap"] > 0 for row in first.metrics)  # vLLM and the trainer round differently
