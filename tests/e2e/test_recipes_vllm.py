"""Every recipe of launch/configs trains two steps on real vLLM and DeepSpeed; one engine serves all of them in turn."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import Rollout, TrainBatch
from hybrid_rl.config import Config, ConfigError
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.examples.transcripts import EXAMPLES
from hybrid_rl.monitoring.recorder import Recorder
from hybrid_rl.validate import validate
from launch.colocated import parse

CONFIGS = Path(__file__).parents[2] / "launch" / "configs"
OTHERS = {"demo", *EXAMPLES}
RECIPES = sorted(p.stem for p in CONFIGS.glob("*.yaml") if p.stem not in OTHERS and not p.stem.startswith("smollm2"))
# An untrained model is never right; this splits the responses of nearly every group.
RULE = "def rule(prompt, response):\n    return float(sum(map(response.count, '02468ace')) % 2)\n"


@dataclass(kw_only=True)
class Trained:
    """A recipe after two steps."""

    config: Config
    rows: list[dict[str, float]]
    before: dict[str, Tensor]
    after: dict[str, Tensor]
    batches: list[TrainBatch] = field(default_factory=list)

    @property
    def changed(self) -> set[str]:
        return {name for name, weight in self.after.items() if not torch.equal(weight, self.before[name])}


def read(name: str) -> Config:
    return validate(parse(["--config", str(CONFIGS / f"{name}.yaml")])[0])


def shrink(recipe: Config, tiny: Config, rule: str) -> Config:
    """Return what defines a recipe, with the models, prompts and sizes of the tests."""
    group_size = min(recipe.rollout.group_size, 4)
    num_responses = tiny.rollout.rollout_batch_size * group_size
    num_updates = recipe.responses_per_step // recipe.update.mini_batch_size
    lora = replace(recipe.models.lora, rank=min(recipe.models.lora.rank, 4))
    update, sampling = recipe.update, recipe.rollout
    return validate(
        replace(
            tiny,
            models=replace(tiny.models, lora=lora, reward=recipe.models.reward and tiny.models.reward),
            rollout=replace(
                tiny.rollout,
                group_size=group_size,
                dynamic_filtering_reward_range=sampling.dynamic_filtering_reward_range,
                dynamic_filtering_max_retries=sampling.dynamic_filtering_max_retries,
            ),
            reward=replace(recipe.reward, functions=[rule], weights=None),
            advantage=recipe.advantage,
            update=replace(
                update,
                mini_batch_size=num_responses // num_updates,
                micro_batch_tokens=tiny.update.micro_batch_tokens,
                critic_warmup_steps=min(update.critic_warmup_steps, 1),
                actor=replace(update.actor, lr=1e-3),
                critic=replace(update.critic, lr=1e-3),
            ),
        )
    )


@pytest.fixture(scope="module")
def trained(
    lent_engine: VllmEngine, make_config: Callable[..., Config], train_here: Callable[[Config], Any], tmp_path_factory
) -> Callable[[str], Trained]:
    """Return a recipe's two steps, trained when they are first asked for."""
    done: dict[str, Trained] = {}

    def train(name: str) -> Trained:
        if name in done:
            return done[name]
        folder = tmp_path_factory.mktemp(name)
        (folder / "rule.py").write_text(RULE)
        tiny = make_config(
            folder,
            run={"eval_every_steps": 0},
            rollout={"engine": "vllm"},
            sync={"mode": "copy"},
            checkpoint={"every_steps": 2, "export": True},
        )
        config = shrink(read(name), tiny, f"{folder / 'rule.py'}:rule")
        batches: list[TrainBatch] = []
        write = Recorder.step

        def watched(
            self: Recorder, step: int, rollouts: list[Rollout], batch: TrainBatch, *metrics: Any, **named: Any
        ) -> Any:
            batches.append(batch)
            return write(self, step, rollouts, batch, *metrics, **named)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recorder, "step", watched)
            left = train_here(config)
        before = dict(AutoModelForCausalLM.from_pretrained(config.models.actor).state_dict())
        done[name] = Trained(
            config=config, rows=left.metrics, before=before, after=left.weights["actor"], batches=batches
        )
        return done[name]

    return train


