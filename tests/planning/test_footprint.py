"""The formulas against the allocator: two steps of real DeepSpeed engines on one and two ranks, and real heads."""

import ctypes
import dataclasses
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function
from transformers import LlamaConfig, LlamaForCausalLM

from hybrid_rl.config import Config, ModelsConfig, OptimizerConfig, PromptsConfig, RolloutConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed import settings as deepspeed_settings
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.planning import footprint as formulas
from hybrid_rl.planning.footprint import Sharding, engine_footprint, head_bytes
from hybrid_rl.planning.model_shape import ModelShape
from hybrid_rl.planning.shapes import read_shape
from hybrid_rl.planning.workload import tokens_per_rank
from hybrid_rl_kernels.reference import fused_logprobs

Bytes = dict[str, tuple[int, int]]
"""Mark -> bytes allocated at the mark, and the peak since the previous mark."""
NUM_TOKENS = 32
BUCKET = 1_000_000
SHAPE = ModelShape(
    architecture="LlamaForCausalLM",
    model_type="llama",
    tensors=(("a", (8, 8)),),
    linears=(),
    num_layers=1,
    hidden_size=8,
    intermediate_size=16,
    query_size=8,
    output_size=8,
    num_heads=1,
    key_size=8,
    vocab_size=8,
    is_gated=True,
    norm_size=16,
)
CASES = [(stage, dtype) for dtype in ("bfloat16", "float32") for stage in range(4) if (stage, dtype) != (0, "bfloat16")]
ON_HOST = (2, "bfloat16", "cpu_adam")


def allocated(profiler: profile) -> list[tuple[float, str | int]]:
    """Return the marks and, after each allocation, the bytes allocated on the CPU, ordered by time."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    found: list[tuple[float, str | int]] = []
    for event in events:
        if event.get("name") == "[memory]":
            found.append((event["ts"], event["args"]["Total Allocated"]))
        elif event.get("name", "").startswith("mark "):
            found.append((event["ts"], event["name"]))
    return sorted(found, key=lambda pair: pair[0])


def peaks(profiler: profile) -> Bytes:
    """Return the bytes at each mark and the peak since the previous mark."""
    result, peak, now, start = {}, 0, 0, 0
    for _, what in allocated(profiler):
        if what == "mark start":  # earlier engines are still alive
            start = now
        elif isinstance(what, str):
            result[what.removeprefix("mark ")] = (now - start, peak - start)
            peak = now
        else:
            now, peak = what, max(peak, what)
    return result


def mark(name: str) -> None:
    """Mark the bytes allocated at this point; the pause lets gloo's thread free its last bucket."""
    time.sleep(0.1)
    torch.empty(1)
    with record_function(f"mark {name}"):
        pass


