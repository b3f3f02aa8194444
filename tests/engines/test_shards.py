"""Two tensor-parallel ranks compute, train and save what one rank with the unsharded model does."""

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    Gemma2Config,
    LlamaConfig,
    PhiConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hybrid_rl.checkpoints.snapshot import SavedTensors
from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import PackedModel

CPU = torch.device("cpu")
SMALL: dict[str, Any] = {
    "vocab_size": 31,  # odd, so that embeddings and head are not sharded
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 64,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "bos_token_id": 1,
}
CONFIGS: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**SMALL, tie_word_embeddings=True),
    "llama-untied": lambda: LlamaConfig(**SMALL, tie_word_embeddings=False),
    "qwen2": lambda: Qwen2Config(**SMALL),  # sharded biases
    "qwen3": lambda: Qwen3Config(**SMALL, head_dim=16),  # norms of heads, whose gradients are summed over ranks
    "gemma2": lambda: Gemma2Config(**SMALL, head_dim=16, query_pre_attn_scalar=16, sliding_window=4),
    "phi": lambda: PhiConfig(**SMALL, partial_rotary_factor=0.5),  # biases that are added once, after the sum
}
INPUTS: dict[str, Any] = {
    "input_ids": torch.tensor([[5, 9, 12, 30, 4, 7, 11, 2]]),
    "position_ids": torch.tensor([[0, 1, 2, 3, 4, 0, 1, 2]]),
    "cu_seqlens": torch.tensor([0, 5, 8], dtype=torch.int32),
    "max_length": 5,
    "index": torch.tensor([1, 2, 3, 5, 6]),
}
TARGETS = torch.tensor([12, 30, 4, 11, 2])
FACTORS = torch.tensor([0.5, -0.3, 0.8, 0.1, -0.6])


@dataclass(frozen=True, kw_only=True)
class Case:
    """Model and settings of an engine that takes two steps."""

    model: str = "llama"
    role: str = "actor"
    dtype: str = "float32"
    stage: int = 2
    optimizer: str = "adamw"
    gradient_checkpointing: bool = False


CASES = {
    **{f"float32-zero{stage}": Case(stage=stage) for stage in (0, 1, 2)},
    **{f"bfloat16-zero{stage}": Case(stage=stage, dtype="bfloat16") for stage in (1, 2)},
    **{name: Case(model=name) for name in CONFIGS if name != "llama"},
    "critic": Case(role="critic", model="qwen2", stage=1),
    "recomputed": Case(gradient_checkpointing=True),
    "cpu-adam": Case(optimizer="cpu_adam"),
}


def save_models(folder: Path) -> None:
    """Save a random model of each kind and role, whose biases and norms differ from their initial values."""
    for case in CASES.values():
        torch.manual_seed(3)
        auto_class = AutoModelForCausalLM if case.role == "actor" else AutoModelForSequenceClassification
        config = CONFIGS[case.model]()
        config.num_labels = 1
        model = auto_class.from_config(config)
        for parameter in model.parameters():
            parameter.data.mul_(6 if parameter.ndim >= 2 else 1).add_(torch.randn_like(parameter), alpha=0.1)
        model.save_pretrained(folder / case.role / case.model)


def make_module(case: Case, folder: Path) -> PackedModel:
    path = str(folder / case.role / case.model)
    settings = ModelsConfig(dtype=case.dtype, gradient_checkpointing=case.gradient_checkpointing)
    if case.role == "actor":
        return load_actor(path, settings, CPU)
    return load_value_model(path, settings, CPU, field="models.critic")


def make_engine(case: Case, folder: Path, world: World, size: int) -> DeepSpeedEngine:
    # With the default eps, rounding decides the direction of Adam's step where a gradient is nearly 0.
    optimizer = OptimizerConfig(lr=1e-2, eps=1e-3, weight_decay=0.1, max_grad_norm=0.5, kind=case.optimizer)
    module = make_module(case, folder)
    return DeepSpeedEngine(
        module, optimizer, zero_stage=case.stage, total_steps=9, world=world, tensor_parallel_size=size
    )


