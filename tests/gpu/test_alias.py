"""sync.mode = alias with CUDA graphs: the engine uses the trainer's weights and equals one with copies bit for bit."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import ModelsConfig, OptimizerConfig, RolloutConfig, SyncConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.sync import AliasSync, CopySync, SyncReport
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAMPLED = Sampling(temperature=1.0, max_tokens=32, stop_token_ids=())
PROMPTS = [[(37 * row + 11 * k) % 31_000 + 1 for k in range(8 + 3 * row)] for row in range(12)]
MIB = 1 << 20


@dataclass(kw_only=True)
class Seen:
    """Results of one trainer with an engine that aliases its weights, then with an engine that has copies."""

    reports: list[SyncReport] = field(default_factory=list)
    aliased: list[list[Generation]] = field(default_factory=list)
    """Responses of the engine with aliases: at the start, and after each of two steps."""
    gaps: list[float] = field(default_factory=list)
    """Mean |engine - trainer| log-prob of these responses."""
    cycled: list[list[Generation]] = field(default_factory=list)
    """Responses after each of five sleeps."""
    asleep: list[int] = field(default_factory=list)
    """Bytes used on the device during each sleep."""
    copied: list[Generation] = field(default_factory=list)
    """Responses of the engine with copies, with the trainer's last weights."""
    awake_aliased: int = 0
    awake_copied: int = 0
    weight_bytes: int = 0


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def generate(engine: VllmEngine) -> list[Generation]:
    """Return a response to each prompt, one at a time: rounding depends on the batch, which depends on timing."""
    return [engine.generate([ids], SAMPLED, [row])[0] for row, ids in enumerate(PROMPTS)]


def packed_of(generations: list[Generation], device: torch.device) -> tuple[Any, torch.Tensor]:
    """Return the trainer's inputs and the engine's log-probs of the responses, in one order."""
    rollouts = [
        make_rollout(ids, found.token_ids, prompt_id=row, rollout_logprobs=found.logprobs, is_truncated=True)
        for row, (ids, found) in enumerate(zip(PROMPTS, generations, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(len(rollouts))), device)
    inputs = packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets, "temperature": 1.0}
    return inputs, torch.tensor([value for found in generations for value in found.logprobs], device=device)


def start(model: Path, world: World, **aliased: Any) -> VllmEngine:
    config = RolloutConfig(kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.4, max_num_seqs=16)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return VllmEngine(str(model), config, dtype=dtype, max_model_len=128, can_sleep=True, seed=0, **aliased)


def run_both(model: Path, world: World) -> Seen:
    seen = Seen()
    actor = load_actor(str(model), ModelsConfig(), world.device)
    alias_buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    seen.weight_bytes = sum(slot.nbytes for slot in alias_buffer.slots)
    engine = start(model, world, aliased=alias_buffer.export())
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-4), zero_stage=2, total_steps=9, world=world, alias_buffer=alias_buffer
    )
    sync = AliasSync(trainer, engine, SyncConfig(), world.device, Timeline(), alias_buffer=alias_buffer)
    for step in range(3):
        seen.reports.append(sync.sync())
        seen.aliased.append(generate(engine))
        inputs, theirs = packed_of(seen.aliased[-1], world.device)
        with torch.no_grad():
            seen.gaps.append(float((trainer.forward(**inputs)[0] - theirs).abs().mean()))
        if step < 2:
            trainer.backward(-trainer.forward(**inputs)[0].mean(), is_last=True)
            trainer.step()
    for _ in range(5):
        engine.unmap("kv_cache")
        seen.asleep.append(used())
        engine.map("kv_cache")
        seen.cycled.append(generate(engine))
    seen.awake_aliased = used()
    engine.close()
    engine = start(model, world)
    CopySync(trainer, engine, SyncConfig(bucket_bytes=64 * MIB), world.device, Timeline()).sync()
    seen.copied = generate(engine)
    seen.awake_copied = used()
    engine.close()
    return seen


@pytest.fixture(scope="module", params=["llama, tied", "qwen2, biases, 31990 tokens"])
def seen(request: pytest.FixtureRequest, small: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    model = small / "policy"
    if request.param.startswith("qwen2"):
        torch.manual_seed(0)
        config = Qwen2Config(
            vocab_size=31_990,  # vLLM pads it to 32,000
            hidden_size=896,
            intermediate_size=2432,
            num_hidden_layers=6,
            num_attention_heads=14,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            eos_token_id=0,
            pad_token_id=0,
            bos_token_id=None,
        )
        model = tmp_path_factory.mktemp("qwen2")
        policy = Qwen2ForCausalLM(config).to(torch.bfloat16)
        for name, parameter in policy.named_parameters():
            if name.endswith("bias"):
                parameter.data.normal_(std=0.5)  # zero biases would hide a wrong place
        policy.save_pretrained(model)
    yield run_both(model, join_world())
    torch.cuda.empty_cache()


def test_a_sync_copies_nothing_and_verifies_every_tensor_once(seen: Seen) -> None:
    assert [report.version for report in seen.reports] == [1, 2, 3]
    assert all(report.num_bytes == 0 for report in seen.reports)
    assert seen.reports[0].num_verified > 50 and seen.reports[1].num_verified == 8


def test_the_engine_uses_the_trainers_new_weights(seen: Seen) -> None:
    assert seen.aliased[0] != seen.aliased[1] != seen.aliased[2]
    assert all(gap < 0.02 for gap in seen.gaps), seen.gaps


def test_log_probs_equal_those_of_an_engine_with_copies(seen: Seen) -> None:
    assert seen.aliased[-1] == seen.copied


def test_weights_are_kept_during_sleep(seen: Seen) -> None:
    assert all(generations == seen.aliased[-1] for generations in seen.cycled)


def test_memory_use_during_sleep_is_constant(seen: Seen) -> None:
    print("asleep, MiB:", [round(value / MIB) for value in seen.asleep])
    assert max(seen.asleep[1:]) - min(seen.asleep[1:]) <= 16 * MIB


def test_weights_exist_once(seen: Seen) -> None:
    saved = seen.awake_copied - seen.awake_aliased
    print("saved, of the weights' bytes:", saved / seen.weight_bytes)
    assert saved > 0.9 * seen.weight_bytes
