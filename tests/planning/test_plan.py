"""Plans with hand-worked numbers, tenants that move or stay resident, and peaks that must not decrease."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import Qwen3MoeConfig

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    LoraConfig,
    MemoryConfig,
    ModelsConfig,
    OptimizerConfig,
    RolloutConfig,
)
from hybrid_rl.distributed import join_world
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.planning.cards import CARDS
from hybrid_rl.planning.engine_memory import ENGINE_CONTEXT_BYTES, GRAPHS_LAYER_BYTES
from hybrid_rl.planning.plan import GIB, Allocation, Machine, Plan
from hybrid_rl.planning.planner import CONNECTION_BYTES, TRAINER_CONTEXT_BYTES, make_plan
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.planning.startup import machine_of, measure_machine, plan_run
from hybrid_rl.planning.tenant_memory import num_restores

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase


@pytest.fixture(scope="module")
def shapes_1b(make_config):
    return read_shapes(make_config("1b"))


def plan(config: Config, machine: Machine) -> Plan:
    return make_plan(config, machine, read_shapes(config))


def allocation(found: Plan, name: str) -> Allocation:
    (result,) = [a for a in found.allocations if a.name == name]
    return result


def bus_bytes(found: Plan) -> tuple[int, int]:
    """Return the bytes that a GPU copies to the host and back in a step."""
    return sum(a.out_bytes for a in found.allocations), sum(a.in_bytes for a in found.allocations)


def machine(gib: float = 80, num_gpus: int = 1) -> Machine:
    return Machine(gpu_memory_bytes=int(gib * GIB), num_gpus=num_gpus, backend="reference")


def test_a_7b_model_by_hand(make_config):
    found = plan(make_config("7b", memory={"swap": "off"}), machine(200, num_gpus=8))
    # A layer: q and o 3584^2, q's bias, k and v 3584 x 512 and a bias, three of 3584 x 18944, two norms; 28 of them.
    layer = 2 * 3584**2 + 3584 + 2 * (3584 * 512 + 512) + 3 * 3584 * 18944 + 2 * 3584
    num_params = 28 * layer + 2 * 152064 * 3584 + 3584
    assert num_params == 7_615_616_512
    for name in ("engine_weights", "actor_parameters"):
        assert allocation(found, name).num_bytes == 2 * num_params
    assert allocation(found, "actor_optimizer").num_bytes == 12 * num_params // 8
    assert allocation(found, "actor gradients").num_bytes == 4 * num_params // 8
    # 64 sequences a GPU, of 1024 tokens, and vLLM's null block; 2 (keys, values) x 28 layers x 512 x 2 bytes.
    assert (found.max_concurrent_sequences, found.kv_sequences) == (64, 64)
    assert found.kv_bytes == (64 * 1024 + 16) * 57_344
    # Three float32 chunks of logits, and two float32 copies of the gradient of the head's weight.
    chunk, weight = 4 * 1024 * 152064, 3584 * 152064
    assert allocation(found, "actor backward of head or layer").num_bytes == 3 * chunk + 8 * weight
    expected = [
        2 * 2 * num_params,
        found.kv_bytes,
        TRAINER_CONTEXT_BYTES,
        ENGINE_CONTEXT_BYTES + 28 * GRAPHS_LAYER_BYTES,
        allocation(found, "staging bucket").num_bytes,
        allocation(found, "engine activations").num_bytes,
    ]
    # Embedding and head are larger than half a bucket each; the halves also hold a layer and the next one's attention.
    rest = layer + (2 * 3584**2 + 3584 + 2 * (3584 * 512 + 512))
    assert allocation(found, "staging bucket").num_bytes == 2 * (152064 * 3584 + rest)
    assert found.peak(ROLLOUT) == sum(expected) + allocation(found, "actor_optimizer").num_bytes


def test_an_engine_over_two_gpus_halves_its_weights_and_its_cache(make_config):
    config = make_config("7b", memory={"swap": "off"})
    both = replace(config, rollout=replace(config.rollout, tensor_parallel_size=2))
    one, two = plan(config, machine(200, num_gpus=8)), plan(both, machine(200, num_gpus=8))
    assert allocation(two, "engine_weights").num_bytes == 7_615_616_512
    # The sequences of two GPUs and one null block; each GPU holds two of the four key heads.
    assert (two.max_concurrent_sequences, two.kv_sequences) == (128, 128)
    assert two.kv_bytes == (128 * 1024 + 16) * 57_344 // 2
    assert allocation(two, "actor_optimizer") == allocation(one, "actor_optimizer")
    assert allocation(two, "connections").num_bytes == CONNECTION_BYTES
    assert "connections" not in {a.name for a in one.allocations}


def test_an_aliased_engine_has_no_weights_of_its_own_and_no_bucket(make_config):
    names = {a.name for a in plan(make_config("7b", sync={"mode": "auto"}), machine()).allocations}
    assert not names & {"engine_weights", "staging bucket"}


def test_with_lora_the_optimizer_holds_the_adapters_only(make_config):
    config = make_config("7b", models={"lora": LoraConfig(rank=16)})
    found, shape = plan(config, machine()), read_shapes(config).actor
    # 16 (in + out) of q, o (3584 twice), k, v (3584 and 512), gate, up, down (3584 and 18944), in 28 layers.
    num_adapted = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert shape.num_adapted(config.models.lora) == num_adapted
    assert allocation(found, "actor_optimizer").num_bytes == 12 * num_adapted
    assert allocation(found, "actor_parameters").num_bytes == 2 * (7_615_616_512 + num_adapted)


def test_an_engine_with_adapters_holds_them_beside_the_aliased_base(make_config):
    config = make_config("7b", models={"lora": LoraConfig(rank=12)}, sync={"mode": "auto"}, memory={"swap": "off"})
    config = replace(config, models=replace(config.models, actor=make_config("7b").models.actor))
    found = plan(config, machine())
    # vLLM pads the rank to 16: A and B of q, o (3584 twice), k, v (3584 and 512), gate, up, down (3584 and 18944).
    elements = 28 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert allocation(found, "engine_weights").num_bytes == 2 * 16 * elements
    assert allocation(found, "staging bucket").num_bytes == 2 * 12 * elements  # each matrix is a multiple of 256 bytes
    assert allocation(found, "actor_parameters").num_bytes == 2 * (7_615_616_512 + 12 * elements)
    merged = replace(config, models=replace(config.models, lora=LoraConfig(rank=12, sync="merged")))
    assert allocation(plan(merged, machine()), "engine_weights").num_bytes == 2 * 7_615_616_512


def test_a_critic_that_starts_from_the_actor_has_adapters_and_a_head_of_its_own(make_config):
    models = {"actor": make_config("7b").models.actor, "lora": LoraConfig(rank=16)}
    config = make_config("7b", estimator="gae", models=models, sync={"mode": "auto"}, memory={"swap": "vmm"})
    found = plan(config, machine(200))
    adapters = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    parameters = allocation(found, "critic_parameters")
    assert (parameters.num_bytes, parameters.phases) == (2 * (adapters + 3584), frozenset(Phase))
    # While it loads, the whole critic lies on the GPU beside the actor; its own head is a vector.
    critic = 7_615_616_512 - 152064 * 3584 + 3584
    (loading,) = [moment for moment in found.loading if moment.name == "critic"]
    (actor,) = [moment for moment in found.loading if moment.name == "actor"]
    assert loading.gpu_bytes - actor.gpu_bytes == 2 * critic + parameters.num_bytes - 16 * adapters
    other = replace(config, models=replace(config.models, critic=make_config("1b").models.actor))
    assert allocation(plan(other, machine(200)), "critic_parameters").num_bytes > 2 * 1_000_000_000


def test_an_engine_has_memory_for_all_parts_of_a_layer_that_it_fuses(make_config):
    lora = LoraConfig(rank=8, target_modules=["k_proj", "down_proj"], sync="adapters")
    config = make_config("7b", models={"lora": lora}, memory={"swap": "off"}, rollout={"tensor_parallel_size": 2})
    config = replace(config, models=replace(config.models, actor=make_config("7b").models.actor))
    # Of two GPUs each holds A whole and half of B for q, k, v, and half of A and all of B for down.
    fused = 8 * (3 * 3584 + (3584 + 2 * 512) // 2)
    down = 8 * (18944 // 2 + 3584)
    expected = 2 * 7_615_616_512 // 2 + 2 * 28 * (fused + down)  # and its copy of half the base
    assert allocation(plan(config, machine(200, num_gpus=2)), "engine_weights").num_bytes == expected


def test_replayed_experts_lie_beside_the_activations(make_config, tmp_path):
    """3 of 8 experts in 2 layers: 16 bits for each token and layer, and 64 bits in each router."""
    Qwen3MoeConfig(
        vocab_size=1000,
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=16,
        moe_intermediate_size=32,
        num_experts=8,
        num_experts_per_tok=3,
    ).save_pretrained(tmp_path)
    models = {"actor": str(tmp_path)}
    config = make_config("1b", models=models, rollout={"routing_replay": True, "kv_cache_memory_bytes": GIB})
    found = [a for a in plan(config, machine()).allocations if a.name in ("routed experts", "actor routed experts")]
    assert {min(p.value for p in a.phases): a.num_bytes for a in found} == {
        "score": 8192 * 2 * 3 * (2 + 8),
        "update_actor": 8192 * 2 * 3 * (2 + 8),
    }
    without = replace(config, rollout=replace(config.rollout, routing_replay=False))
    assert not [a for a in plan(without, machine()).allocations if "routed" in a.name]


def test_a_card_without_room_for_the_fused_kernels_takes_chunks_of_logits(make_config):
    config = make_config("7b", models={"lora": LoraConfig(rank=8)}, memory={"swap": "off"})
    config = replace(config, models=replace(config.models, actor=make_config("7b").models.actor))
    known = {name: replace(machine(200), backend="triton", card=CARDS[name]) for name in ("rtx4090", "h100")}
    found = {name: allocation(plan(config, each), "log-prob head").num_bytes for name, each in known.items()}
    assert found == {"rtx4090": 3 * 4 * 1024 * 152064, "h100": 64 << 20}


@pytest.mark.parametrize(
    "phases, restores",
    [
        ({SCORE}, 1),
        ({SYNC, ROLLOUT}, 1),
        ({UPDATE_ACTOR, SYNC}, 1),  # the last phase of a step and the first one of the next are adjacent
        ({SCORE, UPDATE_ACTOR}, 2),
        (set(Phase), 0),
        (set(), 0),
    ],
)
def test_adjacent_phases_need_one_restore(phases, restores):
    assert num_restores(frozenset(phases)) == restores


def test_auto_keeps_tenants_resident_that_fit_into_every_phase(make_config):
    config = make_config("1b", estimator="gae", advantage={"kl_coef": 0.1})
    moving = set(RESIDENCY) & {a.name for a in plan(config, machine()).allocations}
    roomy = plan(config, machine(200))
    assert moving <= roomy.always_resident and bus_bytes(roomy) == (0, 0)
    tight = plan(config, machine(60))
    assert not tight.missing_bytes and tight.always_resident < roomy.always_resident and bus_bytes(tight) > (0, 0)
    forced = plan(replace(config, memory=MemoryConfig(swap="deepspeed")), machine(200))
    assert not forced.always_resident and bus_bytes(forced) > (0, 0)
    off = plan(replace(config, memory=MemoryConfig(swap="off")), machine(200))
    assert bus_bytes(off) == (0, 0) and off.residency == RESIDENCY
    assert [found.can_keep_cache for found in (roomy, off, tight, forced)] == [True, True, False, False]
    for name, spec in tight.residency.items():
        expected = RESIDENCY[name].in_every_phase() if name in tight.always_resident else RESIDENCY[name]
        assert spec == expected


def test_the_allocator_keeps_its_cache_if_the_engine_fits_beside_the_fullest_phase(make_config):
    config = make_config("1b", memory={"swap": "off"})
    roomy = plan(config, machine(200))
    needed = roomy.peak(UPDATE_ACTOR) + allocation(roomy, "engine activations").num_bytes
    for spare_gib, is_enough in ((0.1, True), (-0.1, False)):
        found = plan(config, machine((needed / GIB + spare_gib) / 0.95))
        assert found.can_keep_cache == is_enough and not found.missing_bytes


def test_sequence_parallel_ranks_hold_connections_in_every_phase(make_config):
    configs = [make_config("1b", update={"sequence_parallel_size": size}) for size in (1, 2)]
    single, parallel = (plan(replace(config, memory=MemoryConfig(swap="off")), machine(200, 2)) for config in configs)
    assert parallel.peak(SYNC) - single.peak(SYNC) == parallel.peak(ROLLOUT) - single.peak(ROLLOUT) == CONNECTION_BYTES
    assert parallel.peak(UPDATE_ACTOR) < single.peak(UPDATE_ACTOR)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1024, 60_000),
    more=st.integers(0, 5000),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.sampled_from([2, 4, 8]),
)
def test_more_tokens_never_lower_the_peak_and_more_ranks_never_raise_it(
    make_config, shapes_1b, tokens, more, stage, ranks
):
    update = {"micro_batch_tokens": tokens, "zero_stage": stage}
    config = make_config("1b", update=update, memory={"swap": "vmm"})
    larger = replace(config, update=replace(config.update, micro_batch_tokens=tokens + more))
    checkpointed = replace(config, models=replace(config.models, gradient_checkpointing=True))

    def peak(settings, num_gpus):
        return make_plan(settings, machine(80, num_gpus), shapes_1b).peak(UPDATE_ACTOR)

    assert peak(config, ranks) <= peak(larger, ranks)
    assert peak(checkpointed, ranks) <= peak(config, ranks)
    assert peak(config, 2 * ranks) <= peak(config, ranks)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_allocations_of_a_phase_add_up_to_its_peak(make_config, estimator):
    config = make_config("1b", estimator=estimator, memory={"swap": "vmm"})
    found = plan(config, Machine(gpu_memory_bytes=80 * GIB))
    assert {name: sum(sizes.values()) for name, sizes in found.peaks.items()} == {p.value: found.peak(p) for p in Phase}
    update = found.peaks["update_actor"]
    assert "actor gradients" in update and "engine_kv_cache" not in update


def test_a_run_on_a_cpu_always_fits_and_keeps_the_residency_table(tiny):
    config = Config(models=ModelsConfig(actor=str(tiny / "policy")), rollout=RolloutConfig(kv_cache_memory_bytes=None))
    without_critic = replace(config, advantage=AdvantageConfig(estimator="reinforce_pp"))
    found = plan_run(without_critic, read_shapes(without_critic), measure_machine(join_world()), is_cpu=True)
    assert found.residency == RESIDENCY
    assert found.sized(config).rollout.kv_cache_memory_bytes == GIB
    as_set = replace(config, rollout=RolloutConfig(kv_cache_memory_bytes=5))
    assert found.sized(as_set) == as_set


@pytest.mark.parametrize(
    "ranks_on_nodes, num_gpus, num_nodes",
    [([1], 1, 1), ([2, 2], 2, 1), ([2, 2, 2, 2], 2, 2), ([1, 1], 1, 2), ([3, 3, 3, 1], 4, 1)],
)
def test_the_machine_of_a_run_has_its_nodes_unless_they_differ(ranks_on_nodes, num_gpus, num_nodes):
    found = machine_of(ranks_on_nodes, 7)
    assert (found.num_gpus, found.num_nodes, found.gpu_memory_bytes) == (num_gpus, num_nodes, 7)
    assert found.num_ranks == len(ranks_on_nodes)


@pytest.mark.parametrize("swap", ["auto", "vmm", "off"])
def test_an_optimizer_on_the_host_takes_pinned_memory_with_every_swap_mode(make_config, swap):
    config = make_config("1b", memory={"swap": swap}, update={"actor": OptimizerConfig(kind="cpu_adam")})
    found = plan(config, machine(200))
    num_params = read_shapes(config).actor.num_params
    assert allocation(found, "actor optimizer on the host").host_bytes == 20 * num_params
    assert allocation(found, "actor gradients").num_bytes == 4 * num_params
    assert found.host_bytes >= 20 * num_params and not [a for a in found.allocations if a.name == "actor_optimizer"]


@pytest.mark.parametrize(
    "attention, backend, factor",
    [("auto", "triton", 4), ("varlen", "triton", 4), ("sdpa", "triton", 1), ("auto", "reference", 1)],
)
def test_score_has_four_times_larger_packs_with_varlen_attention_on_a_gpu(make_config, attention, backend, factor):
    config = make_config("1b", models={"attention": attention})
    found = plan(config, Machine(gpu_memory_bytes=80 * GIB, num_gpus=1, backend=backend))
    # Tokens of 2 x 2 H + 3 x 2 I bytes, H 2048 and I 8192.
    assert allocation(found, "activations").num_bytes == factor * 8192 * (4 * 2048 + 6 * 8192)
