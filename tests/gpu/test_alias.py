"""The engine on the trainer's weights, with CUDA graphs: it follows, equals copies bit for bit, and costs no memory."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.batch import Prompt, Rollout, make_train_batch, pack
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

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

SAMPLED = Sampling(temperature=1.0, max_tokens=32, stop_token_ids=())
PROMPTS = [[(37 * row + 11 * k) % 31_000 + 1 for k in range(8 + 3 * row)] for row in range(12)]
MIB = 1 << 20


@dataclass(kw_only=True)
class Seen:
    """What one model's trainer and its two engines did, one engine after the other."""

    reports: list[SyncReport] = field(default_factory=list)
    shared: list[list[Generation]] = field(default_factory=list)
    """Of the sharing engine: at the start, and after each of two steps."""
    gaps: list[float] = field(default_factory=list)
    """Mean |log-prob of the sharing engine - of the trainer| with each of them."""
    cycled: list[list[Generation]] = field(default_factory=list)
    """After each of five sleeps."""
    asleep: list[int] = field(default_factory=list)
    """Bytes used on the device in each sleep."""
    copied: list[Generation] = field(default_factory=list)
    """Of the engine with copies, of the trainer's last weights."""
    awake_shared: int = 0
    awake_copied: int = 0
    weight_bytes: int = 0


def used() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return total - free


def generate(engine: VllmEngine) -> list[Generation]:
    """Answer one by one: which prompts share a batch depends on the clock, and how they round depends on that."""
    return [engine.generate([ids], SAMPLED, [row])[0] for row, ids in enumerate(PROMPTS)]


def packed_of(generations: list[Generation], device: torch.device) -> tuple[Any, torch.Tensor]:
    """Return the inputs of the trainer and the engine's log-probs, in the same order."""
    rollouts = [
        Rollout(
            prompt=Prompt(prompt_id=row, text="", token_ids=ids),
            sequence_id=row,
            response_ids=found.token_ids,
            rollout_logprobs=found.logprobs,
            is_truncated=True,
            text="",
        )
        for row, (ids, found) in enumerate(zip(PROMPTS, generations, strict=True))
    ]
    packed = pack(make_train_batch(rollouts), list(range(len(rollouts))), device)
    inputs = packed_inputs(packed) | {"index": packed.response_index, "targets": packed.targets, "temperature": 1.0}
    return inputs, torch.tensor([value for found in generations for value in found.logprobs], device=device)


def start(model: Path, world: World, **shared: Any) -> VllmEngine:
    config = RolloutConfig(kv_cache_memory_bytes=1 << 30, gpu_memory_utilization=0.4, max_num_seqs=16)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    return VllmEngine(str(model), config, dtype=dtype, max_model_len=128, can_sleep=True, seed=0, **shared)


def look(model: Path, world: World) -> Seen:
    seen = Seen()
    actor = load_actor(str(model), ModelsConfig(), world.device)
    alias_buffer = AliasBuffer(actor.model, world)
    seen.weight_bytes = sum(slot.nbytes for slot in alias_buffer.slots)
    engine = start(model, world, aliased=alias_buffer.export())
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-4), zero_stage=2, total_steps=9, world=world, alias_buffer=alias_buffer
    )
    sync = AliasSync(trainer, engine, SyncConfig(), world.device, Timeline(), alias_buffer=alias_buffer)
    for step in range(3):
        seen.reports.append(sync.sync())
        seen.shared.append(generate(engine))
        inputs, theirs = packed_of(seen.shared[-1], world.device)
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
    seen.awake_shared = used()
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
                parameter.data.normal_(std=0.5)  # they are zeros at first, which tells nothing
        policy.save_pretrained(model)
    yield look(model, join_world())
    torch.cuda.empty_cache()


def test_nothing_moves_and_all_is_proved(seen: Seen) -> None:
    assert [report.version for report in seen.reports] == [1, 2, 3]
    assert all(report.num_bytes == 0 for report in seen.reports)
    assert seen.reports[0].num_verified > 50 and seen.reports[1].num_verified == 8


def test_engine_follows_the_trainer(seen: Seen) -> None:
    assert seen.shared[0] != seen.shared[1] != seen.shared[2]
    assert all(gap < 0.02 for gap in seen.gaps), seen.gaps


def test_log_probs_are_those_of_copies_bit_for_bit(seen: Seen) -> None:
    assert seen.shared[-1] == seen.copied


def test_weights_outlive_sleep(seen: Seen) -> None:
    assert all(generations == seen.shared[-1] for generations in seen.cycled)


def test_memory_asleep_is_flat(seen: Seen) -> None:
    print("asleep, MiB:", [round(value / MIB) for value in seen.asleep])
    assert max(seen.asleep[1:]) - min(seen.asleep[1:]) <= 16 * MIB


def test_weights_exist_once(seen: Seen) -> None:
    saved = seen.awake_copied - seen.awake_shared
    print("saved, of the weights' bytes:", saved / seen.weight_bytes)
    assert saved > 0.9 * seen.weight_bytes
