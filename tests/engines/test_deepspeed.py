"""DeepSpeedEngine takes the optimizer steps of plain PyTorch at every ZeRO stage."""

import math
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import Packed
from hybrid_rl.config import ModelsConfig, OptimizerConfig
from hybrid_rl.engines.deepspeed.settings import lr_factor
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import Actor
from tests.engines.conftest import CPU, SETTINGS, STAGES, inputs_of, loss_of, take_step, weights_of


def plain_steps(actor: Actor, pieces: list[Packed], num_steps: int) -> list[float]:
    """Train with plain PyTorch and return the gradient norms; the schedule is 1/2, 1, 1, then linear to 1/10."""
    decayed = [p for p in actor.parameters() if p.ndim >= 2]
    others = [p for p in actor.parameters() if p.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
        eps=1e-4,
    )
    norms = []
    for factor in (0.5, 1.0, 1.0, 0.1 + 0.9 * 0.75)[:num_steps]:
        optimizer.zero_grad()
        for packed in pieces:
            loss_of(actor(**inputs_of(packed))[0]).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(actor.parameters(), 0.5)))
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * factor
        optimizer.step()
    return norms


@pytest.mark.parametrize("stage", STAGES)
def test_steps_equal_those_of_plain_pytorch(tiny, make_engine, pieces, stage):
    plain = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    expected_norms = plain_steps(plain, pieces, 4)
    assert min(expected_norms) > 0.5  # gradients are clipped
    engine = make_engine(stage)
    lrs, norms = [], []
    for _ in range(4):
        lrs.append(engine.lr)
        norms.append(take_step(engine, pieces))
    assert lrs == pytest.approx([5e-3, 1e-2, 1e-2, 7.75e-3])
    assert norms == pytest.approx(expected_norms, rel=1e-5)
    for name, weight in weights_of(engine).items():
        expected = dict(plain.model.named_parameters())[name].detach()
        torch.testing.assert_close(weight, expected, atol=2e-6, rtol=0, msg=name)
        assert (weight - before[name]).abs().max() > 1e-3


def test_zero_3_gathers_whole_layers_also_with_gradient_checkpointing(make_engine, pieces):
    """Layers that are computed again in backward are gathered again."""
    from deepspeed.utils import get_z3_leaf_modules  # reads variables that engines/deepspeed/engine.py sets

    engines = [make_engine(3, gradient_checkpointing=recompute) for recompute in (False, True)]
    assert all(get_z3_leaf_modules(engine.module) == list(engine.model.model.layers) for engine in engines)
    once, twice = ([take_step(engine, pieces) for _ in range(3)] for engine in engines)
    assert twice == pytest.approx(once, rel=1e-6)
    expected = weights_of(engines[0])
    for name, weight in weights_of(engines[1]).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0, msg=name)


def test_ninja_is_found_without_an_activated_environment():
    source = "import subprocess, hybrid_rl.engines.deepspeed.engine; subprocess.run(['ninja', '--version'], check=True)"
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# The first of these tests compiles DeepSpeed's operator, which takes a minute, once per machine.
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_adam_takes_the_steps_of_adamw(make_engine, pieces, stage, dtype, atol):
    """Gradients of several micro-batches add up on the host too; bfloat16 weights near 2 differ by one rounding."""
    engines = [make_engine(stage, settings=replace(SETTINGS, kind=kind), dtype=dtype) for kind in ("adamw", "cpu_adam")]
    before = weights_of(engines[0])
    norms = [[take_step(engine, pieces) for _ in range(4)] for engine in engines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5 if dtype == "float32" else 1e-2)
    expected, found = map(weights_of, engines)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (weight - before[name]).abs().max() > 1e-3


@pytest.mark.parametrize(
    "stage, dtype", [(stage, "float32") for stage in STAGES] + [(stage, "bfloat16") for stage in (1, 2, 3)]
)
def test_names_shapes_and_gathered_weights_equal_those_of_the_checkpoint(tiny, make_engine, stage, dtype):
    engine = make_engine(stage, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tiny / "policy", dtype=getattr(torch, dtype))
    expected = dict(model.named_parameters())
    assert "lm_head.weight" not in expected  # tied weights appear once
    assert engine.named_shapes() == [(name, tuple(p.shape), p.dtype) for name, p in expected.items()]
    some = ["model.norm.weight", "model.embed_tokens.weight"]
    with engine.gathered(some) as tensors:
        assert list(tensors) == some
        assert all(torch.equal(tensors[name], expected[name]) and not tensors[name].requires_grad for name in some)
    if stage == 3:
        assert all(p.numel() == 0 for p in engine.module.parameters())  # partitioned again


def test_bfloat16_without_zero_is_refused(make_engine):
    """DeepSpeed keeps no float32 master weights then, and loses steps below the resolution of bfloat16."""
    with pytest.raises(ValueError, match="zero_stage = 0"):
        make_engine(0, dtype="bfloat16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_master_weights_add_up_steps_too_small_for_bfloat16(make_engine, pieces, stage):
    """150 steps of 2e-5 on weights near 1 would each be rounded away in bfloat16."""
    engine = make_engine(stage, settings=OptimizerConfig(lr=2e-5, max_grad_norm=1e9), dtype="bfloat16")
    name = "model.norm.weight"
    before = weights_of(engine)[name]
    for _ in range(150):
        take_step(engine, pieces[1:])
    moved = (weights_of(engine)[name].float() - before.float()).abs()
    assert moved.max() > 1e-3


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("stage", STAGES)
def test_a_gradient_norm_that_is_not_finite_is_an_error(make_engine, pieces, stage, factor):
    engine = make_engine(stage)
    logprobs, _ = engine.forward(**inputs_of(pieces[0]))
    engine.backward(loss_of(logprobs) * factor, is_last=True)
    with pytest.raises(FloatingPointError, match="gradient norm is"):
        engine.step()


@pytest.mark.parametrize(
    "schedule, expected",
    [
        ("constant", [0.25, 0.5, 0.75, 1, 1, 1, 1, 1]),
        ("linear", [0.25, 0.5, 0.75, 1, 1, 0.775, 0.55, 0.1]),
        ("cosine", [0.25, 0.5, 0.75, 1, 1, 0.1 + 0.45 * (1 + math.sqrt(0.5)), 0.55, 0.1]),
    ],
)
def test_lr_factor_by_hand(schedule, expected):
    """Warm-up over 4 of 12 steps, then decay to a tenth over 8 steps; the minimum holds after the end."""
    factor = lr_factor(OptimizerConfig(warmup_steps=4, schedule=schedule, min_lr_ratio=0.1), 12)
    assert [factor(step) for step in (0, 1, 2, 3, 4, 6, 8, 12)] == pytest.approx(expected)
    assert factor(100) == pytest.approx(expected[-1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lr_factor_without_warmup_and_with_a_long_one(schedule):
    assert lr_factor(OptimizerConfig(schedule=schedule), 5)(0) == 1
    short = lr_factor(OptimizerConfig(schedule=schedule, warmup_steps=9), 4)
    assert short(3) == pytest.approx(4 / 9)
    assert math.isfinite(short(9))
