"""Resident memory of two ranks whose models are shards grows with the model as the plan says, in every phase.

The ranks have no GPU, so that what the plan counts on a GPU and on its host is one process's memory. Two models that
differ in their number of layers give bytes per parameter and rank; contexts, buffers and the largest layer cancel out.
"""

import ctypes
import gc
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from hybrid_rl.checkpoints import export
from hybrid_rl.config import Config, ModelsConfig, UpdateConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.deepspeed import settings as deepspeed_settings
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.sharding import frozen_sharder, trained_sharder
from hybrid_rl.memory.residency import Phase
from hybrid_rl.models import exporting
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.tokenizer import load_tokenizer
from hybrid_rl.planning import footprint, model_shape, saving
from hybrid_rl.planning.plan import Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.steps import ema
from hybrid_rl.steps.ema import EmaWeights, MovingReference
from tests.conftest import packed_rows
from tests.engines.conftest import inputs_of, take_step

CPU = torch.device("cpu")
NUM_LAYERS = (4, 16)
LIMIT = 1_000_000
"""Elements, or bytes, of every buffer that has an upper bound, so that both models exceed it."""
LIMITS = {
    deepspeed_settings: ["BUCKET_ELEMENTS"],
    exporting: ["FILE_BYTES"],
    export: ["GATHERED_BYTES"],
    ema: ["GATHERED_BYTES"],
}
PLANNED_LIMITS = {
    footprint: ["BUCKET_ELEMENTS", "PREFETCH_ELEMENTS"],
    model_shape: ["PREFETCH_ELEMENTS"],
    saving: ["FILE_BYTES", "GATHERED_BYTES"],
}
ZERO_LIMITS = {"stage3_prefetch_bucket_size": LIMIT}
LAYERS_VARIABLE = "HYBRID_RL_TEST_LAYERS"


def settings(folder: Path) -> Config:
    config = Config()
    return replace(
        config,
        models=ModelsConfig(
            actor=str(folder),
            dtype="bfloat16",
            gradient_checkpointing=True,
            shard_frozen="true",
            ema_decay=0.9,
            reference_sync_steps=1,
        ),
        rollout=replace(config.rollout, engine="hf", kv_cache_memory_bytes=LIMIT, max_response_tokens=8),
        prompts=replace(config.prompts, max_prompt_tokens=8),
        advantage=replace(config.advantage, estimator="grpo", kl_coef=0.1),
        update=UpdateConfig(zero_stage=3, micro_batch_tokens=16, deepspeed={"zero_optimization": ZERO_LIMITS}),
        memory=replace(config.memory, swap="off"),
        sync=replace(config.sync, bucket_bytes=4 * LIMIT),
    )


