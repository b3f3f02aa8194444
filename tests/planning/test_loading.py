"""The moments of a start, worked by hand for models of 7B and 1B."""

from dataclasses import replace

import pytest

from hybrid_rl.checkpoints import export
from hybrid_rl.config import ConfigError, OptimizerConfig
from hybrid_rl.memory.residency import Phase
from hybrid_rl.models import exporting
from hybrid_rl.planning import footprint, saving
from hybrid_rl.planning.engine_memory import ENGINE_CONTEXT_BYTES, GRAPHS_LAYER_BYTES
from hybrid_rl.planning.plan import GIB, Machine, Plan
from hybrid_rl.planning.planner import TRAINER_CONTEXT_BYTES, make_plan
from hybrid_rl.planning.run_bytes import host_uses
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.planning.startup import check_plan
from hybrid_rl.steps import ema

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


def test_an_aliased_actor_passes_through_host_memory_before_the_engine_starts(make_config):
    found = plan(make_config("7b", sync={"mode": "auto"}, memory={"swap": "vmm"}), machine())
    buffer, engine, actor = found.loading
    assert buffer.name == "actor, moved into the shared buffer"
    assert (buffer.gpu_bytes, buffer.host_bytes - found.host_bytes) == (
        TRAINER_CONTEXT_BYTES + 2 * SEVEN_B,
        2 * SEVEN_B,
    )
    contexts = TRAINER_CONTEXT_BYTES + ENGINE_7B
    assert engine.gpu_bytes == contexts + 2 * SEVEN_B + found.kv_bytes + size(found, "engine activations")
    assert actor.gpu_bytes == contexts + (2 + 12 + 4) * SEVEN_B


