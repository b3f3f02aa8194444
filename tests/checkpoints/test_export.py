"""The export is an ordinary model folder."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GenerationConfig,
)

from hybrid_rl.checkpoints import export
from hybrid_rl.checkpoints.run_folder import tidy
from hybrid_rl.checkpoints.start import Start
from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.errors import FileWriteError
from hybrid_rl.models import exporting
from hybrid_rl.models.exporting import check_export
from hybrid_rl.models.loading import load_value_model
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.models.tokenizer import eos_token_ids, load_tokenizer
from tests.checkpoints.conftest import CPU, make_actor, weights
from tests.conftest import packed_rows
from tests.disks import a_full_disk
from tests.models.families import CONFIGS, FAMILIES, save_random


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_export_is_an_ordinary_model_folder(tmp_path, tiny, world, stage, tied, train_step):
    source = tmp_path / "source"
    model = AutoModelForCausalLM.from_pretrained(tiny / "policy", tie_word_embeddings=tied)
    if not tied:
        model.lm_head.weight = torch.nn.Parameter(torch.randn_like(model.lm_head.weight))
    model.generation_config = GenerationConfig(eos_token_id=[0, 4])
    model.save_pretrained(source)
    AutoTokenizer.from_pretrained(tiny / "policy").save_pretrained(source)
    tokenizer = load_tokenizer(str(source))
    actor = make_actor(source, world, stage)
    train_step(actor)
    folder = tmp_path / "export"
    export.export(folder, actor, tokenizer, world)
    export.export(folder, actor, tokenizer, world)  # over an older one
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []

    exported = AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = weights(actor)
    assert dict.fromkeys(expected, True) == {
        name: torch.equal(p, expected[name]) for name, p in exported.named_parameters()
    }
    is_tied = exported.lm_head.weight.data_ptr() == exported.model.embed_tokens.weight.data_ptr()
    assert is_tied == tied and exported.config.tie_word_embeddings == tied
    assert json.loads((folder / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]

    ids = torch.tensor([[5, 9, 3, 8, 0]])
    if stage == 1:
        with torch.no_grad():
            torch.testing.assert_close(exported(ids).logits, actor.model(ids).logits, atol=1e-6, rtol=0)
    assert load_tokenizer(str(folder)).get_vocab() == tokenizer.get_vocab()
    assert load_tokenizer(str(folder))("3+4=") == tokenizer("3+4=")
    assert eos_token_ids(str(folder), load_tokenizer(str(folder))) == [0, 4]


def test_only_a_better_actor_replaces_the_best_one(tmp_path, tiny, world, train_step):
    actor, tokenizer = make_actor(tiny / "policy", world, 1), load_tokenizer(str(tiny / "policy"))
    folder = tmp_path / "best"

    def offer(accuracy: float, number: int) -> bool:
        return export.export_best(folder, actor, tokenizer, world, accuracy=accuracy, step=number, run_id="a")

    assert offer(0.5, 1)
    kept = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    train_step(actor)
    assert not offer(0.5, 2) and not offer(0.25, 3)
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert offer(0.75, 4)
    better = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert not all(torch.equal(better[name], kept[name]) for name in kept)
    assert json.loads((folder / "best.json").read_text()) == {"step": 4, "accuracy": 0.75, "run_id": "a"}


@pytest.mark.parametrize(
    "generation",
    [
        {"temperature": 0.6, "top_p": 0.95, "eos_token_id": [0, 4]},  # invalid for transformers without do_sample
        {"do_sample": True, "temperature": 0.7, "own": 1},
        {"num_beams": 1, "length_penalty": 2.0},
    ],
)
def test_an_export_keeps_the_generation_config_of_the_folder(tmp_path, tiny, world, generation):
    source, folder = tmp_path / "source", tmp_path / "export"
    shutil.copytree(tiny / "policy", source)
    (source / "generation_config.json").write_text(json.dumps(generation))
    actor = make_actor(source, world, 1)
    for _ in range(2):
        export.export(folder, actor, load_tokenizer(str(source)), world)
        exported = json.loads((folder / "generation_config.json").read_text())
        assert {name: value for name, value in exported.items() if name != "transformers_version"} == generation
    assert sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(folder).parameters()) == sum(
        p.numel() for p in actor.model.parameters()
    )


def test_what_cannot_be_exported_is_found_before_a_model_loads(tiny):
    config = AutoConfig.from_pretrained(tiny / "policy")
    tokenizer = load_tokenizer(str(tiny / "policy"))
    check_export(config, tokenizer, where="models.actor = x")
    config.temperature = 0.5  # transformers saves no config with a parameter of generation
    with pytest.raises(ConfigError, match=r"x: config.json cannot be saved again, .*generation parameters"):
        check_export(config, tokenizer, where="models.actor = x")


def test_a_full_disk_is_named_by_the_export_and_the_earlier_one_stays(tmp_path, tiny, world, train_step):
    actor, tokenizer = make_actor(tiny / "policy", world, 1), load_tokenizer(str(tiny / "policy"))
    folder = tmp_path / "export"
    export.export(folder, actor, tokenizer, world)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train_step(actor)
    for num_bytes in (0, 5000):  # config.json does not fit; the weights do not
        with a_full_disk(num_bytes), pytest.raises(FileWriteError) as failed:
            export.export(folder, actor, tokenizer, world)
        assert str(failed.value).startswith(f"{folder} cannot be written (")
        assert "File too large" in str(failed.value)
        assert [path.name for path in tmp_path.iterdir()] == ["export"]
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    export.export(folder, actor, tokenizer, world)
    assert (folder / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_an_export_is_on_the_disk_before_it_replaces_the_earlier_one(tmp_path, tiny, world, monkeypatch):
    events: list[tuple[str, str]] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: events.append(("flush", os.readlink(f"/proc/self/fd/{fd}"))) or fsync(fd)
    )
    monkeypatch.setattr(os, "rename", lambda a, b: events.append(("rename", str(b))) or rename(a, b))
    actor, tokenizer = make_actor(tiny / "policy", world, 1), load_tokenizer(str(tiny / "policy"))
    for name in ("export", "best"):
        events.clear()
        folder = tmp_path / name
        if name == "export":
            export.export(folder, actor, tokenizer, world)
        else:
            export.export_best(folder, actor, tokenizer, world, accuracy=0.5, step=1, run_id="a")
        is_there = events.index(("rename", str(folder)))
        partial = folder.with_name(f".partial-{name}")
        expected = {("flush", str(partial / path.name)) for path in folder.iterdir()} | {("flush", str(partial))}
        assert len(expected) > 4 and expected <= set(events[:is_there])
        assert ("flush", str(tmp_path)) in events[is_there:]


@pytest.mark.parametrize("family", ["llama", "qwen3-moe"])
def test_files_of_bounded_size_hold_what_the_folder_of_the_model_holds(tmp_path, tiny, world, family, monkeypatch):
    """Among it the experts, which the model has in one tensor per projection and the folder one by one."""
    source = save_random(AutoModelForCausalLM, (CONFIGS | FAMILIES)[family](), tmp_path / "source", tiny / "policy")
    actor, limit = make_actor(source, world, 3), 8_000
    monkeypatch.setattr(exporting, "FILE_BYTES", limit)
    folder = tmp_path / "export"
    export.export(folder, actor, load_tokenizer(str(source)), world)
    files = sorted(folder.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{n:05d}-of-{len(files):05d}.safetensors" for n in range(1, len(files) + 1)
    ]
    places = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    found, expected = {}, load_file(source / "model.safetensors")
    for file in files:
        tensors = load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= limit
        assert all(places[name] == file.name for name in tensors)
        found |= tensors
    assert len(files) > 3 and found.keys() == expected.keys() == places.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(loaded[name], tensor) for name, tensor in weights(actor).items())


@pytest.mark.parametrize("stage", [1, 3])
def test_an_exported_critic_loads_as_a_critic_and_in_transformers_with_its_head(tmp_path, tiny, world, stage):
    module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    critic = DeepSpeedEngine(module, OptimizerConfig(lr=1e-2), zero_stage=stage, total_steps=9, world=world)
    (packed,) = packed_rows([[5, 9, 3, 8, 0]])
    inputs = packed_inputs(packed) | {"index": packed.response_index}
    critic.backward(critic.forward(**inputs).sum(), is_last=True)
    critic.step()
    folder = tmp_path / "export_critic"
    export.export(folder, critic, load_tokenizer(str(tiny / "policy")), world)
    expected, before = weights(critic), AutoModelForSequenceClassification.from_pretrained(tiny / "reward")
    assert not torch.equal(expected["score.weight"], before.score.weight)
    loaded = load_value_model(str(folder), ModelsConfig(), CPU, field="models.critic")
    theirs = AutoModelForSequenceClassification.from_pretrained(folder)
    for model in (loaded.model, theirs):
        assert {name: torch.equal(p, expected[name]) for name, p in model.named_parameters()} == dict.fromkeys(
            expected, True
        )
    with torch.no_grad():
        torch.testing.assert_close(loaded(**inputs), critic.forward(**inputs), atol=1e-6, rtol=0)
    assert theirs.config.num_labels == 1 and load_tokenizer(str(folder))("3+4=")["input_ids"]


def test_exports_of_the_last_steps_stay_with_all_their_parts(tmp_path):
    names = [f"step_{step:06d}{part}" for step in (2, 4, 6, 8) for part in ("", "_ema", "_critic")]
    for name in [*names, "mine", "step_000004_notes"]:
        (tmp_path / "exports" / name).mkdir(parents=True)
    export.delete_old(tmp_path, 6, keep_last=2)
    left = sorted(path.name for path in (tmp_path / "exports").iterdir())
    assert left == ["mine", *sorted([*names[3:], "step_000004_notes"])]
    export.delete_old(tmp_path, 8, keep_last=1)
    assert sorted(path.name for path in (tmp_path / "exports").glob("step_000008*")) == sorted(names[-3:])
    assert not list((tmp_path / "exports").glob("step_000006*"))


def test_a_start_removes_half_an_export_and_brings_back_one_that_was_about_to_be_replaced(tmp_path):
    for name in (".partial-step_000004", ".replaced-step_000002", ".replaced-step_000003", "step_000003"):
        (tmp_path / "exports" / name).mkdir(parents=True)
        (tmp_path / "exports" / name / "name").write_text(name)
    tidy(tmp_path, Start(run_id="a"))
    found = {path.name: (path / "name").read_text() for path in (tmp_path / "exports").iterdir()}
    assert found == {"step_000002": ".replaced-step_000002", "step_000003": "step_000003"}


def main() -> None:
    """Export actor and critic of two ranks under ZeRO-3; keep the folder and the weights as they are gathered."""
    folder, tiny = Path(sys.argv[1]), Path(sys.argv[2])
    world, tokenizer = join_world(), load_tokenizer(str(tiny / "policy"))
    module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    critic = DeepSpeedEngine(module, OptimizerConfig(), zero_stage=3, total_steps=9, world=world)
    engines = {"actor": make_actor(tiny / "policy", world, 3), "critic": critic}
    for name, engine in engines.items():
        export.export(folder / name, engine, tokenizer, world)
    kept = {"folder": str(folder), **{name: weights(engine) for name, engine in engines.items()}}
    torch.save(kept, folder / f"rank{world.rank}.pt")


def test_two_ranks_export_sharded_weights(on_two_ranks):
    kept = on_two_ranks(__file__)[0]
    for name, model_class in (("actor", AutoModelForCausalLM), ("critic", AutoModelForSequenceClassification)):
        found = dict(model_class.from_pretrained(Path(kept["folder"]) / name).named_parameters())
        assert found.keys() == kept[name].keys() and all(torch.equal(found[n], kept[name][n]) for n in found)


if __name__ == "__main__":
    main()
