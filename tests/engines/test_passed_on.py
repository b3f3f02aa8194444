"""Configuration of DeepSpeed that a run passes on, with the real library."""

import pytest
import torch

from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.settings import BUCKET_ELEMENTS, check_deepspeed, deepspeed_settings
from hybrid_rl.engines.passed_on import merged
from hybrid_rl.models.loading import load_actor
from hybrid_rl.settings.passed_on import DEEPSPEED
from tests.conftest import VALID_CONFIG, change

CPU = torch.device("cpu")


def check(further):
    check_deepspeed(change(VALID_CONFIG, {"update.deepspeed": further}), dtype=torch.bfloat16, device=CPU)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_values_reach_the_real_engine_and_leave_the_others(tiny, world, train_step, stage):
    further = {"zero_optimization": {"reduce_bucket_size": 12345}, "communication_data_type": "fp32"}
    actor = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    engine = DeepSpeedEngine(actor, OptimizerConfig(), zero_stage=stage, total_steps=1, world=world, further=further)
    assert engine.wrapped.zero_reduce_bucket_size() == 12345
    assert engine.wrapped.zero_allgather_bucket_size() == BUCKET_ELEMENTS
    assert engine.wrapped.zero_optimization_stage() == stage
    assert engine.wrapped.communication_data_type == torch.float32
    assert train_step(engine) > 0


@pytest.mark.parametrize(
    "further",
    [
        {},
        {"zero_optimization": {"reduce_bucket_size": 1000, "overlap_comm": False}},
        {"communication_data_type": "fp32", "wall_clock_breakdown": True},
        {"comms_logger": {"enabled": True}},
        {"flops_profiler": {"enabled": True, "profile_step": 3}},
    ],
    ids=str,
)
def test_configuration_of_deepspeed_is_accepted(further):
    check(further)


@pytest.mark.parametrize(
    "further, message",
    [
        ({"zero_optimizaton": {}}, r"^update.deepspeed.zero_optimizaton: DeepSpeed .* it has zero_optimization$"),
        ({"nothing": 1}, r"^update.deepspeed.nothing: DeepSpeed .* has no such key; it has "),
        ({"zero_optimization": {"foo": 1}}, r"refuses it: foo: Extra inputs are not permitted"),
        ({"zero_optimization": {"reduce_bucket_size": "x"}}, r"refuses it: reduce_bucket_size: Input should be"),
        ({"flops_profiler": {"profil_step": 3}}, r"^update.deepspeed.flops_profiler.profil_step: .* profile_step$"),
        ({"communication_data_type": "fp9"}, r"refuses it: Invalid communication_data_type"),
    ],
    ids=str,
)
def test_what_deepspeed_would_ignore_or_refuse_is_one_sentence(further, message):
    with pytest.raises(ConfigError, match=message) as error:
        check(further)
    assert len(error.value.messages) == 1 and "\n" not in error.value.messages[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["adamw", "cpu_adam"])
def test_every_key_that_the_trainer_sets_is_refused_in_update_deepspeed(dtype, kind):
    settings = deepspeed_settings(OptimizerConfig(kind=kind), zero_stage=2, dtype=dtype, device=CPU)
    inner = settings.pop("zero_optimization")
    own = {*settings, *(f"zero_optimization.{key}" for key in inner if not key.endswith("bucket_size"))}
    assert own <= DEEPSPEED.keys()


def test_dictionaries_are_merged_at_every_depth():
    ours = {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
    assert merged(ours, {"a": {"c": {"f": 4}}, "e": {"g": 5}}) == {"a": {"b": 1, "c": {"d": 2, "f": 4}}, "e": {"g": 5}}
    assert ours == {"a": {"b": 1, "c": {"d": 2}}, "e": 3}