def take_step(engine: DeepSpeedEngine, role: str) -> dict[str, Any]:
    """Take a step in two micro-batches, the second with a loss inside forward; return outputs and gradient norm."""
    if role == "critic":
        outputs: tuple[Tensor, ...] = (engine.forward(**INPUTS),)
        engine.backward((FACTORS * outputs[0]).sum(), is_last=True)
    else:
        inputs = INPUTS | {"targets": TARGETS, "temperature": 0.8}
        outputs = engine.forward(**inputs)
        engine.backward((FACTORS * outputs[0]).sum(), is_last=False)
        loss, *again = engine.forward(
            **inputs, loss_of_logprobs=lambda logprobs, entropy, tokens: FACTORS[tokens] * logprobs.exp()
        )
        engine.backward(loss, is_last=True)
        outputs = (*outputs, *again)
    return {"outputs": torch.stack([x.detach() for x in outputs]), "norm": engine.step()}


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    shapes = engine.named_shapes()
    with engine.gathered([name for name, _, _ in shapes]) as tensors:
        assert [(name, tuple(t.shape), t.dtype) for name, t in tensors.items()] == shapes
        return {name: tensor.clone() for name, tensor in tensors.items()}


def train(case: Case, folder: Path, world: World, size: int, snapshot: Path) -> dict[str, Any]:
    """Take two steps, write a snapshot, take a third step."""
    engine = make_engine(case, folder, world, size)
    steps = [take_step(engine, case.role) for _ in range(2)]
    engine.snapshot().write(snapshot, world.rank)
    return {
        "steps": steps,
        "weights": weights_of(engine),
        "num_local": sum(p.numel() for p in engine.module.parameters()),
        "optimizer_bytes": engine.optimizer_bytes(),
        "checkpoint_bytes": engine.checkpoint_bytes,
        "next": take_step(engine, case.role),
        "after": weights_of(engine),
    }


def resume(case: Case, folder: Path, world: World, size: int, snapshot: Path) -> dict[str, Any]:
    """Return the weights of an engine that loads a snapshot, and its next step."""
    engine = make_engine(case, folder, world, size)
    engine.load(snapshot)
    return {"weights": weights_of(engine), "next": take_step(engine, case.role), "after": weights_of(engine)}


def refusal(make: Callable[[], Any]) -> str:
    try:
        make()
    except ConfigError as error:
        return str(error)
    return "nothing was refused"


def shard_without_norms(case: Case, folder: Path, world: World) -> None:
    """Shard a model whose plan lacks the norms of heads, whose gradients must be summed over ranks."""
    module = make_module(case, folder)
    plan = module.model.config.base_model_tp_plan
    module.model.config.base_model_tp_plan = {k: v for k, v in plan.items() if "_norm" not in k}
    DeepSpeedEngine(module, OptimizerConfig(), zero_stage=2, total_steps=9, world=world, tensor_parallel_size=2)