def test_there_are_recipes():
    assert {"grpo", "dapo", "gspo", "remax", "vapo", "grpo_lora"} <= set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_says_which_recipe_it_is(name: str):
    config = read(name)
    assert (CONFIGS / f"{name}.yaml").read_text().startswith("# ")
    assert config.run.name == name and config.models.actor == "demo:policy" and config.prompts.path == "demo:train"


def test_cispo_may_go_without_a_lower_bound():
    cispo, grpo = read("cispo"), read("grpo")
    assert validate(replace(cispo, update=replace(cispo.update, clip_low=1.0))).update.clip_low == 1.0
    with pytest.raises(ConfigError, match=r"update\.clip_low = 1\.0: must be below 1"):
        validate(replace(grpo, update=replace(grpo.update, clip_low=1.0)))


@pytest.mark.parametrize("name", RECIPES)
def test_trains_two_steps(trained: Callable[[str], Trained], name: str):
    run = trained(name)
    assert [row["step"] for row in run.rows] == [1, 2]
    assert all(math.isfinite(value) for row in run.rows for value in row.values())
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in run.rows)
    assert all(batch.advantages is not None and batch.advantages.abs().max() > 0 for batch in run.batches)
    assert run.after.keys() <= run.before.keys()
    assert run.changed and (run.config.models.lora.rank or run.changed == run.after.keys())
    assert ("kl" in run.rows[0]) == run.config.has_reference
    assert ("critic/loss" in run.rows[0]) == run.config.has_critic
    exported = AutoModelForCausalLM.from_pretrained(run.config.run_dir / "export").state_dict()
    assert all(torch.equal(exported[name], weight) for name, weight in run.after.items())


def test_dapo_trains_on_groups_that_differ(trained: Callable[[str], Trained]):
    run = trained("dapo")
    assert all(row["filter/batches"] >= 1 and row["filter/groups"] >= 1 for row in run.rows)
    for row, batch in zip(run.rows, run.batches, strict=True):
        assert batch.advantages is not None
        groups = batch.group_ids.unique()
        assert len(groups) == row["filter/groups"]
        assert all(batch.advantages[batch.group_ids == group].abs().max() > 0 for group in groups)


def test_gspo_clips_whole_sequences(trained: Callable[[str], Trained]):
    """Its bounds are so close that the second update of a step leaves them, more often than GRPO's."""
    for gspo, grpo in zip(trained("gspo").rows, trained("grpo").rows, strict=True):
        assert grpo["actor/clip_fraction"] < gspo["actor/clip_fraction"] < 1


def test_remax_compares_with_the_greedy_response(trained: Callable[[str], Trained]):
    """The first token's advantage is the whole return less the baseline of its prompt."""
    run = trained("remax")
    coef = run.config.advantage.kl_coef
    seen = set()
    for batch in run.batches:
        assert batch.baselines is not None and batch.rewards is not None and batch.advantages is not None
        kl = torch.zeros(len(batch))
        if run.config.has_reference:
            assert batch.old_logprobs is not None and batch.ref_logprobs is not None
            kl = torch.where(batch.response_mask, batch.old_logprobs - batch.ref_logprobs, 0).sum(1)
        first = batch.advantages[torch.arange(len(batch)), batch.response_mask.int().argmax(1)]
        torch.testing.assert_close(first, batch.rewards - coef * kl - batch.baselines, rtol=1e-4, atol=1e-5)
        seen |= set(batch.baselines.tolist())
    assert len(seen) > 1


def test_vapo_leaves_the_actor_alone_while_its_critic_warms_up(trained: Callable[[str], Trained]):
    first, second = trained("vapo").rows
    assert "actor/loss" not in first and second["actor/grad_norm"] > 0
    assert first["critic/grad_norm"] > 0 and second["critic/grad_norm"] > 0


def test_lora_changes_linear_layers_alone(trained: Callable[[str], Trained]):
    run = trained("grpo_lora")
    linear = {name for name in run.before if name.endswith("_proj.weight")}
    assert run.changed == linear and len(linear) == 14
    assert (run.config.run_dir / "export_adapter" / "adapter_model.safetensors").exists()