def write_model(folder: Path, num_layers: int, tokenizer_from: Path) -> Path:
    """Write a random Llama with layers of 3.4 million parameters in bfloat16, and return its folder."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = LlamaConfig(
        vocab_size=64, num_hidden_layers=num_layers, max_position_embeddings=64, eos_token_id=0, pad_token_id=0, **shape
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(tokenizer_from).save_pretrained(folder)
    return folder


class ResidentMemory:
    """Samples the memory of this process that is no page of a file, and keeps the peak of each phase."""

    def __init__(self) -> None:
        self.peaks: dict[str, int] = {}
        self._peak = 0
        threading.Thread(target=self._sample, daemon=True).start()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        gc.collect()
        self._peak = 0
        yield
        time.sleep(0.05)
        self.peaks[name] = self._peak

    def _sample(self) -> None:
        page = os.sysconf("SC_PAGE_SIZE")
        while True:
            _, resident, of_files, *_ = Path("/proc/self/statm").read_text().split()
            self._peak = max(self._peak, page * (int(resident) - int(of_files)))
            time.sleep(0.001)


def main() -> None:
    """Load, train, save and export on one of two ranks, and keep the peak of every phase."""
    folder, tiny = Path(sys.argv[1]), Path(sys.argv[2])
    for module, names in LIMITS.items():
        for name in names:
            setattr(module, name, LIMIT)
    for option, value in ((-3, 1 << 16), (-1, 0)):  # M_MMAP_THRESHOLD, M_TRIM_THRESHOLD: freed memory is returned
        ctypes.CDLL(None).mallopt(option, value)
    torch.set_num_threads(1)
    world = join_world()
    model = folder / "model"
    if world.is_main:
        write_model(model, int(os.environ[LAYERS_VARIABLE]), tiny / "policy")
    world.barrier()
    config, memory = settings(model), ResidentMemory()
    with memory.phase("reading"):
        actor = load_actor(str(model), config.models, CPU, sharder=trained_sharder(config, world, "actor"))
    with memory.phase("loading"):
        further = config.update.deepspeed
        engine = DeepSpeedEngine(actor, config.update.actor, zero_stage=3, total_steps=9, world=world, further=further)
    with memory.phase("average"):
        average = EmaWeights(engine, 0.9, world)
    with memory.phase("reference"):
        frozen = load_actor(str(model), config.models, CPU, sharder=frozen_sharder(config, world, is_sharded=True))
        reference = MovingReference(frozen, engine, None, world)
    pieces = packed_rows([[5, 9, 12, 30, 4], [8, 7, 6, 5, 4, 3, 0]])
    for _ in range(2):
        with memory.phase("training"), torch.no_grad():
            reference(**inputs_of(pieces[0]))
            with torch.enable_grad():
                take_step(engine, pieces)
    with memory.phase("saving"):
        copies = [part.snapshot() for part in (engine, average, reference)]
    del copies
    with memory.phase("exporting"):
        export.export(folder / "export", engine, load_tokenizer(str(model)), world)
        export.export_weights(folder / "export_ema", engine, average, load_tokenizer(str(model)), world)
    torch.save(memory.peaks, folder / f"rank{world.rank}.pt")


def planned(config: Config) -> dict[str, int]:
    """Return phase -> bytes of a rank by the plan, on GPU and host, without the rollout engine.

    DeepSpeed keeps gathered weights only while it trains, but the plan counts their upper bound in every phase. Before
    the first step, the moments and the gradients with which they are created are zeros that nothing has written to,
    which take no memory of a CPU; and DeepSpeed has moved the shards through the host before it makes the optimizer.
    """
    shapes, machine = read_shapes(config), Machine(gpu_memory_bytes=1 << 40, num_gpus=2, backend="reference")
    plan = make_plan(config, machine, shapes)
    assert plan.shards_frozen
    shard = shapes.actor.num_params // 2
    average, moments, gradients = 4 * shard, 8 * shard, 4 * shard
    gathered = bytes_of(plan, "actor buckets")
    on_gpu = {m.name: m.gpu_bytes - bytes_of(plan, "engine_weights") for m in (*plan.loading, *plan.saving)}
    on_host = {m.name: m.host_bytes // 2 for m in (*plan.loading, *plan.saving)}  # of two ranks
    return {
        "reading": bytes_of(plan, "actor_parameters"),
        "loading": on_gpu["actor"] - gathered - moments - gradients,
        "average": on_gpu["actor"] - gathered - moments - gradients + average,
        "reference": on_gpu["reference"] + on_host["reference"] - gathered - moments,
        "training": plan.peak(Phase.UPDATE_ACTOR) - bytes_of(plan, "engine_weights") + average,
        "saving": on_gpu["checkpoint"] + on_host["checkpoint"] - gathered,
        "exporting": on_gpu["export"] + on_host["export"] - gathered,
    }


def bytes_of(plan: Plan, name: str) -> int:
    return sum(a.num_bytes for a in plan.allocations if a.name == name)


@pytest.fixture(scope="module")
def measured(on_two_ranks) -> dict[int, list[dict[str, int]]]:
    """Number of layers -> peaks of each rank."""
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        for num_layers in NUM_LAYERS:
            patch.setenv(LAYERS_VARIABLE, str(num_layers))
            found[num_layers] = on_two_ranks(__file__)
    return found


@pytest.mark.slow
def test_resident_memory_grows_as_the_plan_says(measured, tiny, tmp_path, monkeypatch):
    for module, names in PLANNED_LIMITS.items():
        for name in names:
            monkeypatch.setattr(module, name, LIMIT)
    plans, sizes = [], []
    for num_layers in NUM_LAYERS:
        config = settings(write_model(tmp_path / str(num_layers), num_layers, tiny / "policy"))
        plans.append(planned(config))
        sizes.append(read_shapes(config).actor.num_params)
    assert sizes[1] - sizes[0] > 40_000_000
    for rank in range(2):
        few, many = (measured[num_layers][rank] for num_layers in NUM_LAYERS)
        slopes = {name: (many[name] - few[name]) / (sizes[1] - sizes[0]) for name in few}
        expected = {name: (plans[1][name] - plans[0][name]) / (sizes[1] - sizes[0]) for name in plans[0]}
        print(f"rank {rank}: bytes per parameter, measured {slopes}, planned {expected}")
        # Modules and hooks, as Python objects, take 0.13 bytes for each parameter of layers as small as these.
        assert slopes == pytest.approx(expected, rel=0.15, abs=0.25)


if __name__ == "__main__":
    main()
