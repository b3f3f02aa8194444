"""Plans with hand-worked numbers, plans that do not fit and what is suggested, and what must never go down."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    ConfigError,
    LoraConfig,
    MemoryConfig,
    ModelsConfig,
    OptimizerConfig,
    PromptsConfig,
    RewardConfig,
    RolloutConfig,
    SyncConfig,
    UpdateConfig,
)
from hybrid_rl.distributed import join_world
from hybrid_rl.memory.residency import RESIDENCY, Phase
from hybrid_rl.models.sequence_parallel import check_head_counts
from hybrid_rl.planning.advice import Change, check_plan, larger_batches, plan_run, suggest
from hybrid_rl.planning.plan import GIB, Machine, read_shapes
from hybrid_rl.planning.planner import (
    CONNECTION_BYTES,
    ENGINE_CONTEXT_BYTES,
    GRAPHS_LAYER_BYTES,
    TRAINER_CONTEXT_BYTES,
    make_plan,
    num_entries,
)

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase
LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory, qwen_7b):
    root = tmp_path_factory.mktemp("configs")
    for name, config in {"7b": qwen_7b, "1b": LLAMA_1B}.items():
        config.save_pretrained(root / name)
    return root


def make_config(folders, name: str, *, estimator: str = "grpo", **sections) -> Config:
    config = Config(
        models=ModelsConfig(actor=str(folders / name)),
        prompts=PromptsConfig(path="prompts.jsonl", max_prompt_tokens=256),
        rollout=RolloutConfig(
            rollout_batch_size=64, group_size=8, max_response_tokens=768, kv_cache_memory_bytes=None, max_num_seqs=256
        ),
        reward=RewardConfig(functions=["math"]),
        advantage=AdvantageConfig(estimator=estimator),
        update=UpdateConfig(mini_batch_size=128, micro_batch_tokens=8192),
        memory=MemoryConfig(swap="auto"),
        sync=SyncConfig(mode="copy"),
    )
    return replace(config, **{k: replace(getattr(config, k), **fields) for k, fields in sections.items()})


@pytest.fixture(scope="module")
def shapes_1b(folders):
    return read_shapes(make_config(folders, "1b"))


def plan(config, machine):
    return make_plan(config, machine, read_shapes(config), RESIDENCY)


def row(found, name):
    (result,) = [r for r in found.rows if r.name == name]
    return result


def machine(gib: float = 80, num_gpus: int = 1) -> Machine:
    return Machine(gpu_memory_bytes=int(gib * GIB), num_gpus=num_gpus, backend="reference")


def test_a_7b_model_by_hand(folders):
    found = plan(make_config(folders, "7b", memory={"swap": "off"}), machine(200, num_gpus=8))
    # A layer: q and o 3584^2, q's bias, k and v 3584 x 512 and a bias, three of 3584 x 18944, two norms; 28 of them.
    layer = 2 * 3584**2 + 3584 + 2 * (3584 * 512 + 512) + 3 * 3584 * 18944 + 2 * 3584
    num_params = 28 * layer + 2 * 152064 * 3584 + 3584
    assert num_params == 7_615_616_512
    assert row(found, "engine_weights").num_bytes == row(found, "actor_parameters").num_bytes == 2 * num_params
    assert row(found, "actor_optimizer").num_bytes == 12 * num_params // 8
    assert row(found, "actor gradients").num_bytes == 4 * num_params // 8
    # 64 sequences a GPU, of 1024 tokens, and vLLM's null block; 2 (keys, values) x 28 layers x 512 x 2 bytes.
    assert (found.wave, found.max_sequences) == (64, 64)
    assert found.kv_bytes == (64 * 1024 + 16) * 57_344
    # The gradient of a chunk of logits twice more than the chunk, and of the weight, in float32.
    chunk, weight = 4 * 1024 * 152064, 3584 * 152064
    assert row(found, "actor backward of head or layer").num_bytes == 3 * chunk + 8 * weight
    expected = [
        2 * 2 * num_params,
        found.kv_bytes,
        TRAINER_CONTEXT_BYTES,
        ENGINE_CONTEXT_BYTES + 28 * GRAPHS_LAYER_BYTES,
        row(found, "staging bucket").num_bytes,
        row(found, "engine activations").num_bytes,
    ]
    # The embedding and the head are larger than half a bucket; beside them a layer and the attention of the next one.
    beside = layer + (2 * 3584**2 + 3584 + 2 * (3584 * 512 + 512))
    assert row(found, "staging bucket").num_bytes == 2 * (152064 * 3584 + beside)
    assert found.peak(ROLLOUT) == sum(expected) + row(found, "actor_optimizer").num_bytes


def test_an_engine_over_two_gpus_halves_its_weights_and_its_cache(folders):
    config = make_config(folders, "7b", memory={"swap": "off"})
    both = replace(config, rollout=replace(config.rollout, tensor_parallel_size=2))
    one, two = plan(config, machine(200, num_gpus=8)), plan(both, machine(200, num_gpus=8))
    assert row(two, "engine_weights").num_bytes == 7_615_616_512
    # Two GPUs' sequences, and one null block; of the four key heads each GPU has two.
    assert (two.wave, two.max_sequences) == (128, 128)
    assert two.kv_bytes == (128 * 1024 + 16) * 57_344 // 2
    assert row(two, "actor_optimizer") == row(one, "actor_optimizer")
    assert row(two, "connections").num_bytes == CONNECTION_BYTES
    assert "connections" not in {r.name for r in one.rows}


def test_the_engine_shares_the_trainers_weights(folders):
    names = {r.name for r in plan(make_config(folders, "7b", sync={"mode": "auto"}), machine()).rows}
    assert not names & {"engine_weights", "staging bucket"}


def test_adapters_are_all_that_learns(folders):
    config = make_config(folders, "7b", models={"lora": LoraConfig(rank=16)})
    found, shape = plan(config, machine()), read_shapes(config).actor
    # 16 (in + out) of q, o (3584 twice), k, v (3584 and 512), gate, up, down (3584 and 18944), in 28 layers.
    num_adapted = 28 * 16 * (2 * 7168 + 2 * 4096 + 3 * 22528)
    assert shape.num_adapted(config.models.lora) == num_adapted
    assert row(found, "actor_optimizer").num_bytes == 12 * num_adapted
    assert row(found, "actor_parameters").num_bytes == 2 * (7_615_616_512 + num_adapted)


@pytest.mark.parametrize(
    "phases, entries",
    [
        ({SCORE}, 1),
        ({SYNC, ROLLOUT}, 1),
        ({UPDATE_ACTOR, SYNC}, 1),  # the end of a step and the beginning of the next are one stay
        ({SCORE, UPDATE_ACTOR}, 2),
        (set(Phase), 0),
        (set(), 0),
    ],
)
def test_a_stay_is_entered_once(phases, entries):
    assert num_entries(frozenset(phases)) == entries


def test_what_has_room_stays(folders):
    config = make_config(folders, "1b", estimator="gae", advantage={"kl_coef": 0.1})
    moving = set(RESIDENCY) & {r.name for r in plan(config, machine()).rows}
    roomy = plan(config, machine(200))
    assert moving <= roomy.stays and roomy.bus_bytes == (0, 0)
    tight = plan(config, machine(60))
    assert not tight.missing_bytes and tight.stays < roomy.stays and tight.bus_bytes > (0, 0)
    forced = plan(replace(config, memory=MemoryConfig(swap="deepspeed")), machine(200))
    assert not forced.stays and forced.bus_bytes > (0, 0)
    off = plan(replace(config, memory=MemoryConfig(swap="off")), machine(200))
    assert off.bus_bytes == (0, 0) and off.residency == RESIDENCY
    assert [found.has_room_for_cache for found in (roomy, off, tight, forced)] == [True, True, False, False]
    # One table for all tenants: what stays is in every phase, the others where they were.
    for name, phases in tight.residency.items():
        assert phases == (frozenset(Phase) if name in tight.stays else RESIDENCY[name])


def test_pytorch_keeps_free_memory_where_the_engine_needs_none_of_it(folders):
    config = make_config(folders, "1b", memory={"swap": "off"})
    roomy = plan(config, machine(200))
    at_once = roomy.peak(UPDATE_ACTOR) + row(roomy, "engine activations").num_bytes
    for spare_gib, is_enough in ((0.1, True), (-0.1, False)):
        found = plan(config, machine((at_once / GIB + spare_gib) / 0.95))
        assert found.has_room_for_cache == is_enough and not found.missing_bytes


@pytest.mark.parametrize(
    "name, sections, gib, first",
    [
        ("1b", {"update": {"micro_batch_tokens": 65536}}, 80, "--update.micro_batch_tokens 16384"),
        ("1b", {"rollout": {"kv_cache_memory_bytes": 70 * GIB}}, 80, "--rollout.kv_cache_memory_bytes null"),
        ("1b", {"memory": {"swap": "off"}, "update": {"micro_batch_tokens": 1024}}, 32, "--memory.swap auto"),
        ("7b", {}, 80, "--gpus"),
    ],
)
def test_a_suggestion_fits(folders, name, sections, gib, first):
    config = make_config(folders, name, **sections)
    shapes = read_shapes(config)
    found = make_plan(config, machine(gib), shapes, RESIDENCY)
    assert found.missing_bytes > 0
    change = suggest(config, machine(gib), shapes, RESIDENCY)
    assert first in str(change), str(change)
    assert make_plan(change.config, change.machine, shapes, RESIDENCY).missing_bytes == 0
    with pytest.raises(ConfigError) as error:
        check_plan(found, config, shapes, RESIDENCY)
    for part in (found.worst.value, f"{found.peak(found.worst):,}", f"{machine(gib).budget_bytes:,}", str(change)):
        assert part in str(error.value)


def test_ranks_that_share_tokens_hold_connections_in_every_phase(folders):
    configs = [make_config(folders, "1b", update={"sequence_parallel_size": size}) for size in (1, 2)]
    apart, shared = (plan(replace(config, memory=MemoryConfig(swap="off")), machine(200, 2)) for config in configs)
    assert shared.peak(SYNC) - apart.peak(SYNC) == shared.peak(ROLLOUT) - apart.peak(ROLLOUT) == CONNECTION_BYTES
    assert shared.peak(UPDATE_ACTOR) < apart.peak(UPDATE_ACTOR)


@pytest.mark.parametrize("sharers, tokens", [(1, [16384, 32768]), (2, [16384, 32768, 65536])])
def test_micro_batches_grow_to_what_their_ranks_have_of_a_mini_batch(folders, sharers, tokens):
    """128 sequences of 1024 tokens over 4 ranks: 32768 for each, 65536 for two that share them."""
    config = make_config(folders, "1b", update={"sequence_parallel_size": sharers})
    found = larger_batches(Change(config=config, machine=machine(num_gpus=4)))
    assert [change.config.update.micro_batch_tokens for change in found] == tokens


@pytest.mark.parametrize("num_gpus, is_shared", [(1, False), (2, True)])
def test_a_long_response_is_shared_by_the_gpus_there_are(folders, num_gpus, is_shared):
    tokens = {"rollout": {"max_response_tokens": 48 * 1024 - 256}, "update": {"micro_batch_tokens": 48 * 1024}}
    config, cards = make_config(folders, "1b", **tokens), machine(80, num_gpus)
    assert plan(config, cards).missing_bytes > 0
    change = suggest(config, cards, read_shapes(config), RESIDENCY)
    assert change and (str(change) == "--update.sequence_parallel_size 2") == is_shared, str(change)


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_heads_that_cannot_be_dealt_out_are_not_suggested(folders, num_gpus):
    """Three heads: without that rule the two GPUs of the test above would share the tokens."""
    odd = replace(read_shapes(make_config(folders, "1b")).actor, num_heads=3, query_size=2049, key_size=683)
    tokens = {"rollout": {"max_response_tokens": 48 * 1024 - 256}, "update": {"micro_batch_tokens": 48 * 1024}}
    config = make_config(folders, "1b", **tokens)
    shapes = replace(read_shapes(config), actor=odd)
    assert "sequence_parallel" not in str(suggest(config, machine(80, num_gpus), shapes, RESIDENCY))


def test_sizes_that_heads_can_be_dealt_out_to(folders):
    shape = read_shapes(make_config(folders, "7b")).actor  # 28 heads, 4 of them with keys

    def can_deal(size: int) -> bool:
        try:
            check_head_counts(shape.num_heads, shape.key_size // shape.head_size, size, where="a model")
        except ConfigError:
            return False
        return True

    assert [size for size in range(1, 29) if can_deal(size)] == [1, 2, 4, 28]


def test_what_nothing_helps_is_said(folders):
    config = make_config(folders, "7b")
    shapes = read_shapes(config)
    assert suggest(config, machine(4), shapes, RESIDENCY) is None
    with pytest.raises(ConfigError, match="nothing that is known here would fit on up to 64 GPUs"):
        check_plan(make_plan(config, machine(4), shapes, RESIDENCY), config, shapes, RESIDENCY)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(1024, 60_000),
    more=st.integers(0, 5000),
    stage=st.sampled_from([1, 2, 3]),
    ranks=st.sampled_from([2, 4, 8]),
)
def test_more_tokens_take_more_and_more_ranks_less(folders, shapes_1b, tokens, more, stage, ranks):
    update = {"micro_batch_tokens": tokens, "zero_stage": stage}
    config = make_config(folders, "1b", update=update, memory={"swap": "vmm"})
    larger = replace(config, update=replace(config.update, micro_batch_tokens=tokens + more))
    checkpointed = replace(config, models=replace(config.models, gradient_checkpointing=True))
    shapes = shapes_1b

    def peak(settings, num_gpus):
        return make_plan(settings, machine(80, num_gpus), shapes, RESIDENCY).peak(UPDATE_ACTOR)

    assert peak(config, ranks) <= peak(larger, ranks)
    assert peak(checkpointed, ranks) <= peak(config, ranks)
    assert peak(config, 2 * ranks) <= peak(config, ranks)


@pytest.mark.parametrize("estimator", ["grpo", "gae"])
def test_the_rows_of_a_phase_add_up_to_its_peak(folders, estimator):
    config = make_config(folders, "1b", estimator=estimator, memory={"swap": "vmm"})
    plan = make_plan(config, Machine(gpu_memory_bytes=80 * GIB), read_shapes(config), RESIDENCY)
    assert {name: sum(rows.values()) for name, rows in plan.peaks.items()} == {p.value: plan.peak(p) for p in Phase}
    assert "actor gradients" in plan.peaks["update_actor"] and "engine_kv_cache" not in plan.peaks["update_actor"]


def test_a_cpu_run_is_planned_without_bounds(tiny):
    config = Config(models=ModelsConfig(actor=str(tiny / "policy")), rollout=RolloutConfig(kv_cache_memory_bytes=None))
    found = plan_run(replace(config, advantage=AdvantageConfig(estimator="reinforce_pp")), join_world(), RESIDENCY)
    assert found.residency == RESIDENCY
    assert found.sized(config).rollout.kv_cache_memory_bytes == GIB
    kept = replace(config, rollout=RolloutConfig(kv_cache_memory_bytes=5))
    assert found.sized(kept) == kept


@pytest.mark.parametrize("swap", ["auto", "vmm", "off"])
def test_an_optimizer_on_the_host_is_there_wherever_all_else_stays(folders, swap):
    config = make_config(folders, "1b", memory={"swap": swap}, update={"actor": OptimizerConfig(kind="cpu_adam")})
    found = plan(config, machine(200))
    num_params = read_shapes(config).actor.num_params
    assert row(found, "actor optimizer on the host").host_bytes == 20 * num_params
    assert row(found, "actor gradients").num_bytes == 4 * num_params
    assert found.host_bytes >= 20 * num_params and not [r for r in found.rows if r.name == "actor_optimizer"]


@pytest.mark.parametrize(
    "attention, backend, factor",
    [("auto", "triton", 4), ("varlen", "triton", 4), ("sdpa", "triton", 1), ("auto", "reference", 1)],
)
def test_score_takes_larger_packs_where_they_cost_no_more(folders, attention, backend, factor):
    config = make_config(folders, "1b", models={"attention": attention})
    found = plan(config, Machine(gpu_memory_bytes=80 * GIB, num_gpus=1, backend=backend))
    # Tokens of 2 x 2 H + 3 x 2 I bytes, H 2048 and I 8192.
    assert row(found, "activations").num_bytes == factor * 8192 * (4 * 2048 + 6 * 8192)
