"""The moments of a start, worked by hand for models of 7B and 1B."""

from dataclasses import replace

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.memory.residency import Phase
from hybrid_rl.planning.engine_memory import ENGINE_CONTEXT_BYTES, GRAPHS_LAYER_BYTES
from hybrid_rl.planning.plan import GIB, Machine, Plan
from hybrid_rl.planning.planner import TRAINER_CONTEXT_BYTES, make_plan
from hybrid_rl.planning.run_bytes import host_uses
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.planning.startup import check_plan

SEVEN_B, ONE_B = 7_615_616_512, 1_235_814_400
"""Parameters of the models; tests/planning/test_plan.py and test_run_bytes.py add them up."""
ENGINE_7B = ENGINE_CONTEXT_BYTES + 28 * GRAPHS_LAYER_BYTES


def machine(gib: float = 200, num_gpus: int = 1) -> Machine:
    return Machine(gpu_memory_bytes=int(gib * GIB), num_gpus=num_gpus, backend="reference")


def plan(config, gpus: Machine) -> Plan:
    return make_plan(config, gpus, read_shapes(config))


def size(found: Plan, name: str) -> int:
    return sum(a.num_bytes for a in found.allocations if a.name == name)


def test_models_load_one_after_the_other_and_leave_the_gpu_where_tenants_move(make_config):
    """Copied weights: the engine starts on an empty GPU, and the critic finds neither actor nor engine there."""
    found = plan(make_config("7b", estimator="gae", memory={"swap": "vmm"}), machine())
    engine, actor, critic = found.loading
    assert [moment.name for moment in found.loading] == ["rollout engine", "actor", "critic"]
    contexts = TRAINER_CONTEXT_BYTES + ENGINE_7B
    activations = size(found, "engine activations")
    bucket = size(found, "staging bucket")
    assert engine.gpu_bytes == contexts + bucket + 2 * SEVEN_B + found.kv_bytes + activations
    # Weights in 2 bytes; float32 master, two moments, and the gradients with which DeepSpeed creates them.
    assert actor.gpu_bytes == contexts + bucket + (2 + 12 + 4) * SEVEN_B
    head = 152064 * 3584 - 3584  # the critic has one output instead of 152064
    assert critic.gpu_bytes == contexts + bucket + (2 + 12 + 4) * (SEVEN_B - head)


def test_an_aliased_actor_is_on_the_gpu_twice_before_the_engine_starts(make_config):
    found = plan(make_config("7b", sync={"mode": "auto"}, memory={"swap": "vmm"}), machine())
    buffer, engine, actor = found.loading
    assert (buffer.name, buffer.gpu_bytes) == (
        "actor, copied into the shared buffer",
        TRAINER_CONTEXT_BYTES + 4 * SEVEN_B,
    )
    contexts = TRAINER_CONTEXT_BYTES + ENGINE_7B
    assert engine.gpu_bytes == contexts + 2 * SEVEN_B + found.kv_bytes + size(found, "engine activations")
    assert actor.gpu_bytes == contexts + (2 + 12 + 4) * SEVEN_B


def test_zero_3_loads_the_whole_model_on_every_gpu_before_it_shards_it(make_config):
    """On 64 GPUs a step holds a sixty-fourth of the model, and the start all of it."""
    config = make_config("7b", update={"zero_stage": 3}, memory={"swap": "vmm"})
    found = plan(config, machine(num_gpus=64))
    (actor,) = [moment for moment in found.loading if moment.name == "actor"]
    there = sum(size(found, n) for n in ("trainer context", "engine context", "staging bucket", "actor buckets"))
    assert actor.gpu_bytes == there + 2 * SEVEN_B + 2 * SEVEN_B // 64


def test_a_run_whose_steps_fit_is_refused_where_its_start_does_not(make_config):
    config = make_config(
        "7b",
        update={"zero_stage": 3, "micro_batch_tokens": 1024},
        models={"gradient_checkpointing": True},
        rollout={"tensor_parallel_size": 4, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
        memory={"swap": "vmm"},
        sync={"bucket_bytes": 1 << 28},
    )
    config = replace(config, models=replace(config.models, actor=make_config("7b").models.actor))
    found = plan(config, machine(num_gpus=64))
    steps = max(found.peak(phase) for phase in Phase)
    assert steps < found.loading_bytes
    small = replace(found, machine=machine((steps + found.loading_bytes) / 2 / GIB / 0.95, num_gpus=64))
    assert small.missing_bytes == found.loading_bytes - small.machine.budget_bytes
    with pytest.raises(ConfigError, match=rf"the start needs, at actor, {found.loading_bytes:,} bytes"):
        check_plan(small, config, read_shapes(config))


@pytest.mark.parametrize("num_gpus", [1, 8])
def test_each_rank_loads_the_model_in_host_memory_beside_all_pinned_copies(make_config, num_gpus):
    config = make_config("1b", memory={"swap": "vmm"})
    shapes, gpus = read_shapes(config), machine(80, num_gpus)
    found = make_plan(config, gpus, shapes)
    # ZeRO-2: 12 bytes of optimizer for a parameter are pinned, divided by the ranks; weights pin 2.
    pinned = num_gpus * (12 * (ONE_B // num_gpus) + 2 * ONE_B)
    assert found.host_bytes == pinned
    assert [m.host_bytes for m in found.loading] == [pinned, pinned + num_gpus * 2 * ONE_B]
    never_saved = replace(config, checkpoint=replace(config.checkpoint, every_steps=0))
    uses = host_uses(never_saved, shapes, found, num_ranks=num_gpus, dtype_bytes=2, is_cpu=False)
    assert sum(uses.values()) == found.loading_host_bytes


def test_tenants_that_stay_are_counted_once_they_are_built(make_config):
    """With swap off nothing leaves: after the reward model has loaded, all tenants are there."""
    config = make_config("1b", estimator="gae", advantage={"kl_coef": 0.1}, memory={"swap": "off"})
    found = plan(config, machine())
    sizes = [moment.gpu_bytes for moment in found.loading]
    assert [moment.name for moment in found.loading] == ["rollout engine", "actor", "critic", "reference"]
    everything = sum(a.num_bytes for a in found.allocations if a.phases == frozenset(Phase))
    assert sizes[-1] == everything
