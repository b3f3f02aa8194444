"""Predicted times against sums done by hand, and against the floors that research did by other sums."""

from dataclasses import replace

import pytest
from transformers import Qwen2Config

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    MemoryConfig,
    ModelsConfig,
    PromptsConfig,
    RolloutConfig,
    SyncConfig,
    UpdateConfig,
)
from hybrid_rl.data.files import Row
from hybrid_rl.memory.residency import RESIDENCY
from hybrid_rl.planning.plan import GIB, Machine, Plan, read_shapes
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.simulator import Rates, bus_seconds, simulate

FLOOR = Rates(
    forward_efficiency=1,
    update_efficiency=1,
    launch_s=0,
    decode_efficiency=1,
    memory_bytes_per_s=3e12,
    host_s_per_step=0,
    host_s_per_sequence=0,
)


@pytest.fixture
def config(tmp_path) -> Config:
    """512 sequences of 256 + 512 tokens through four models of 1.5B."""
    Qwen2Config(
        vocab_size=151936,
        hidden_size=1536,
        intermediate_size=8960,
        num_hidden_layers=28,
        num_attention_heads=12,
        num_key_value_heads=2,
        tie_word_embeddings=True,
    ).save_pretrained(tmp_path)
    return Config(
        models=ModelsConfig(actor=str(tmp_path), reward=str(tmp_path)),
        prompts=PromptsConfig(max_prompt_tokens=256),
        rollout=RolloutConfig(
            rollout_batch_size=512, max_response_tokens=512, kv_cache_memory_bytes=16 * GIB, max_num_seqs=512
        ),
        advantage=AdvantageConfig(kl_coef=0.1),
        update=UpdateConfig(mini_batch_size=512, micro_batch_tokens=16384),
        memory=MemoryConfig(swap="off"),
        sync=SyncConfig(mode="copy"),
    )


def step(config, rates, num_gpus=1, num_nodes=1):
    machine = Machine(gpu_memory_bytes=200 * GIB, num_gpus=num_gpus, num_nodes=num_nodes, backend="reference")
    shapes = read_shapes(config)
    return simulate(config, machine, shapes, make_plan(config, machine, shapes, RESIDENCY), rates)


def test_floors_are_those_of_the_research_note(config):
    told = step(config, FLOOR)
    assert told.num_tokens == 512 * 768
    assert told.phases["rollout: decode"] == pytest.approx(1.8, rel=0.1)
    assert told.phases["rollout: prefill"] == pytest.approx(0.5, rel=0.15)
    assert told.phases["score"] == pytest.approx(6.3, rel=0.15)
    assert told.phases["update actor"] + told.phases["update critic"] == pytest.approx(9.4, rel=0.15)
    assert told.phases["collectives"] == 0


def test_decode_is_bound_by_the_slower_of_host_and_memory(config):
    told = step(config, Rates())
    assert told.decode_bound == "host"
    assert told.phases["rollout: decode"] == pytest.approx(512 * (2.4e-3 + 512 * 13.2e-6))  # steps x seconds
    # Half the sequences at once: as much for them, but in two waves, each with steps of its own.
    halved = step(replace(config, rollout=replace(config.rollout, max_num_seqs=256)), Rates())
    assert halved.phases["rollout: decode"] == pytest.approx(2 * 512 * (2.4e-3 + 256 * 13.2e-6))
    fast = step(config, Rates(host_s_per_step=0, host_s_per_sequence=1e-9))
    read = 2 * 1_543_714_304 + 512 * (256 + 256) * 28_672
    assert fast.decode_bound == "bandwidth"
    assert fast.phases["rollout: decode"] == pytest.approx(512 * read / (0.4 * 3.01e12))


def test_an_engine_over_two_gpus_reads_half_on_each(config):
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=1024))
    shared = replace(config, rollout=replace(config.rollout, tensor_parallel_size=2))
    by_memory = [step(c, FLOOR, num_gpus=2).phases["rollout: decode"] for c in (config, shared)]
    weights, cache = 2 * 1_543_714_304, 256 * (256 + 256) * 2 * 28 * 256 * 2
    assert by_memory[0] == pytest.approx(512 * (weights + cache) / 3e12)
    assert by_memory[1] == pytest.approx(512 * (weights + 2 * cache) / 2 / 3e12)
    slow = replace(FLOOR, host_s_per_sequence=1e-3)
    by_host = [step(c, slow, num_gpus=2).phases["rollout: decode"] for c in (config, shared)]
    assert by_host == pytest.approx([512 * 256e-3, 512 * 512e-3])  # one process schedules for both


