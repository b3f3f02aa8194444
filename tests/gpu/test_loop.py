"""The loop on one GPU: engine and trainer agree after every weight sync, and memory use repeats every step."""

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from hybrid_rl.config import (
    AdvantageConfig,
    CheckpointConfig,
    Config,
    MemoryConfig,
    ModelsConfig,
    OptimizerConfig,
    PromptsConfig,
    RolloutConfig,
    RunConfig,
    UpdateConfig,
)
from hybrid_rl.engines import Sampling
from hybrid_rl.memory.residency import Phase
from hybrid_rl.validate import validate

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

GREEDY = Sampling(temperature=0.0, max_tokens=32, stop_token_ids=(0,))
SAMPLED = Sampling(temperature=1.0, max_tokens=32, stop_token_ids=(0,))
MIB = 1 << 20


def make_config(small: Path, run_dir: Path, swap: Literal["vmm", "deepspeed"]) -> Config:
    return validate(
        Config(
            run=RunConfig(name="gpu", dir=str(run_dir), num_steps=6, eval_every_steps=0, resume="never"),
            models=ModelsConfig(actor=str(small / "policy"), reward=str(small / "reward")),
            prompts=PromptsConfig(path=str(small / "prompts.jsonl"), answer_column=None, max_prompt_tokens=64),
            rollout=RolloutConfig(
                rollout_batch_size=64, max_response_tokens=64, kv_cache_memory_bytes=2 << 30, enforce_eager=True
            ),
            advantage=AdvantageConfig(kl_coef=0.05),
            update=UpdateConfig(
                mini_batch_size=32,
                micro_batch_tokens=4096,
                zero_stage=2,
                actor=OptimizerConfig(lr=1e-4),
                critic=OptimizerConfig(lr=1e-4),
            ),
            memory=MemoryConfig(swap=swap),
            checkpoint=CheckpointConfig(every_steps=0),
        )
    )


@pytest.fixture(scope="module", params=["vmm", "deepspeed"])
def finished(
    small: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, object]:
    """The folder of a run of six steps, and responses of its engine after the last weight sync."""
    from hybrid_rl.build import build
    from hybrid_rl.trainer import loop

    config = make_config(small, tmp_path_factory.mktemp("runs"), request.param)
    run = build(config)
    prompts = [prompt.token_ids for prompt in run.data.loader.next_batch()[:16]]
    try:
        with run.recorder:
            loop(run)
        with run.memory.phase(Phase.ROLLOUT):
            # One at a time: rounding depends on the batch, and vLLM batches requests by arrival time.
            greedy = [run.engine.generate([ids], GREEDY, None)[0] for ids in prompts]
            sampled = [run.engine.generate([ids], SAMPLED, [i])[0] for i, ids in enumerate(prompts)]
    finally:
        run.close()
    del run
    torch.cuda.empty_cache()
    return {"dir": config.run_dir, "prompts": prompts, "greedy": greedy, "sampled": sampled}


def test_the_engine_equals_a_fresh_one_loaded_from_the_export(finished: dict, small: Path) -> None:
    from hybrid_rl.engines.vllm.environment import engine_environment

    with engine_environment():
        import vllm

        fresh = vllm.LLM(
            str(finished["dir"] / "export"),
            dtype="bfloat16",
            max_model_len=128,
            enforce_eager=True,
            gpu_memory_utilization=0.3,
            logprobs_mode="processed_logprobs",
        )
    requests = [{"prompt_token_ids": ids} for ids in finished["prompts"]]
    for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
        parameters = [
            vllm.SamplingParams(temperature=temperature, max_tokens=32, stop_token_ids=[0], seed=i, logprobs=0)
            for i in range(len(requests))
        ]
        answers = [fresh.generate([r], [p], use_tqdm=False)[0] for r, p in zip(requests, parameters, strict=True)]
        outputs = [answer.outputs[0] for answer in answers]
        assert [list(o.token_ids) for o in outputs] == [g.token_ids for g in finished[name]]
        if temperature:
            theirs = [[entry[t].logprob for t, entry in zip(o.token_ids, o.logprobs, strict=True)] for o in outputs]
            assert theirs == [g.logprobs for g in finished[name]]
    fresh.llm_engine.engine_core.shutdown()


def metrics(finished: dict) -> list[dict[str, float]]:
    return [json.loads(line) for line in (finished["dir"] / "metrics.jsonl").read_text().splitlines()]


def test_engine_and_trainer_agree_in_every_step(finished: dict) -> None:
    rows = metrics(finished)
    assert len(rows) == 6
    assert all(row["rollout/logprob_gap"] < 0.02 for row in rows), [row["rollout/logprob_gap"] for row in rows]
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize("phase", ["sync", "rollout", "score", "update_critic", "update_actor"])
def test_memory_use_is_the_same_in_every_step(finished: dict, phase: str) -> None:
    used = [round(row[f"memory/{phase}_bytes"] / MIB) for row in metrics(finished)]
    print(phase, used, "MiB")
    assert max(used[2:]) - min(used[2:]) <= 64, used


def test_releases_free_device_memory(finished: dict, engine_bytes) -> None:
    held = engine_bytes(finished["dir"])
    assert min(held) < max(held) - 1900 * MIB  # the KV cache of 2 GiB comes and goes
    events = json.loads((finished["dir"] / "timeline.json").read_text())["traceEvents"]
    moved = [e["args"] for e in events if "actor_optimizer" in e.get("name", "")]  # exchanges count too
    assert len(moved) >= 10 and all(args["bytes"] > 1 << 30 for args in moved)
    print("actor optimizer, GB/s:", [args["GB_per_s"] for args in moved])
