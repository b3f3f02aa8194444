"""Predicted durations against hand-worked sums, and against lower bounds that were derived independently."""

from dataclasses import replace

import pytest
from transformers import Qwen2Config, Qwen3MoeConfig

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
from hybrid_rl.memory.residency import RESIDENCY
from hybrid_rl.planning.communication_time import bus_seconds
from hybrid_rl.planning.plan import GIB, Allocation, Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.rates import Rates
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.planning.simulator import simulate

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
    return simulate(config, machine, shapes, make_plan(config, machine, shapes), rates)


def test_durations_at_full_rates_are_the_lower_bounds(config):
    found = step(config, FLOOR)
    assert found.num_tokens == 512 * 768
    assert found.phases["rollout: decode"] == pytest.approx(1.8, rel=0.1)
    assert found.phases["rollout: prefill"] == pytest.approx(0.5, rel=0.15)
    assert found.phases["score"] == pytest.approx(6.3, rel=0.15)
    assert found.phases["update actor"] + found.phases["update critic"] == pytest.approx(9.4, rel=0.15)
    assert found.phases["collectives"] == 0


def test_decode_is_bound_by_the_slower_of_host_and_memory(config):
    found = step(config, Rates())
    assert found.decode_bound == "host"
    assert found.phases["rollout: decode"] == pytest.approx(512 * (2.4e-3 + 512 * 13.2e-6))  # steps x seconds of a step
    # Half the sequences at once take two batches: the same time for the sequences, and twice the steps.
    halved = step(replace(config, rollout=replace(config.rollout, max_num_seqs=256)), Rates())
    assert halved.phases["rollout: decode"] == pytest.approx(2 * 512 * (2.4e-3 + 256 * 13.2e-6))
    fast = step(config, Rates(host_s_per_step=0, host_s_per_sequence=1e-9))
    read = 2 * 1_543_714_304 + 512 * (256 + 256) * 28_672
    assert fast.decode_bound == "bandwidth"
    assert fast.phases["rollout: decode"] == pytest.approx(512 * read / (0.4 * 4.21e12))


def test_a_decode_step_reads_the_experts_that_its_sequences_choose(config, tmp_path):
    """One layer of 16 experts, of which a token takes one: 4 sequences leave out (15/16)^4 of them."""
    Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=512,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=128,
        moe_intermediate_size=256,
        num_experts=16,
        num_experts_per_tok=1,
    ).save_pretrained(tmp_path / "experts")
    rollout = replace(config.rollout, rollout_batch_size=4)
    models = ModelsConfig(actor=str(tmp_path / "experts"))
    few = replace(config, models=models, rollout=rollout, advantage=AdvantageConfig(estimator="grpo"))
    found = step(replace(few, update=replace(few.update, mini_batch_size=4)), FLOOR)
    experts = 16 * 3 * 512 * 256
    others = 2 * 1000 * 512 + 2 * 512 * 512 + 2 * 512 * 128 + 16 * 512 + 3 * 512 + 2 * 128
    read = 2 * (others + experts * (1 - (15 / 16) ** 4)) + 4 * (256 + 256) * 2 * 128 * 2
    assert found.phases["rollout: decode"] == pytest.approx(512 * read / 3e12)


def test_a_tensor_parallel_engine_reads_half_of_the_weights_on_each_gpu(config):
    config = replace(config, rollout=replace(config.rollout, max_num_seqs=1024))
    sharded = replace(config, rollout=replace(config.rollout, tensor_parallel_size=2))
    by_memory = [step(c, FLOOR, num_gpus=2).phases["rollout: decode"] for c in (config, sharded)]
    weights, cache = 2 * 1_543_714_304, 256 * (256 + 256) * 2 * 28 * 256 * 2
    assert by_memory[0] == pytest.approx(512 * (weights + cache) / 3e12)
    assert by_memory[1] == pytest.approx(512 * (weights + 2 * cache) / 2 / 3e12)
    slow = replace(FLOOR, host_s_per_sequence=1e-3)
    by_host = [step(c, slow, num_gpus=2).phases["rollout: decode"] for c in (config, sharded)]
    assert by_host == pytest.approx([512 * 256e-3, 512 * 512e-3])  # one process schedules the sequences of both GPUs