def count_every_thread() -> None:
    """Let the profiler count all threads, because gloo's thread sometimes is the one that frees a bucket.

    The flag belongs to PyTorch, which has no Python name for it.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    ctypes.c_bool.in_dll(library, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def measure(
    folder: str, stage: int, dtype: str, world: World, engines: list[DeepSpeedEngine], **optimizer: Any
) -> Bytes:
    """Take two optimizer steps of two micro-batches each, with marks, and return the bytes at the marks.

    Args:
        engines: receives the engine; it must not be freed while the next one is measured.
    """
    actor = load_actor(folder, ModelsConfig(actor=folder, dtype=dtype, attention="sdpa"), torch.device("cpu"))
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mark("start")
        loaded = [parameter.data for parameter in actor.parameters()]  # kept alive, because freeing them would count
        for parameter in actor.parameters():
            parameter.data = parameter.data.clone()  # allocates memory, where the file is mapped
        settings = OptimizerConfig(lr=1e-3, **optimizer)
        engine = DeepSpeedEngine(actor, settings, zero_stage=stage, total_steps=9, world=world)
        ids = torch.arange(NUM_TOKENS)[None]
        for step in range(2):
            mark(f"before {step}")
            for micro in range(2):
                logprobs, _ = engine.forward(
                    input_ids=ids,
                    position_ids=ids,
                    cu_seqlens=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
                    max_length=NUM_TOKENS,
                    index=ids[0, :-1],
                    targets=ids[0, 1:],
                    temperature=1.0,
                )
                engine.backward(logprobs.sum(), is_last=micro == 1)
                del logprobs
            mark(f"backward {step}")
            engine.step()
            mark(f"step {step}")
    engines.append(engine)
    del loaded
    return peaks(profiler)


def planned(shape: ModelShape, stage: int, dtype: str, num_ranks: int) -> tuple[int, int, int]:
    """Return lower and upper bound of the bytes between two steps, and the peak of a step."""
    b = 2 if dtype == "bfloat16" else 4
    sharding = Sharding(zero_stage=stage, num_ranks=num_ranks, dtype_bytes=b, optimizer=OptimizerConfig())
    part = engine_footprint(shape, sharding, num_trained=shape.num_params)
    activations = shape.activation_bytes(NUM_TOKENS, b, checkpointing=False, repeats_keys=True, is_fused=False)
    head = head_bytes(shape, NUM_TOKENS, backend="reference", backward=True)
    computing = (
        activations + max(head, shape.transient_bytes(NUM_TOKENS, b)) + part.reduction_bytes + part.gathered_bytes
    )
    least = part.parameter_bytes + part.optimizer_bytes
    return (
        least,
        least + part.buffer_bytes,
        least + part.buffer_bytes + part.gradient_bytes + max(computing, part.step_bytes),
    )


def make_folder(root: Path) -> str:
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(root / "model")
    return str(root / "model")


def main() -> None:
    folder, rank = Path(sys.argv[1]), os.environ.get("RANK", "0")
    model = make_folder(folder / f"files{rank}")  # before the process group starts, in which only the first rank writes
    count_every_thread()
    deepspeed_settings.BUCKET_ELEMENTS, world = BUCKET, join_world()
    engines: list[DeepSpeedEngine] = []
    found = {case: measure(model, *case, world, engines) for case in CASES}
    found[ON_HOST] = measure(model, *ON_HOST[:2], world, engines, kind=ON_HOST[2])
    torch.save(found, folder / f"rank{rank}.pt")


@pytest.fixture(scope="module")
def measured(on_two_ranks, tmp_path_factory):
    """Number of ranks -> case -> mark -> bytes at the mark and peak since the previous one."""
    folder = tmp_path_factory.mktemp("one_rank")
    subprocess.run([sys.executable, __file__, str(folder), ""], check=True)
    return {1: torch.load(folder / "rank0.pt"), 2: on_two_ranks(__file__)[0]}


@pytest.fixture(scope="module")
def shape(tmp_path_factory) -> ModelShape:
    folder = make_folder(tmp_path_factory.mktemp("shape"))
    return read_shape(folder, field="models.actor", is_policy=True)


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("stage, dtype", CASES)
def test_the_peak_of_a_training_step_matches_the_formulas(measured, shape, monkeypatch, stage, dtype, num_ranks):
    monkeypatch.setattr(formulas, "BUCKET_ELEMENTS", BUCKET)
    marks = measured[num_ranks][stage, dtype]
    least, most, peak = planned(shape, stage, dtype, num_ranks)
    real = max(marks["backward 1"][1], marks["step 1"][1])
    between = marks["step 1"][0]
    assert 0.99 * least <= between <= 1.01 * most
    # With ZeRO-3 on several ranks the plan counts a prefetch in transit; the layers of this model are smaller.
    assert (0.88 if (stage, num_ranks) == (3, 2) else 0.91) * peak <= real <= 1.1 * peak


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_gradients_for_an_optimizer_on_the_host_accumulate_on_the_device(measured, shape, num_ranks):
    optimizer = OptimizerConfig(kind="cpu_adam")
    sharding = Sharding(zero_stage=2, num_ranks=num_ranks, dtype_bytes=2, optimizer=optimizer)
    marks = measured[num_ranks][ON_HOST]
    planned = engine_footprint(shape, sharding, num_trained=shape.num_params).gradient_bytes
    assert marks["backward 1"][0] - marks["step 1"][0] == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [512, 3072])
@pytest.mark.parametrize("has_entropy", [False, True])
def test_the_peak_of_a_head_matches_the_formula(dtype, num_rows, has_entropy, num_words=8000, hidden_size=64):
    hidden = torch.randn(num_rows, hidden_size, dtype=dtype, requires_grad=True)
    weight = torch.randn(num_words, hidden_size, dtype=dtype, requires_grad=True)
    targets = torch.arange(num_rows)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        mark("start")
        with torch.no_grad():
            fused_logprobs(hidden, weight, targets)
        mark("forward")
        logprobs, entropy = fused_logprobs(hidden, weight, targets)
        (logprobs.sum() + (entropy.sum() if has_entropy else 0)).backward()
        mark("backward")
    shape = dataclasses.replace(SHAPE, hidden_size=hidden_size, vocab_size=num_words)
    marks = peaks(profiler)
    for part in ("forward", "backward"):
        is_backward = part == "backward"
        plan = head_bytes(shape, num_rows, backend="reference", backward=is_backward, has_entropy=has_entropy)
        assert plan == pytest.approx(marks[part][1], rel=0.1)
    assert head_bytes(shape, 9, backend="triton", backward=False) == 64 << 20
    frozen = head_bytes(shape, num_rows, backend="reference", backward=True, has_entropy=has_entropy, is_frozen=True)
    assert plan - frozen == 8 * num_words * hidden_size
    assert head_bytes(dataclasses.replace(shape, vocab_size=1), 9, backend="reference", backward=True) == 0


def test_footprints_by_hand():
    # 1200 parameters, 600 in the largest tensor, bfloat16, ZeRO-2 on 4 ranks: a shard has 300.
    shape = dataclasses.replace(SHAPE, tensors=(("a", (30, 20)), ("b", (600,))))
    sharding = Sharding(zero_stage=2, num_ranks=4, dtype_bytes=2, optimizer=OptimizerConfig())
    part = engine_footprint(shape, sharding, num_trained=1200)
    assert (part.parameter_bytes, part.optimizer_bytes, part.moved_bytes, part.gradient_bytes) == (
        2400,
        3600,
        3600,
        1200,
    )
    part = engine_footprint(shape, dataclasses.replace(sharding, zero_stage=3), num_trained=1200)
    assert (part.parameter_bytes, part.optimizer_bytes, part.gradient_bytes, part.step_bytes) == (600, 4800, 0, 1200)
    part = engine_footprint(shape, sharding, num_trained=40)  # adapters on top of the model
    assert (part.parameter_bytes, part.optimizer_bytes, part.gradient_bytes) == (2480, 120, 40)
    host = dataclasses.replace(sharding, optimizer=OptimizerConfig(kind="cpu_adam"))
    part = engine_footprint(shape, host, num_trained=1200)
    assert (part.parameter_bytes, part.optimizer_bytes, part.moved_bytes, part.host_bytes) == (2400, 0, 0, 6000)
    assert (part.gradient_bytes, part.buffer_bytes) == (1200, 1200)  # 2 bytes x 600 elements of the largest tensor


def test_tokens_per_sequence_parallel_rank_by_hand():
    """Packs of at most 4 sequences of 10 tokens, 8 of which are the response."""
    config = Config(
        prompts=PromptsConfig(max_prompt_tokens=2),
        rollout=RolloutConfig(max_response_tokens=8),
        update=UpdateConfig(micro_batch_tokens=40),
    )
    assert tokens_per_rank(config, num_sequences=9, max_tokens=40) == (40, 32)
    assert tokens_per_rank(config, num_sequences=3, max_tokens=40) == (30, 24)
    parallel = dataclasses.replace(config, update=UpdateConfig(micro_batch_tokens=40, sequence_parallel_size=3))
    # 13.3 tokens, all of which may belong to a response.
    assert tokens_per_rank(parallel, num_sequences=9, max_tokens=40) == (14, 14)
    assert tokens_per_rank(parallel, num_sequences=1, max_tokens=40) == (4, 4)


def test_the_bucket_size_equals_the_engines():
    assert formulas.BUCKET_ELEMENTS == deepspeed_settings.BUCKET_ELEMENTS


if __name__ == "__main__":
    main()