@pytest.mark.parametrize("kind, bytes_per_parameter", [("adamw", 2 + 16 + 4), ("cpu_adam", 2)])
def test_with_zero_3_a_gpu_loads_its_shard_and_what_it_gathers(make_config, kind, bytes_per_parameter):
    """On 64 GPUs: weights, optimizer and first gradients of a sixty-fourth, or the shard and two units of 2 bytes.

    The unit is the embedding, which is larger than a layer.
    """
    config = make_config("7b", update={"zero_stage": 3, "actor": OptimizerConfig(kind=kind)}, memory={"swap": "vmm"})
    found = plan(config, machine(num_gpus=64))
    (actor,) = [moment for moment in found.loading if moment.name == "actor"]
    there = sum(size(found, n) for n in ("trainer context", "engine context", "staging bucket", "actor buckets"))
    embedding = 152064 * 3584
    reading = 2 * (SEVEN_B // 64) + 2 * 2 * embedding
    loaded = max(reading, bytes_per_parameter * (SEVEN_B // 64))
    assert actor.gpu_bytes == pytest.approx(there + loaded, abs=64)
    # On the host, each rank converts a unit of 2 bytes, before and after; that is more than its shard.
    assert actor.host_bytes == found.host_bytes + 64 * 2 * 2 * embedding


def test_sharded_frozen_models_take_a_part_of_every_gpu_and_gather_in_score(make_config):
    config = make_config("7b", advantage={"kl_coef": 0.1}, memory={"swap": "off"})
    whole = replace(config, models=replace(config.models, shard_frozen="false"))
    sharded = replace(config, models=replace(config.models, shard_frozen="true"))
    found = {name: plan(each, machine(200, 8)) for name, each in {"whole": whole, "sharded": sharded}.items()}
    assert [each.shards_frozen for each in found.values()] == [False, True]
    assert size(found["whole"], "reference") == 2 * SEVEN_B
    assert size(found["sharded"], "reference") == 2 * SEVEN_B // 8
    gathered = [a.num_bytes for a in found["sharded"].allocations if a.name == "gathered weights"]
    assert gathered == [2 * 2 * 152064 * 3584]  # the embedding and, ahead of its use, the head
    moments = {name: each.loading[-1] for name, each in found.items()}
    assert [moment.name for moment in moments.values()] == ["reference", "reference"]
    assert moments["whole"].gpu_bytes - moments["sharded"].gpu_bytes == 2 * SEVEN_B - 2 * SEVEN_B // 8 - gathered[0]
    assert [moment.host_bytes for moment in moments.values()] == [8 * 2 * SEVEN_B, 8 * 2 * gathered[0] // 2]


def test_auto_shards_frozen_models_where_whole_ones_do_not_fit_a_gpu_or_a_node(make_config):
    config = make_config(
        "7b",
        advantage={"kl_coef": 0.1},
        update={"zero_stage": 3},
        memory={"swap": "off"},
        rollout={"kv_cache_memory_bytes": GIB},
    )
    whole = plan(replace(config, models=replace(config.models, shard_frozen="false")), machine(200, 8))
    needed = max(whole.moment_bytes, *(whole.peak(phase) for phase in Phase)) / 0.95 / GIB
    assert not plan(config, machine(needed + 0.1, 8)).shards_frozen
    assert plan(config, machine(needed - 0.1, 8)).shards_frozen
    node = replace(machine(200, 8), host_memory_bytes=whole.peak_host_bytes)
    assert not plan(config, node).shards_frozen
    assert plan(config, replace(node, host_memory_bytes=whole.peak_host_bytes - 1)).shards_frozen
    assert not plan(
        config, replace(machine(10), host_memory_bytes=1)
    ).shards_frozen  # one rank has nothing to divide by


def test_a_run_whose_steps_fit_is_refused_where_its_start_does_not(make_config):
    config = make_config(
        "7b",
        update={
            "tensor_parallel_size": 4,
            "micro_batch_tokens": 1024,
            "actor": OptimizerConfig(kind="cpu_adam"),
        },
        models={"gradient_checkpointing": True},
        rollout={"tensor_parallel_size": 4, "enforce_eager": True, "kv_cache_memory_bytes": 1 << 28},
        memory={"swap": "vmm"},
        sync={"bucket_bytes": 1 << 28},
    )
    config = replace(config, models=replace(config.models, actor=make_config("7b").models.actor))
    found = plan(config, machine(num_gpus=64))
    steps = max(found.peak(phase) for phase in Phase)
    assert steps < found.moment_bytes
    small = replace(found, machine=machine((steps + found.moment_bytes) / 2 / GIB / 0.95, num_gpus=64))
    assert small.missing_bytes == found.moment_bytes - small.machine.budget_bytes
    with pytest.raises(ConfigError, match=rf"the start, at actor, needs {found.moment_bytes:,} bytes"):
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
    uses = host_uses(config, shapes, found, num_ranks=num_gpus, dtype_bytes=2, is_cpu=False)
    assert sum(uses.values()) == found.peak_host_bytes


def test_a_checkpoint_and_an_export_are_moments_of_the_plan(make_config):
    """A Llama of 1.2 B on two GPUs with an EMA: its largest tensor is the embedding."""
    config = make_config(
        "1b", models={"actor": make_config("1b").models.actor, "ema_decay": 0.9}, memory={"swap": "off"}
    )
    found = plan(replace(config, update=replace(config.update, zero_stage=3)), machine(num_gpus=2))
    checkpoint, export = found.saving
    assert [checkpoint.name, export.name] == ["checkpoint", "export"]
    held = sum(a.num_bytes for a in found.allocations if a.phases == frozenset(Phase))
    embedding = 128256 * 2048
    assert checkpoint.gpu_bytes == held + 2 * 4 * embedding  # a tensor in float32, gathered and copied
    assert export.gpu_bytes == held + GIB  # a bucket of gathered weights
    average = 4 * ONE_B // 2 * 2
    assert checkpoint.host_bytes == 2 * average + 12 * ONE_B // 2 * 2
    assert export.host_bytes == average + 2 * ONE_B + GIB  # one file, because the model is smaller than 4 GiB, a bucket
    nothing = replace(config, checkpoint=replace(config.checkpoint, every_steps=0, export=False))
    assert plan(nothing, machine(num_gpus=2)).saving == ()


def test_tenants_that_stay_are_counted_once_they_are_built(make_config):
    """With swap off nothing leaves: after the reward model has loaded, all tenants are there."""
    config = make_config("1b", estimator="gae", advantage={"kl_coef": 0.1}, memory={"swap": "off"})
    found = plan(config, machine())
    sizes = [moment.gpu_bytes for moment in found.loading]
    assert [moment.name for moment in found.loading] == ["rollout engine", "actor", "critic", "reference"]
    everything = sum(a.num_bytes for a in found.allocations if a.phases == frozenset(Phase))
    assert sizes[-1] == everything


def test_sizes_of_exports_are_those_of_the_code_that_writes_them():
    assert saving.FILE_BYTES == exporting.FILE_BYTES
    assert footprint.GATHERED_BYTES == export.GATHERED_BYTES == ema.GATHERED_BYTES


def test_a_run_that_a_node_cannot_save_is_refused_with_settings_that_it_can(make_config):
    """Without ZeRO-3 each of 8 ranks loads 15.2 GB beside the others, with it a part."""
    config = make_config("7b", memory={"swap": "off"})
    shapes, gpus = read_shapes(config), machine(200, 8)
    needed = make_plan(config, gpus, shapes).peak_host_bytes
    assert needed == 8 * 2 * SEVEN_B
    small = replace(gpus, host_memory_bytes=100 * GIB)
    with pytest.raises(
        ConfigError, match=rf"the start, at actor, needs {needed:,} bytes .* of host memory per node"
    ) as e:
        check_plan(make_plan(config, small, shapes), config, shapes)
    assert "this would fit: --update.zero_stage 3" in str(e.value)