def test_collectives_by_hand(config):
    grpo = replace(
        config, advantage=AdvantageConfig(estimator="reinforce_pp"), models=replace(config.models, reward=None)
    )
    params, rates = 1_543_714_304, Rates(node_bytes_per_s=1e9, network_bytes_per_s=1e8)
    # ZeRO-2 on 2 ranks: 256 sequences of 768 tokens are 12 micro-batches of 16384. Each all-reduces gradients: half of
    # them twice. The optimizer step gathers half of the weights. Two bytes per element.
    found = step(grpo, rates, num_gpus=2)
    assert found.phases["collectives"] == pytest.approx((12 * 4 + 2) * params / 2 / 1e9)
    assert step(grpo, rates, num_nodes=2).phases["collectives"] == pytest.approx(10 * found.phases["collectives"])
    # Two sequence-parallel ranks compute micro-batches of 16384 together: the sequences of both are 24 of them.
    parallel = replace(grpo, update=replace(grpo.update, sequence_parallel_size=2))
    assert step(parallel, rates, num_gpus=2).phases["collectives"] == pytest.approx((24 * 4 + 2) * params / 2 / 1e9)
    one = replace(grpo, update=replace(grpo.update, zero_stage=1))
    assert step(one, rates, num_gpus=2).phases["collectives"] == pytest.approx((4 + 2) * params / 2 / 1e9)
    # ZeRO-3: 12 reductions, 36 gathers: in forward and backward of each micro-batch, and in SCORE.
    three = replace(grpo, update=replace(grpo.update, zero_stage=3))
    assert step(three, rates, num_gpus=2).phases["collectives"] == pytest.approx((12 + 36) * 2 * params / 2 / 1e9)


def test_exchanges_of_model_parallel_groups_by_hand(config):
    grpo = replace(
        config, advantage=AdvantageConfig(estimator="reinforce_pp"), models=replace(config.models, reward=None)
    )
    rates, tokens = Rates(node_bytes_per_s=1e9), 256 * 768
    found = step(grpo, rates, num_gpus=2)
    assert found.phases["exchanges"] == 0
    # 12 query heads and 2 key heads of 128. One forward in SCORE, forward and backward in the update; two bytes per
    # element, and a rank sends half of the elements.
    parallel = replace(grpo, update=replace(grpo.update, sequence_parallel_size=2))
    seconds = 3 * 28 * 2 * (1536 + 256) * 2 / 2 * tokens / 1e9
    assert step(parallel, rates, num_gpus=2).phases["exchanges"] == pytest.approx(seconds)
    # Four ranks hold each of the two key heads twice.
    four = replace(grpo, update=replace(grpo.update, sequence_parallel_size=4))
    seconds = 3 * 28 * 2 * (1536 + 512) * 2 * 3 / 4 * tokens / 2 / 1e9
    assert step(four, rates, num_gpus=4).phases["exchanges"] == pytest.approx(seconds)
    # 2 + 2 + 5 all-reduces of both ranks' tokens: a ring sends each element 2 (S - 1) / S times.
    sharded = replace(grpo, update=replace(grpo.update, tensor_parallel_size=2))
    tensor_parallel = step(sharded, rates, num_gpus=2).phases
    assert tensor_parallel["exchanges"] == pytest.approx(9 * 28 * 2 * 1536 * 2 / 2 * 2 * tokens / 1e9)
    heads = 2 * 1536 * 151936 * (256 * 512)  # for the other rank's responses
    assert tensor_parallel["score"] - found.phases["score"] == pytest.approx(heads / (0.65 * 790e12))
    assert tensor_parallel["update actor"] - found.phases["update actor"] == pytest.approx(4 * heads / (0.87 * 790e12))


def test_every_micro_batch_of_an_update_takes_the_time_of_its_launches(config):
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
    allocations = (
        Allocation(name="actor_optimizer", num_bytes=1, out_bytes=13 * 10**9, in_bytes=43 * 10**9),
        Allocation(name="reference", num_bytes=1, in_bytes=551 * 10**8),
    )
    machine = Machine(gpu_memory_bytes=1, backend="reference")
    plan = Plan(
        allocations=allocations,
        machine=machine,
        residency=RESIDENCY,
        kv_bytes=0,
        kv_tokens=0,
        kv_sequences=0,
        max_concurrent_sequences=0,
    )
    rates = Rates(deepspeed_out_bytes_per_s=13e9, deepspeed_in_bytes_per_s=43e9)
    assert bus_seconds(plan, "deepspeed", rates) == pytest.approx(3.0)
    assert bus_seconds(plan, "vmm", Rates()) == pytest.approx(56 / 55.1 + 1)
    assert bus_seconds(plan, "off", Rates()) == 0


def test_efficiency_decreases_with_nodes_and_ranks_divide_the_work(config):
    alone, four, nodes = step(config, Rates()), step(config, Rates(), 4), step(config, Rates(), 4, 8)
    assert four.phases["score"] == pytest.approx(alone.phases["score"] / 4)
    assert alone.tokens_per_s_per_gpu > four.tokens_per_s_per_gpu > nodes.tokens_per_s_per_gpu
    assert four.efficiency(alone) == four.tokens_per_s_per_gpu / alone.tokens_per_s_per_gpu
