"""What the constructors of engines and models would refuse is refused in `check`, `plan` and the start alike."""

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from hybrid_rl import preflight
from hybrid_rl.config import Config, ConfigError, LoraConfig, ModelsConfig
from hybrid_rl.distributed import World
from hybrid_rl.first_lines import first_lines, run_lines
from hybrid_rl.machine.gpus import check_fraction
from hybrid_rl.machine.packages import check_kernels
from hybrid_rl.memory.residency import RESIDENCY
from hybrid_rl.models.checks import check_classes
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.preflight import check_offload, check_same_weights, prepare_run
from hybrid_rl.validate import can_offload, check_device
from launch.check import check_run_elsewhere, check_run_here, site_elsewhere, site_here
from launch.plan import show_plan
from tests.conftest import VALID_CONFIG, change
from tests.models.families import FAMILIES, PADDED

CARD = Machine(gpu_memory_bytes=80 * GIB)
GPU = torch.device("cuda")


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    """Settings of a run of the tiny models without a scorer process."""
    return change(
        VALID_CONFIG,
        {
            "run.dir": str(tmp_path / "runs"),
            "models.actor": str(tiny / "policy"),
            "models.reward": str(tiny / "reward"),
            "prompts.path": str(tiny / "prompts.jsonl"),
            "prompts.max_prompt_tokens": 8,
            "reward.functions": [],
            "rollout.engine": "hf",
            "rollout.rollout_batch_size": 4,
            "rollout.max_response_tokens": 12,
            "update.mini_batch_size": 4,
        },
    )


ON_GPUS = [
    ({"update.zero_stage": 0}, r"^update.zero_stage = 0: DeepSpeed keeps no float32 copy of bfloat16 weights .* set 1"),
    (
        {"memory.swap": "deepspeed", "update.zero_stage": 1},
        r"^memory.swap = deepspeed: DeepSpeed has no offload for update.zero_stage = 1 in bfloat16; use 2 or 3",
    ),
    (
        {"models.attention": "varlen", "models.dtype": "float32"},
        r"^models.attention = varlen: needs GPUs and bfloat16 weights, and this run has GPUs and float32 weights",
    ),
    (
        {"models.attention": "flash_attention_2", "models.dtype": "float32"},
        r"^models.attention = flash_attention_2: needs GPUs and bfloat16 weights",
    ),
    (
        {"models.fused_layers": "liger", "models.dtype": "float32"},
        r"^models.fused_layers = liger: needs GPUs and bfloat16 weights",
    ),
    (
        {"update.sequence_parallel_size": 2, "models.attention": "eager"},
        r"^update.sequence_parallel_size = 2: models.actor: LlamaForCausalLM runs with models.attention = eager",
    ),
    (
        {"update.tensor_parallel_size": 4},
        r"^update.tensor_parallel_size = 4: must divide the 2 num_attention_heads of LlamaForCausalLM",
    ),
    (
        {"rollout.tensor_parallel_size": 4, "rollout.engine": "vllm"},
        r"^rollout.tensor_parallel_size = 4: must divide the actor's 2 attention heads",
    ),
    (
        {"rollout.kv_cache_memory_bytes": 1000, "rollout.engine": "vllm"},
        r"^rollout.kv_cache_memory_bytes = 1000: holds 3 tokens, and one sequence of prompt and response has 20; set",
    ),
    ({"models.lora.rank": 1, "models.lora.target_modules": ["no"]}, r"target_modules names no: LlamaForCausalLM has"),
]


@pytest.mark.parametrize("changes, message", ON_GPUS, ids=lambda value: str(value)[:50])
def test_a_run_on_gpus_is_refused_by_plan_and_check(config, changes, message):
    wrong, machine = change(config, changes), dataclasses.replace(CARD, num_gpus=4)
    for look in (show_plan, check_run_elsewhere):
        with pytest.raises(ConfigError) as error:
            look(wrong, machine)
        assert any(re.search(message, sentence) for sentence in error.value.messages), error.value.messages


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"update.zero_stage": 0, "models.dtype": "bfloat16"}, r"^update.zero_stage = 0: .* of bfloat16 weights"),
        ({"models.attention": "varlen"}, r"^models.attention = varlen: .* this run has no GPU and float32 weights"),
        ({"models.attention": "flash_attention_2"}, r"^models.attention = flash_attention_2: .* has no GPU"),
        ({"models.fused_layers": "liger"}, r"^models.fused_layers = liger: .* this run has no GPU"),
        ({"run.profile_steps": (1, 2)}, r"^run.profile_steps = \[1, 2\]: there is no GPU to profile; set null"),
        (
            {"rollout.vllm": {"enable_chunked_prefill": True}},
            r"^rollout.vllm.enable_chunked_prefill = true: cannot be given on a CPU",
        ),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_run_on_a_cpu_is_refused_by_check_and_start(config, changes, message):
    wrong = change(config, changes)
    site = site_here(1)
    for look in (
        lambda: check_run_here(wrong, None),
        lambda: prepare_run(wrong, dataclasses.replace(site, starts=True)),
    ):
        with pytest.raises(ConfigError, match=message):
            look()


