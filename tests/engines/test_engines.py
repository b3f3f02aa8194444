"""DeepSpeed takes plain PyTorch's steps at every ZeRO stage, and the oracle engine generates what transformers does."""

import copy
import math
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import Packed
from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine, lr_factor
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.engines.vllm.arguments import graph_sizes
from hybrid_rl.engines.vllm.shared_memory import remove_shared_memory
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import Actor, packed_inputs
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, plan_buckets
from hybrid_rl.weights.checksum import checksum

CPU = torch.device("cpu")
STAGES = [0, 1, 2, 3]
SETTINGS = OptimizerConfig(
    lr=1e-2, eps=1e-4, weight_decay=0.1, max_grad_norm=0.5, warmup_steps=2, schedule="linear", min_lr_ratio=0.1
)


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def loss_of(logprobs: Tensor) -> Tensor:
    return -(logprobs * torch.linspace(1, 2, len(logprobs))).sum()


def inputs_of(packed: Packed) -> dict:
    return {**packed_inputs(packed), "index": packed.response_index, "targets": packed.targets, "temperature": 1.0}


def take_step(engine: DeepSpeedEngine, pieces: list[Packed]) -> float:
    for place, packed in enumerate(pieces):
        logprobs, _ = engine.forward(**inputs_of(packed))
        engine.backward(loss_of(logprobs), is_last=place == len(pieces) - 1)
    return engine.step()


def weights_of(engine: DeepSpeedEngine) -> dict[str, Tensor]:
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}


@pytest.fixture
def make_engine(tiny: Path, world: World):
    def make(stage: int, *, settings: OptimizerConfig = SETTINGS, **models: Any) -> DeepSpeedEngine:
        actor = load_actor(str(tiny / "policy"), ModelsConfig(**{"dtype": "float32", **models}), CPU)
        return DeepSpeedEngine(actor, settings, zero_stage=stage, total_steps=6, world=world)

    return make


def plain_steps(actor: Actor, pieces: list[Packed], num_steps: int) -> list[float]:
    """Train with PyTorch alone, the schedule by hand: 1/2, 1, 1, then down to a tenth over 4 steps."""
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
def test_steps_are_those_of_plain_pytorch(tiny, make_engine, pieces, stage):
    plain = load_actor(str(tiny / "policy"), ModelsConfig(), CPU)
    before = {name: p.detach().clone() for name, p in plain.model.named_parameters()}
    expected_norms = plain_steps(plain, pieces, 4)
    assert min(expected_norms) > 0.5  # clipping is at work
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


def test_zero_3_moves_layers_whole_and_computes_them_twice_all_the_same(make_engine, pieces):
    """A layer that is computed again in backward has its weights then, though its forward gives them up."""
    from deepspeed.utils import get_z3_leaf_modules  # not before engines/deepspeed.py has set what its import reads

    engines = [make_engine(3, gradient_checkpointing=again) for again in (False, True)]
    assert all(get_z3_leaf_modules(engine.module) == list(engine.model.model.layers) for engine in engines)
    once, twice = ([take_step(engine, pieces) for _ in range(3)] for engine in engines)
    assert twice == pytest.approx(once, rel=1e-6)
    expected = weights_of(engines[0])
    for name, weight in weights_of(engines[1]).items():
        torch.testing.assert_close(weight, expected[name], atol=1e-6, rtol=0, msg=name)


