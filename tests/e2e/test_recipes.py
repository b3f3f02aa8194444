"""Every recipe of launch/configs loads, and trains two steps on the tiny models with real DeepSpeed."""

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.config import Config
from hybrid_rl.validate import validate
from launch import colocated

CONFIGS = Path(__file__).parents[2] / "launch/configs"
RECIPES = sorted(path.stem for path in CONFIGS.glob("*.yaml") if path.stem not in ("demo", "smollm2_chain_sum"))


def load(name: str) -> Config:
    return validate(colocated.parse(["--config", str(CONFIGS / f"{name}.yaml")])[0])


def made_tiny(recipe: Config, tiny: Config) -> Config:
    """Return the recipe's own settings with the models, prompts and sizes of the tests."""

    def replaced(section: Any, names: tuple[str, ...], source: Any) -> Any:
        return dataclasses.replace(section, **{name: getattr(source, name) for name in names})

    sizes = ("engine", "rollout_batch_size", "max_response_tokens", "kv_cache_memory_bytes", "max_num_seqs")
    rollout = replaced(recipe.rollout, sizes, tiny.rollout)
    if recipe.rollout.keep_scores:  # the test's rule gives 0, 0.5 or 1, so that some groups fall out
        rollout = dataclasses.replace(rollout, keep_scores=(-0.5, 0.99), max_refills=2)
    update = replaced(recipe.update, ("mini_batch_size", "micro_batch_tokens"), tiny.update)
    return dataclasses.replace(
        tiny,
        models=dataclasses.replace(tiny.models, reward=None, lora=recipe.models.lora),
        rollout=rollout,
        reward=recipe.reward,
        advantage=recipe.advantage,
        update=dataclasses.replace(update, critic_warmup_steps=min(1, recipe.update.critic_warmup_steps)),
    )


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_trains_two_steps(name, make_config, train_here, tmp_path):
    recipe = load(name)
    rule = tmp_path / "rule.py"
    rule.write_text("def parity(prompt, response):\n    return sum(map(response.count, '02468')) % 3 / 2\n")
    config = made_tiny(recipe, make_config(tmp_path, checkpoint={"every_steps": 2, "export": True}))
    # A score that differs between the responses of an untrained model, which are never right.
    reward = dataclasses.replace(config.reward, functions=[f"{rule}:parity"])
    config = validate(dataclasses.replace(config, reward=reward))
    left = train_here(config)
    assert [row["step"] for row in left.metrics] == [1, 2]
    assert all(math.isfinite(value) for row in left.metrics for value in row.values())
    assert all(row["rollout/logprob_gap"] < 1e-4 for row in left.metrics)
    assert left.metrics[-1]["actor/grad_norm"] > 0
    before = AutoModelForCausalLM.from_pretrained(config.models.actor).state_dict()
    changed = {key for key, weight in left.weights["actor"].items() if not torch.equal(weight, before[key])}
    assert changed
    if config.models.lora.rank:
        assert all("_proj" in key for key in changed)
        assert (config.run_dir / "export_adapter/adapter_model.safetensors").exists()
    assert ("filter/batches" in left.metrics[0]) == (config.rollout.keep_scores is not None)
    assert ("kl" in left.metrics[0]) == config.has_reference
    assert ("critic/loss" in left.metrics[0]) == config.has_critic