def test_values_that_work_on_a_device_are_accepted():
    for changes, is_cpu in (
        ({"update.zero_stage": 0}, True),
        ({"update.zero_stage": 0, "models.dtype": "float32"}, False),
        ({"update.zero_stage": 1, "memory.swap": "deepspeed"}, True),  # nothing moves
        ({"update.zero_stage": 1, "memory.swap": "deepspeed", "models.dtype": "float32"}, False),
        ({"update.zero_stage": 2, "memory.swap": "deepspeed"}, False),
        ({"models.attention": "varlen", "models.fused_layers": "liger"}, False),
        ({"rollout.vllm": {"enable_chunked_prefill": True}}, False),
    ):
        check_device(change(VALID_CONFIG, changes), is_cpu=is_cpu)


def test_optimizers_on_the_host_need_no_offload():
    on_host = change(VALID_CONFIG, {"update.zero_stage": 1, "update.actor.kind": "cpu_adam"})
    assert not can_offload(on_host, "bfloat16")  # of the critic
    assert can_offload(change(on_host, {"update.critic.kind": "cpu_adam"}), "bfloat16")
    assert can_offload(change(on_host, {"advantage.estimator": "reinforce_pp"}), "bfloat16")


@pytest.mark.parametrize("stage, is_refused", [(0, True), (1, True), (2, False), (3, False)])
def test_without_the_pool_swap_auto_needs_a_stage_that_deepspeed_offloads(config, monkeypatch, stage, is_refused):
    prepared = prepare_run(config, site_elsewhere(CARD))
    wanted = change(config, {"update.zero_stage": stage})
    moving = dataclasses.replace(prepared.plan, residency=RESIDENCY)
    monkeypatch.setattr(preflight, "uses_pool", lambda *_: False)
    if is_refused:
        with pytest.raises(
            ConfigError, match=r"^memory.swap = auto: the native pool is not available, and DeepSpeed has"
        ):
            check_offload(wanted, moving, GPU)
    else:
        check_offload(wanted, moving, GPU)
    check_offload(wanted, prepared.plan, GPU)  # everything stays: nothing has to be offloaded
    monkeypatch.setattr(preflight, "uses_pool", lambda *_: True)
    check_offload(wanted, moving, GPU)


def save(family: str, tiny: Path, folder: Path) -> str:
    AutoModelForCausalLM.from_config((FAMILIES | PADDED)[family]()).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    "family, models, sizes, message",
    [
        ("bloom", {"attention": "varlen"}, {}, r"models.actor is a BloomForCausalLM, which is exact with eager"),
        ("bloom", {}, {"sequence_parallel_size": 2}, r"BloomForCausalLM pads its sequences, and only packed tokens"),
        (
            "mistral",
            {"attention": "sdpa"},
            {"sequence_parallel_size": 2},
            r"MistralForCausalLM has a sliding window, for which models.attention = sdpa masks only this rank's tokens",
        ),
    ],
)
def test_a_class_that_does_not_run_with_the_settings_is_named(tiny, tmp_path, family, models, sizes, message):
    path = save(family, tiny, tmp_path)
    config = Config(models=ModelsConfig(actor=path, **models))
    config = change(config, {"advantage.estimator": "reinforce_pp", **{f"update.{n}": v for n, v in sizes.items()}})
    with pytest.raises(ConfigError, match=message):
        check_classes(config, GPU)