def test_ninja_is_found_where_the_environment_is_not_active():
    source = "import subprocess, hybrid_rl.engines.deepspeed.engine; subprocess.run(['ninja', '--version'], check=True)"
    environment = {**os.environ, "PATH": "/nowhere", "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, "-c", source], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


# The first of these compiles DeepSpeed's operator, which takes a minute of one core, once for a machine.
@pytest.mark.parametrize("dtype, atol", [("float32", 1e-6), ("bfloat16", 1e-2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_adam_takes_the_steps_of_adamw(make_engine, pieces, stage, dtype, atol):
    """Gradients of several micro-batches add up on the host too; bfloat16 weights of about 2 differ by a rounding."""
    engines = [make_engine(stage, settings=replace(SETTINGS, kind=kind), dtype=dtype) for kind in ("adamw", "cpu_adam")]
    before = weights_of(engines[0])
    norms = [[take_step(engine, pieces) for _ in range(4)] for engine in engines]
    assert norms[1] == pytest.approx(norms[0], rel=1e-5 if dtype == "float32" else 1e-2)
    expected, found = map(weights_of, engines)
    for name, weight in found.items():
        torch.testing.assert_close(weight, expected[name], atol=atol, rtol=0, msg=lambda m, n=name: f"{n}: {m}")
        assert (weight - before[name]).abs().max() > 1e-3


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_cpu_adam_continues_bit_for_bit(make_engine, pieces, tmp_path, stage):
    engine, other = (make_engine(stage, settings=replace(SETTINGS, kind="cpu_adam")) for _ in range(2))
    take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    other.load(tmp_path / "actor")
    assert take_step(other, pieces) == take_step(engine, pieces)
    theirs = weights_of(engine)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(other).items())


@pytest.mark.parametrize("stage", STAGES)
def test_save_and_load_continue_bit_for_bit(make_engine, pieces, tmp_path, stage):
    engine = make_engine(stage)
    for _ in range(2):
        take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    expected = [(engine.lr, take_step(engine, pieces)) for _ in range(2)]
    other = make_engine(stage)
    other.load(tmp_path / "actor")
    assert [(other.lr, take_step(other, pieces)) for _ in range(2)] == expected
    theirs = weights_of(engine)
    for name, weight in weights_of(other).items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize(
    "first, then, dtype",
    [(*stages, "float32") for stages in ((1, 3), (3, 2), (2, 1), (0, 3), (3, 0))]
    + [(*stages, "bfloat16") for stages in ((1, 3), (3, 2), (2, 1))],
)
def test_another_zero_stage_continues(make_engine, pieces, tmp_path, first, then, dtype):
    engine = make_engine(first, dtype=dtype)
    for _ in range(2):
        take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    other = make_engine(then, dtype=dtype)
    other.load(tmp_path / "actor")
    held, expected = weights_of(other), weights_of(engine)
    assert all(torch.equal(weight, expected[name]) for name, weight in held.items())
    assert [take_step(other, pieces) for _ in range(2)] == pytest.approx(
        [take_step(engine, pieces) for _ in range(2)], rel=1e-5 if dtype == "float32" else 1e-2
    )
    assert other.lr == engine.lr


def test_a_snapshot_of_another_model_is_refused(make_engine, tmp_path):
    engine = make_engine(2)
    taken = engine.snapshot()
    del taken.tensors["model.model.norm.weight/master"]
    taken.write(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"another model: 1 weights differ, as \['model.model.norm.weight/master'\]"):
        engine.load(tmp_path)


def test_load_of_nothing_is_an_error(make_engine, tmp_path):
    with pytest.raises(FileNotFoundError, match="no part of a checkpoint in"):
        make_engine(1).load(tmp_path)


@pytest.mark.parametrize(
    "stage, dtype", [(stage, "float32") for stage in STAGES] + [(stage, "bfloat16") for stage in (1, 2, 3)]
)
def test_names_shapes_and_gathered_weights_are_the_models(tiny, make_engine, stage, dtype):
    engine = make_engine(stage, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(tiny / "policy", dtype=getattr(torch, dtype))
    expected = dict(model.named_parameters())
    assert "lm_head.weight" not in expected  # tied: once
    assert engine.named_shapes() == [(name, tuple(p.shape), p.dtype) for name, p in expected.items()]
    some = ["model.norm.weight", "model.embed_tokens.weight"]
    with engine.gathered(some) as tensors:
        assert list(tensors) == some
        assert all(torch.equal(tensors[name], expected[name]) and not tensors[name].requires_grad for name in some)
    if stage == 3:
        assert all(p.numel() == 0 for p in engine.module.parameters())  # given up again


def test_bfloat16_without_zero_is_refused(make_engine):
    """DeepSpeed keeps no fp32 master then, and steps smaller than bfloat16's resolution would be lost."""
    with pytest.raises(ValueError, match="zero_stage = 0"):
        make_engine(0, dtype="bfloat16")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bfloat16_keeps_steps_that_bfloat16_cannot_hold(make_engine, pieces, stage):
    """150 steps of 2e-5 on weights near 1 move nothing in bfloat16 alone; the fp32 master adds them up."""
    engine = make_engine(stage, settings=OptimizerConfig(lr=2e-5, max_grad_norm=1e9), dtype="bfloat16")
    name = "model.norm.weight"
    before = weights_of(engine)[name]
    for _ in range(150):
        take_step(engine, pieces[1:])
    moved = (weights_of(engine)[name].float() - before.float()).abs()
    assert moved.max() > 1e-3


@pytest.mark.parametrize("factor", [math.inf, math.nan])
@pytest.mark.parametrize("stage", STAGES)
def test_gradient_norm_that_is_not_finite_is_an_error(make_engine, pieces, stage, factor):
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
    """Warm-up over 4 of 12 steps, then down to a tenth over 8; beyond the end the floor holds."""
    factor = lr_factor(OptimizerConfig(warmup_steps=4, schedule=schedule, min_lr_ratio=0.1), 12)
    assert [factor(step) for step in (0, 1, 2, 3, 4, 6, 8, 12)] == pytest.approx(expected)
    assert factor(100) == pytest.approx(expected[-1])


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_lr_factor_at_the_edges(schedule):
    assert lr_factor(OptimizerConfig(schedule=schedule), 5)(0) == 1
    short = lr_factor(OptimizerConfig(schedule=schedule, warmup_steps=9), 4)
    assert short(3) == pytest.approx(4 / 9)
    assert math.isfinite(short(9))


# The oracle engine


def push(engine: HuggingFaceEngine, tensors: dict[str, Tensor]) -> None:
    plan = plan_buckets([(name, t.shape, t.dtype) for name, t in tensors.items()], 1 << 30)
    bucket = IpcBucket(bucket_bytes(plan), CPU)
    engine.open_bucket(bucket.handle(), plan)
    bucket.unlink()
    for slot in plan[0]:
        slot.view(bucket.tensor).copy_(tensors[slot.name])
    engine.load_bucket(0)
    engine.finish_sync()


@pytest.fixture(scope="module")
def model(tiny: Path):
    return AutoModelForCausalLM.from_pretrained(tiny / "policy").eval()


@pytest.fixture
def engine(tiny: Path, model) -> HuggingFaceEngine:
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)
    push(engine, {name: p.detach() for name, p in model.named_parameters()})
    return engine


PROMPTS = [[2, 12, 3, 13], [4], [4, 12, 4, 13], [7, 7, 7, 7, 7, 7], [9]]
SAMPLED = Sampling(temperature=1.3, max_tokens=8, stop_token_ids=(0, 5))


def test_greedy_is_transformers_greedy(engine, model):
    stops = [0, 5, 20]
    found = engine.generate(PROMPTS, Sampling(temperature=0.0, max_tokens=10, stop_token_ids=tuple(stops)), None)
    for prompt, generation in zip(PROMPTS, found, strict=True):
        ids = torch.tensor([prompt])
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=10, eos_token_id=stops
        )
        assert generation.token_ids == output[0, len(prompt) :].tolist()
        assert generation.is_truncated == (generation.token_ids[-1] not in stops)
        assert generation.logprobs == []


def test_sampling_is_repeatable_and_independent_of_the_batch(engine):
    seeds = [11, 12, 13, 14, 15]
    together = engine.generate(PROMPTS, SAMPLED, seeds)
    assert engine.generate(PROMPTS, SAMPLED, seeds) == together
    order = [3, 0, 4]
    fewer = engine.generate([PROMPTS[i] for i in order], SAMPLED, [seeds[i] for i in order])
    assert [g.token_ids for g in fewer] == [together[i].token_ids for i in order]
    alone = [engine.generate([p], SAMPLED, [seed])[0].token_ids for p, seed in zip(PROMPTS, seeds, strict=True)]
    assert alone == [g.token_ids for g in together]
    assert [g.token_ids for g in engine.generate(PROMPTS, SAMPLED, [s + 50 for s in seeds])] != alone
    same_prompt = engine.generate([PROMPTS[0]] * 6, SAMPLED, list(range(6)))
    assert len({tuple(g.token_ids) for g in same_prompt}) > 1


def test_own_generator_follows_its_seed(engine):
    def draw(seed: int) -> list[list[int]]:
        engine.seed(seed)
        return [g.token_ids for g in engine.generate(PROMPTS, SAMPLED, None)]

    assert draw(1) == draw(1) != draw(2)


@torch.no_grad()
def test_logprobs_are_those_of_the_sampled_distribution(engine, model):
    for prompt, generation in zip(PROMPTS, engine.generate(PROMPTS, SAMPLED, [1, 2, 3, 4, 5]), strict=True):
        ids = torch.tensor([prompt + generation.token_ids])
        table = (model(ids).logits[0, len(prompt) - 1 : -1] / 1.3).log_softmax(-1)
        expected = table.gather(-1, torch.tensor(generation.token_ids)[:, None])[:, 0]
        assert generation.logprobs == pytest.approx(expected.tolist(), abs=1e-5)


def test_stop_tokens_are_kept_and_end_the_response(engine):
    prompts = [PROMPTS[i % 5] for i in range(40)]
    ends = [g.token_ids for g in engine.generate(prompts, SAMPLED, list(range(40)))]
    assert {ids[-1] for ids in ends if len(ids) < 8} == {0, 5}
    assert not any({0, 5} & set(ids[:-1]) for ids in ends)
    assert any(len(ids) == 8 for ids in ends)
    unstopped = Sampling(temperature=1.3, max_tokens=8, stop_token_ids=())
    assert all(len(g.token_ids) == 8 and g.is_truncated for g in engine.generate(prompts, unstopped, list(range(40))))


def test_a_stop_at_the_limit_is_not_truncated(engine):
    prompts, one = [PROMPTS[1]] * 60, Sampling(temperature=1.3, max_tokens=1, stop_token_ids=tuple(range(19)))
    generations = engine.generate(prompts, one, list(range(60)))
    assert {g.is_truncated for g in generations} == {True, False}
    assert all(g.is_truncated == (g.token_ids[0] >= 19) for g in generations)


@pytest.mark.parametrize("temperature", [0.0, 1.3])
def test_a_stop_string_ends_a_response_with_the_token_that_completes_it(engine, tiny, temperature):
    """The engine goes on as without stop strings, but no further than the first one, be it a special token."""
    tokenizer = load_tokenizer(str(tiny / "policy"))
    prompts, seeds = [PROMPTS[i % 5] for i in range(30)], list(range(30))
    free = Sampling(temperature=temperature, max_tokens=12, stop_token_ids=())
    whole = engine.generate(prompts, free, seeds)
    strings = (tokenizer.decode(whole[0].token_ids[3:5]), tokenizer.decode(whole[1].token_ids[5:8]), "<eos>")
    found = engine.generate(prompts, replace(free, stop_strings=strings), seeds)
    for generation, full in zip(found, whole, strict=True):
        ids = generation.token_ids
        assert ids == full.token_ids[: len(ids)] and generation.logprobs == full.logprobs[: len(generation.logprobs)]
        assert len(generation.logprobs) == (len(ids) if temperature else 0)
        is_stopped = any(string in tokenizer.decode(ids) for string in strings)
        assert not any(string in tokenizer.decode(ids[:-1]) for string in strings)
        assert generation.is_truncated == (not is_stopped) and (is_stopped or len(ids) == 12)
    assert {g.is_truncated for g in found} == {True, False}
    assert temperature == 0 or any(g.token_ids[-1] == 0 for g in found)


def test_a_stop_string_in_the_prompt_ends_nothing(engine, tiny):
    tokenizer = load_tokenizer(str(tiny / "policy"))
    sampling = Sampling(temperature=0.0, max_tokens=1, stop_token_ids=(), stop_strings=(tokenizer.decode(PROMPTS[0]),))
    assert engine.generate(PROMPTS[:1], sampling, None)[0].is_truncated


def test_no_prompts_give_no_generations(engine):
    assert engine.generate([], SAMPLED, []) == []


def test_generate_is_refused_without_the_trainers_weights(tiny, model):
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=CPU)
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)
    assert engine.weights_version == 0
    tensors = {name: p.detach() for name, p in model.named_parameters()}
    push(engine, tensors)
    assert engine.weights_version == 1
    engine.unmap("kv_cache")
    engine.map("kv_cache")
    assert len(engine.generate(PROMPTS, SAMPLED, None)) == 5
    engine.unmap("weights")
    engine.map("weights")  # mapped again, but empty
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)
    push(engine, tensors)
    assert len(engine.generate(PROMPTS, SAMPLED, None)) == 5 and engine.weights_version == 2


