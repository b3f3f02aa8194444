"""The arguments of vLLM."""

from typing import Any

import pytest
import torch

from hybrid_rl.config import Config, ConfigError, RolloutConfig
from hybrid_rl.engines.start import check_engine
from hybrid_rl.engines.vllm.arguments import engine_arguments, graph_sizes, restart_fraction
from hybrid_rl.settings.passed_on import VLLM
from tests.conftest import VALID_CONFIG, change

CPU = torch.device("cpu")


def arguments_of(config: RolloutConfig, **named: Any) -> dict[str, Any]:
    defaults = {"dtype": torch.float32, "max_model_len": 20, "can_sleep": False, "seed": 0, "aliased": None, "gpus": ()}
    return engine_arguments("folder", config, **(defaults | named))


@pytest.fixture
def config(tiny) -> Config:
    sizes = {"models.actor": str(tiny / "policy"), "prompts.max_prompt_tokens": 8, "rollout.max_response_tokens": 12}
    return change(VALID_CONFIG, sizes)


def test_graphs_are_captured_for_up_to_max_num_seqs_sequences():
    sizes = graph_sizes(1000)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[33:37] == [248, 256, 272, 288]
    assert sizes[50:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert graph_sizes(576)[50:] == [512, 576]


def test_an_engine_that_starts_again_requires_no_more_memory_than_is_free():
    assert restart_fraction(0.5, free_bytes=90, total_bytes=100) == 0.5
    assert restart_fraction(0.5, free_bytes=35, total_bytes=100) == pytest.approx(0.3)
    assert restart_fraction(0.5, free_bytes=2, total_bytes=100) == 0.01  # vLLM takes no fraction of 0


def test_every_argument_that_the_trainer_sets_is_refused_in_rollout_vllm():
    large = arguments_of(RolloutConfig(kv_cache_memory_bytes=1 << 20, max_num_seqs=1000), gpus=["0", "1"])
    allowed = {"compilation_config", "enable_chunked_prefill"}  # merged; refused on a CPU by check_device
    assert set(large) - allowed <= VLLM.keys()


def test_arguments_that_are_passed_on_reach_vllm_beside_the_trainers():
    found = arguments_of(RolloutConfig(vllm={"block_size": 32}), trust_remote_code=True)
    assert found["block_size"] == 32 and found["max_model_len"] == 20 and found["trust_remote_code"] is True
    assert arguments_of(RolloutConfig())["trust_remote_code"] is False


@pytest.mark.parametrize(
    "given, message",
    [
        ({"blok_size": 32}, r"^rollout.vllm.blok_size: vLLM .* has no such key; it has block_size"),
        ({"block_size": 32, "a": 1}, r"^rollout.vllm.a: vLLM .* has no such key; it has "),
        ({"max_num_batched_tokens": 4}, r"refuses .* rollout.vllm: max_num_batched_tokens \(4\) is smaller than "),
        ({"kv_cache_dtype": "fp9"}, r"refuses models.actor = .* with the settings in rollout and rollout.vllm: .*fp8"),
    ],
)
def test_what_vllm_refuses_is_one_sentence_before_it_loads_a_model(config, given, message):
    check_engine(change(config, {"rollout.vllm": {"block_size": 32}}), CPU, is_here=True)
    with pytest.raises(ConfigError, match=message) as error:
        check_engine(change(config, {"rollout.vllm": given}), CPU, is_here=True)
    assert len(error.value.messages) == 1 and "\n" not in error.value.messages[0]


def test_names_are_checked_for_another_machine_too(config):
    with pytest.raises(ConfigError, match=r"rollout\.vllm\.blok_size"):
        check_engine(change(config, {"rollout.vllm": {"blok_size": 32}}), torch.device("cuda"), is_here=False)
    check_engine(change(config, {"rollout.vllm": {"block_size": 32}}), torch.device("cuda"), is_here=False)


def test_an_engine_without_arguments_of_vllm_needs_no_vllm(config):
    check_engine(change(config, {"rollout.engine": "hf", "rollout.vllm": {"blok_size": 1}}), CPU, is_here=True)
