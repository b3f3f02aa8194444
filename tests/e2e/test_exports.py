"""The Hugging Face folders that a run writes every few steps and at its end."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hybrid_rl.config import Config, LoraConfig

EXPORTS = {"export": True, "export_every_steps": 1, "export_keep_last": 2, "export_critic": True, "every_steps": 1}


def names(config: Config) -> set[str]:
    return {path.name for path in (config.run_dir / "exports").iterdir()}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


def equal(a: Path, b: Path) -> bool:
    first, second = weights(a), weights(b)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_every_few_steps_actor_ema_and_critic_are_exported_and_a_run_goes_on_with_it(make_config, train_here, tmp_path):
    config = make_config(tmp_path, checkpoint=EXPORTS)
    config = replace(config, models=replace(config.models, ema_decay=0.5))
    train_here(config)
    parts = ("", "_ema", "_critic")
    assert names(config) == {f"step_{step:06d}{part}" for step in (1, 2) for part in parts}
    steps, run_dir = config.run_dir / "exports", config.run_dir
    for part in parts:
        assert equal(steps / f"step_000002{part}", run_dir / f"export{part}")
        assert not equal(steps / f"step_000001{part}", run_dir / f"export{part}")
    assert AutoModelForSequenceClassification.from_pretrained(steps / "step_000001_critic").config.num_labels == 1
    train_here(replace(config, run=replace(config.run, num_steps=3)))
    assert names(config) == {f"step_{step:06d}{part}" for step in (2, 3) for part in parts}


@pytest.mark.slow
def test_an_exported_critic_starts_another_run_and_an_adapter_fits_its_base(make_config, train_here, tmp_path):
    checkpoint = {**EXPORTS, "export": False, "export_every_steps": 2}
    config = make_config(tmp_path / "first", checkpoint=checkpoint)
    config = replace(config, models=replace(config.models, lora=LoraConfig(rank=2)))
    train_here(config)
    assert names(config) == {"step_000002", "step_000002_adapter", "step_000002_critic"}
    assert not (config.run_dir / "export").exists() and not (config.run_dir / "export_critic").exists()
    steps = config.run_dir / "exports"
    merged = AutoModelForCausalLM.from_pretrained(steps / "step_000002")
    base = AutoModelForCausalLM.from_pretrained(config.models.actor)
    adapted = PeftModel.from_pretrained(base, steps / "step_000002_adapter")
    ids = torch.tensor([[5, 9, 3, 8, 0]])
    with torch.no_grad():
        torch.testing.assert_close(merged(ids).logits, adapted(ids).logits, atol=1e-5, rtol=0)
    models = {"actor": str(steps / "step_000002"), "critic": str(steps / "step_000002_critic")}
    second = make_config(tmp_path / "second", run={"num_steps": 1}, models=models)
    assert [row["step"] for row in train_here(second).metrics] == [1]