def test_generate_is_refused_in_the_middle_of_a_sync(engine):
    engine.load_bucket(0)
    with pytest.raises(RuntimeError, match="sync the trainer's first"):
        engine.generate(PROMPTS, SAMPLED, None)


def test_engine_takes_the_weights_it_is_given(engine, model):
    changed = copy.deepcopy(model).requires_grad_(False)
    changed.model.layers[0].mlp.up_proj.weight *= 2
    tensors = dict(changed.named_parameters())
    push(engine, tensors)
    (held,) = engine.checksums(list(tensors))
    assert {name: regions[0][1] for name, regions in held.items()} == {n: checksum(t) for n, t in tensors.items()}


def test_tensor_that_the_engine_does_not_know_is_named(engine, model):
    with pytest.raises(RuntimeError, match=r"takes these trainer tensors: base_layer\.weight"):
        push(engine, {"base_layer.weight": torch.ones(3)})


def test_shared_memory_of_a_killed_process_is_removed():
    source = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory
block = SharedMemory(create=True, size=4096)
assert mapped_shared_memory() == {block.name}
print(block.name, flush=True)
from multiprocessing import resource_tracker
resource_tracker.unregister(block._name, "shared_memory")  # as where the tracker is the trainer's, which lives on
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    name = ended.stdout.strip()
    assert Path("/dev/shm", name).exists()
    remove_shared_memory([name, "psm_nothing"])
    assert not Path("/dev/shm", name).exists()


def test_graphs_are_captured_up_to_as_many_sequences_as_are_decoded():
    sizes = graph_sizes(1000)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[33:37] == [248, 256, 272, 288]
    assert sizes[50:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert graph_sizes(576)[50:] == [512, 576]