def main() -> None:
    """Run all cases as one of two ranks that share each model, next to what one rank left in TEST_FOLDER."""
    folder = Path(os.environ["TEST_FOLDER"])
    torch.set_num_threads(1)
    world = join_world(timeout_s=60)
    results: dict[str, Any] = {
        name: train(case, folder, world, 2, folder / "pair" / name) for name, case in CASES.items()
    }
    saved = folder / "alone" / "float32-zero2"
    results["resumed"] = {stage: resume(Case(stage=stage), folder, world, 2, saved) for stage in (0, 1, 2)}
    results["without norms"] = refusal(lambda: shard_without_norms(Case(model="qwen3"), folder, world))
    torch.save(results, Path(sys.argv[1], f"rank{world.rank}.pt"))


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of all cases on one rank and on each of two ranks, and the folder of models and snapshots."""

    alone: dict[str, Any]
    pair: list[dict[str, Any]]
    folder: Path


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


@pytest.fixture(scope="module")
def ran(world, on_two_ranks, tmp_path_factory) -> Ran:
    folder = tmp_path_factory.mktemp("shards")
    save_models(folder)
    alone = {name: train(case, folder, world, 1, folder / "alone" / name) for name, case in CASES.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TEST_FOLDER", str(folder))
        return Ran(alone=alone, pair=on_two_ranks(__file__), folder=folder)


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        torch.testing.assert_close(tensor, expected[name], atol=tolerance, rtol=0, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_compute_and_train_as_one_does(ran, name):
    alone, is_float = ran.alone[name], CASES[name].dtype == "float32"
    for rank in ran.pair:
        found = rank[name]
        for step, expected in zip([*found["steps"], found["next"]], [*alone["steps"], alone["next"]], strict=True):
            torch.testing.assert_close(step["outputs"], expected["outputs"], atol=1e-5 if is_float else 0.05, rtol=0)
            assert step["norm"] == pytest.approx(expected["norm"], rel=1e-5 if is_float else 0.03)
            assert step["norm"] > 0.6  # so that gradients are clipped to 0.5
        assert_same(found["weights"], alone["weights"], 1e-6 if is_float else 0.016)
        assert_same(found["after"], alone["after"], 1e-6 if is_float else 0.016)


@pytest.mark.parametrize("name", CASES)
def test_each_rank_has_half_of_the_matrices_and_gathers_the_same_weights(ran, name):
    first, second = (rank[name] for rank in ran.pair)
    assert_same(first["after"], second["after"], 0)
    num_full = ran.alone[name]["num_local"]
    for rank in (first, second):
        assert rank["checkpoint_bytes"] == ran.alone[name]["checkpoint_bytes"] == 12 * num_full
        assert rank["optimizer_bytes"] == 12 * rank["num_local"] < 0.7 * 12 * num_full


@pytest.mark.parametrize("name", CASES)
def test_the_checkpoint_equals_that_of_one_rank(ran, name):
    found, expected = SavedTensors(ran.folder / "pair" / name), SavedTensors(ran.folder / "alone" / name)
    assert found.names == expected.names and found.notes == expected.notes
    tolerance = 1e-6 if CASES[name].dtype == "float32" else 0.016
    assert_same({n: found[n] for n in found.names}, {n: expected[n] for n in expected.names}, tolerance)


@pytest.mark.parametrize("stage", [0, 2, 3])
def test_one_rank_continues_the_checkpoint_of_two(ran, world, stage):
    case, name = Case(stage=stage), "float32-zero1"
    found, expected = resume(case, ran.folder, world, 1, ran.folder / "pair" / name), ran.pair[0][name]
    assert_same(found["weights"], expected["weights"], 0)
    assert_same(found["after"], expected["after"], 1e-6)
    assert found["next"]["norm"] == pytest.approx(expected["next"]["norm"], rel=1e-5)


@pytest.mark.parametrize("stage", [0, 1, 2])
def test_two_ranks_continue_the_checkpoint_of_one(ran, stage):
    expected = ran.alone["float32-zero2"]
    for rank in ran.pair:
        found = rank["resumed"][stage]
        assert_same(found["weights"], expected["weights"], 0)
        assert_same(found["after"], expected["after"], 1e-6)
        assert found["next"]["norm"] == pytest.approx(expected["next"]["norm"], rel=1e-5)


def test_a_model_that_computes_something_else_when_sharded_is_refused(ran):
    for rank in ran.pair:
        assert rank["without norms"].startswith(
            "update.tensor_parallel_size = 2: Qwen3ForCausalLM has other gradients of "
        )
        assert rank["without norms"].endswith("q_norm.weight when it is sharded; use 1")


if __name__ == "__main__":
    main()