def test_a_layer_that_takes_no_adapter_is_refused_by_peft_itself(tiny, tmp_path):
    """The model reads the weight of this layer without calling it."""
    path = save("falcon-h1", tiny, tmp_path)
    config = change(Config(models=ModelsConfig(actor=path)), {"advantage.estimator": "reinforce_pp"})
    adapters = LoraConfig(rank=1, target_modules=["out_proj"])
    with pytest.raises(ConfigError, match=r"^models.lora.target_modules, of "):
        check_classes(change(config, {"models.lora": adapters}), GPU)
    check_classes(change(config, {"models.lora": dataclasses.replace(adapters, target_modules=["q_proj"])}), GPU)


def test_a_reference_that_moves_must_have_the_weights_of_the_actor(config, tiny, tmp_path):
    moving = change(config, {"models.reference_sync_steps": 1, "advantage.kl_coef": 0.1})
    shapes = prepare_run(moving, site_here(1)).shapes
    check_same_weights(moving, shapes)
    other = dataclasses.replace(shapes.reference, tensors=shapes.reference.tensors[1:])
    with pytest.raises(
        ConfigError, match=r"models.reference_sync_steps needs the weights of models.actor, but 1 differ"
    ):
        check_same_weights(moving, dataclasses.replace(shapes, reference=other))


def test_the_gpu_must_leave_vllm_what_it_requires():
    check_fraction(0.5, total_bytes=100, available_bytes=50, aliased_bytes=49)
    with pytest.raises(
        ConfigError, match=r"^rollout.gpu_memory_utilization = 0.5: vLLM requires 50 bytes .* at most 0.4"
    ):
        check_fraction(0.5, total_bytes=100, available_bytes=49, aliased_bytes=0)
    with pytest.raises(
        ConfigError, match=r"the actor's weights, which take 50 of the 50 bytes; set more than 0.50, or"
    ):
        check_fraction(0.5, total_bytes=100, available_bytes=99, aliased_bytes=50)


def test_kernels_that_the_settings_name_must_be_installed(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_kernels(ModelsConfig())
    with pytest.raises(ConfigError) as error:
        check_kernels(ModelsConfig(attention="flash_attention_2", fused_layers="liger"))
    assert error.value.messages == (
        "models.attention = flash_attention_2: flash-attn is not installed; install it, or set auto",
        "models.fused_layers = liger: liger-kernel is not installed; install it, or set auto",
    )


def test_the_plan_sizes_the_kv_cache_by_default(config):
    assert Config().rollout.kv_cache_memory_bytes is None
    on_gpus = prepare_run(change(config, {"rollout.engine": "vllm"}), site_elsewhere(CARD))
    assert on_gpus.config.rollout.kv_cache_memory_bytes == on_gpus.plan.kv_bytes
    assert on_gpus.plan.kv_sequences >= config.responses_per_step
    assert prepare_run(config, site_here(1)).config.rollout.kv_cache_memory_bytes == GIB


def test_first_lines_on_a_cpu(config):
    used = change(config, {"models.lora.rank": 2, "update.deepspeed": {"aio": {}}})
    prepared = prepare_run(used, site_here(1))
    lines = first_lines(prepared, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    assert lines[0].startswith("hybrid_rl ") and f"torch {torch.__version__}" in lines[0] and "deepspeed 0." in lines[0]
    assert lines[1].startswith("devices: 1 x CPU, ")
    assert lines[2:] == [
        "actor: LlamaForCausalLM in float32, attention sdpa, no fused layers",
        "critic, reward: LlamaForSequenceClassification in float32, attention sdpa, no fused layers",
        "adapters of rank 2 in actor and critic",
        "log-probs, losses and advantages: PyTorch",
        "rollout engine: transformers, in the trainer's process, one per rank, adapters, shared base",
        "training engine: DeepSpeed ZeRO 2, adamw; configuration passed on: aio",
        "memory: nothing moves between the phases",
    ]


def test_lines_of_a_run_on_gpus(config):
    kernels = {"models.attention": "varlen", "models.fused_layers": "liger"}
    on_gpus = {"rollout.engine": "vllm", "rollout.vllm": {"block_size": 32}, "update.zero_stage": 1, **kernels}
    prepared = prepare_run(change(config, on_gpus), site_elsewhere(CARD))
    assert run_lines(prepared, GPU) == [
        "actor: LlamaForCausalLM in bfloat16, attention varlen, fused layers of Liger",
        "critic, reward: LlamaForSequenceClassification in bfloat16, attention varlen, fused layers of Liger",
        "log-probs, losses and advantages: Triton kernels",
        "rollout engine: vLLM, one per rank, shared weights; arguments passed on: block_size",
        "training engine: DeepSpeed ZeRO 1, adamw",
    ]