def test_collectives_by_hand(config):
    grpo = replace(
        config, advantage=AdvantageConfig(estimator="reinforce_pp"), models=replace(config.models, reward=None)
    )
    params, rates = 1_543_714_304, Rates(node_bytes_per_s=1e9, network_bytes_per_s=1e8)
    # ZeRO-2 on 2 ranks: 256 sequences of 768 in packs of 16384 are 12 micro-batches, each reduces half and gathers the
    # sums of the other half, once a gather of half the weights; all in bfloat16.
    told = step(grpo, rates, num_gpus=2)
    assert told.phases["collectives"] == pytest.approx((12 * 4 + 2) * params / 2 / 1e9)
    assert step(grpo, rates, num_nodes=2).phases["collectives"] == pytest.approx(10 * told.phases["collectives"])
    # Two that share tokens share 16384: the sequences of both are 24 micro-batches.
    shared = replace(grpo, update=replace(grpo.update, sequence_parallel_size=2))
    assert step(shared, rates, num_gpus=2).phases["collectives"] == pytest.approx((24 * 4 + 2) * params / 2 / 1e9)
    one = replace(grpo, update=replace(grpo.update, zero_stage=1))
    assert step(one, rates, num_gpus=2).phases["collectives"] == pytest.approx((4 + 2) * params / 2 / 1e9)
    # ZeRO-3: 12 reductions, 36 gathers: forward and backward of each, and SCORE.
    three = replace(grpo, update=replace(grpo.update, zero_stage=3))
    assert step(three, rates, num_gpus=2).phases["collectives"] == pytest.approx((12 + 36) * 2 * params / 2 / 1e9)


def test_exchanges_by_hand(config):
    grpo = replace(
        config, advantage=AdvantageConfig(estimator="reinforce_pp"), models=replace(config.models, reward=None)
    )
    rates, tokens = Rates(node_bytes_per_s=1e9), 256 * 768
    told = step(grpo, rates, num_gpus=2)
    assert told.phases["exchanges"] == 0
    # Heads of 128: 12 with queries, 2 with keys. One forward in SCORE, forward and backward in the update, two bytes an
    # element, half of which stays.
    shared = replace(grpo, update=replace(grpo.update, sequence_parallel_size=2))
    seconds = 3 * 28 * 2 * (1536 + 256) * 2 / 2 * tokens / 1e9
    assert step(shared, rates, num_gpus=2).phases["exchanges"] == pytest.approx(seconds)
    # Four ranks hold two key heads twice.
    four = replace(grpo, update=replace(grpo.update, sequence_parallel_size=4))
    seconds = 3 * 28 * 2 * (1536 + 512) * 2 * 3 / 4 * tokens / 2 / 1e9
    assert step(four, rates, num_gpus=4).phases["exchanges"] == pytest.approx(seconds)
    # 2 + 2 + 5 sums of both ranks' tokens: a ring sends each element (S - 1) / S times out and back.
    cut = replace(grpo, update=replace(grpo.update, tensor_parallel_size=2))
    found = step(cut, rates, num_gpus=2).phases
    assert found["exchanges"] == pytest.approx(9 * 28 * 2 * 1536 * 2 / 2 * 2 * tokens / 1e9)
    heads = 2 * 1536 * 151936 * (256 * 512)  # of one rank's responses, which it computes for the other too
    assert found["score"] - told.phases["score"] == pytest.approx(heads / (0.65 * 790e12))
    assert found["update actor"] - told.phases["update actor"] == pytest.approx(4 * heads / (0.87 * 790e12))


def test_every_micro_batch_of_an_update_costs_its_launches(config):
    """512 sequences of 768 tokens are 24 micro-batches of 16384 and 48 of 8192, in three passes through 28 layers."""
    halved = replace(config, update=replace(config.update, micro_batch_tokens=8192))
    recomputed = replace(halved, models=replace(config.models, gradient_checkpointing=True))
    rates = replace(FLOOR, launch_s=1e-3)
    for settings, passes in ((config, 24 * 3), (halved, 48 * 3), (recomputed, 48 * 4)):
        gap = [
            step(settings, rates).phases[n] - step(settings, FLOOR).phases[n] for n in ("update actor", "update critic")
        ]
        assert gap == pytest.approx([passes * 28 * 1e-3] * 2)


def test_the_bus_by_hand():
    rows = (
        Row(name="actor_optimizer", num_bytes=1, out_bytes=13 * 10**9, in_bytes=43 * 10**9),
        Row(name="reference", num_bytes=1, in_bytes=551 * 10**8),
    )
    machine = Machine(gpu_memory_bytes=1, backend="reference")
    plan = Plan(rows=rows, machine=machine, residency={}, kv_bytes=0, kv_tokens=0, max_sequences=0, wave=0)
    assert bus_seconds(plan, "deepspeed", Rates()) == pytest.approx(3.0)
    assert bus_seconds(plan, "vmm", Rates()) == pytest.approx(56 / 55.1 + 1)
    assert bus_seconds(plan, "off", Rates()) == 0


def test_efficiency_falls_with_nodes_and_work_is_shared(config):
    alone, four, nodes = step(config, Rates()), step(config, Rates(), 4), step(config, Rates(), 4, 8)
    assert four.phases["score"] == pytest.approx(alone.phases["score"] / 4)
    assert alone.tokens_per_s_per_gpu > four.tokens_per_s_per_gpu > nodes.tokens_per_s_per_gpu
