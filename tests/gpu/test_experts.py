"""A mixture of experts in bfloat16 on a GPU: aliased weights, and routing replay lowers the gap of log-probs."""

import os
import time
from pathlib import Path

import pytest
import torch
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

from hybrid_rl.batch import TrainBatch, make_train_batch, pack
from hybrid_rl.config import ModelsConfig, OptimizerConfig, RolloutConfig, SyncConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines import Generation, Sampling
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import actor_inputs
from hybrid_rl.monitoring.timeline import Timeline
from hybrid_rl.weights.alias import AliasBuffer
from hybrid_rl.weights.sync import AliasSync
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

PROMPTS = [[(37 * row + 11 * k) % 3_900 + 1 for k in range(16 + row)] for row in range(32)]
SAMPLED = Sampling(temperature=1.0, max_tokens=96, stop_token_ids=())


def save_mixture(folder: Path) -> None:
    """Save a random mixture of 1.0 billion parameters with 64 experts, 8 of them per token."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=4096,
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=10,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        num_experts=64,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
    )
    with torch.device("cuda"):
        model = Qwen3MoeForCausalLM(config).to(torch.bfloat16)
    for name, parameter in model.named_parameters():
        if "gate.weight" in name or "lm_head" in name:
            parameter.data.mul_(4)
    model.save_pretrained(folder)


def batch_of(generations: list[Generation]) -> TrainBatch:
    rollouts = []
    for row, (ids, found) in enumerate(zip(PROMPTS, generations, strict=True)):
        rollout = make_rollout(ids, found.token_ids, prompt_id=row, rollout_logprobs=found.logprobs, is_truncated=True)
        object.__setattr__(rollout, "routed_experts", found.routed_experts)
        rollouts.append(rollout)
    return make_train_batch(rollouts)


def gap(trainer: DeepSpeedEngine, batch: TrainBatch, device: torch.device) -> float:
    """Return the mean |engine - trainer| log-prob of the sampled tokens."""
    packed = pack(batch, list(range(len(batch))), device)
    with torch.no_grad():
        ours = trainer.forward(**actor_inputs(packed), temperature=1.0)[0]
    return float((ours - packed.gather(batch.rollout_logprobs)).abs().mean())


def test_replayed_experts_lower_the_gap_and_train(tmp_path: Path) -> None:
    world = join_world()
    save_mixture(tmp_path)
    actor = load_actor(str(tmp_path), ModelsConfig(), world.device)
    buffer = AliasBuffer(dict(actor.model.named_parameters()), world)
    config = RolloutConfig(
        kv_cache_memory_bytes=1 << 30,
        gpu_memory_utilization=0.4,
        max_num_seqs=32,
        enforce_eager=True,
        routing_replay=True,
    )
    start = time.perf_counter()
    engine = VllmEngine(
        str(tmp_path),
        config,
        dtype=torch.bfloat16,
        max_model_len=256,
        can_sleep=False,
        seed=0,
        aliased=buffer.export(),
    )
    trainer = DeepSpeedEngine(
        actor, OptimizerConfig(lr=1e-5), zero_stage=2, total_steps=9, world=world, alias_buffer=buffer
    )
    sync = AliasSync(trainer, engine, SyncConfig(), world.device, Timeline(), alias_buffer=buffer)
    lines = [f"parameters {sum(slot.nbytes for slot in buffer.slots) // 2}, start {time.perf_counter() - start:.1f} s"]
    try:
        for step in range(3):
            begin = time.perf_counter()
            report = sync.sync()
            sync_ms = 1e3 * (time.perf_counter() - begin)
            batch = batch_of(engine.generate(PROMPTS, SAMPLED, list(range(len(PROMPTS)))))
            assert report.num_bytes == 0 and batch.routed_experts is not None
            replayed = gap(trainer, batch, world.device)
            free = gap(trainer, batch.with_fields(routed_experts=None), world.device)
            lines.append(f"step {step}: gap {free:.5f}, with replay {replayed:.5f}, sync {sync_ms:.1f} ms")
            assert replayed < 0.6 * free and replayed < 0.05
            packed = pack(batch, list(range(len(batch))), world.device)
            logprobs, _ = trainer.forward(**actor_inputs(packed), temperature=1.0, measures_balance=True)
            balance = trainer.module.balance
            trainer.backward(-logprobs.mean() + 0.01 * balance, is_last=True)
            norm = trainer.step()
            lines.append(f"step {step}: balance {float(balance):.3f}, gradient norm {norm:.3f}")
            assert 1.0 <= float(balance) < 8 and 0 < norm < float("inf")
    finally:
        engine.close()
        print("\n".join(lines))
        if "OUT" in os.environ:
            (Path(os.environ["OUT"]) / "experts.log").write_text("\n".join(lines) + "\n")
