"""Mixtures of experts train with real vLLM and DeepSpeed, and engine and trainer agree on the log-probs."""

import pytest
from transformers import AutoModelForCausalLM

from hybrid_rl import trainer
from hybrid_rl.batch import TrainBatch, make_train_batch
from hybrid_rl.build import build
from hybrid_rl.config import Config
from hybrid_rl.memory.residency import Phase
from hybrid_rl.run import Run
from hybrid_rl.stages import packing
from hybrid_rl.steps.logprobs import token_logprobs
from hybrid_rl.steps.rollout import collect_rollouts
from tests.models.families import FAMILIES, save_random


@pytest.fixture
def make_mixture(make_config, tiny, tmp_path):
    """Return the settings of a GRPO run of a random mixture of experts; keywords replace fields of a section."""

    def make(family: str, num_experts: int | None = None, **sections: dict) -> Config:
        config = FAMILIES[family]()
        if num_experts is not None:
            config.num_experts, config.num_experts_per_tok = num_experts, num_experts // 8
        config.hidden_size = 64  # vLLM on a CPU has no heads of less than 32 dimensions
        if "qwen3" in family:
            config.head_dim = 32
        save_random(AutoModelForCausalLM, config, tmp_path / family, tiny / "policy")
        score = "def letters(prompt, response):\n    return float(sum(map(ord, response)) % 7)\n"
        (tmp_path / "rewards.py").write_text(score)
        settings = {
            "models": {"actor": str(tmp_path / family), "reward": None},
            "rollout": {"engine": "vllm"},
            "reward": {"functions": [f"{tmp_path / 'rewards.py'}:letters"]},
            "advantage": {"estimator": "grpo", "kl_coef": 0.0},
        }
        merged = {name: settings.get(name, {}) | sections.get(name, {}) for name in settings | sections}
        return make_config(tmp_path, **merged)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    "family, mode, stage",
    [("qwen3-moe", "alias", 2), ("olmoe", "copy", 3), ("deepseek2", "alias", 2), ("deepseek3", "copy", 2)],
)
def test_engine_and_trainer_agree(make_mixture, train_here, read_run, family, mode, stage):
    config = make_mixture(family, sync={"mode": mode}, update={"zero_stage": stage})
    train_here(config)
    rows = read_run(config).metrics
    print(family, [row["rollout/logprob_gap"] for row in rows])
    assert len(rows) == 2 and all(row["rollout/logprob_gap"] < 1e-5 for row in rows)
    assert all(row["actor/grad_norm"] > 0 for row in rows)


def gap(run: Run, batch: TrainBatch) -> float:
    """Return the mean |engine - trainer| log-prob of a batch."""
    ours = token_logprobs(run.actor.forward, batch, packing(run), temperature=1.0)
    return float((ours - batch.rollout_logprobs)[batch.response_mask].abs().mean())


def test_replayed_experts_lower_the_gap_in_bfloat16(make_mixture, read_run):
    config = make_mixture(
        "qwen3-moe",
        num_experts=32,
        models={"dtype": "bfloat16"},
        rollout={"routing_replay": True, "engine": "hf", "max_response_tokens": 24, "max_logprob_gap": 1.0},
        update={"zero_stage": 2, "router_aux_loss_coef": 0.01},
    )
    run = build(config)
    try:
        with run.recorder:
            trainer.loop(run)
        with run.memory.phase(Phase.ROLLOUT):
            rollouts = collect_rollouts(
                run.data.eval_prompts * 4,
                run.engine,
                run.data.tokenizer,
                config.rollout,
                stop_token_ids=run.data.stop_token_ids,
                run_seed=0,
                step=9,
            )
        batch = make_train_batch(rollouts)
        assert batch.routed_experts is not None
        replayed, free = gap(run, batch), gap(run, batch.with_fields(routed_experts=None))
        print("gap with replay", replayed, "without", free, "tokens", int(batch.response_mask.sum()))
        assert replayed < free
    finally:
        run.close()
    rows = read_run(config).metrics
    assert all(1 <= row["actor/router_balance"] < 8 for row in rows)
