"""A checkpoint is whole or absent, brings everything back, and the export is an ordinary model folder."""

import json
import os
import random
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from hybrid_rl.checkpoints import export
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.snapshot import Parts, Snapshot
from hybrid_rl.config import ConfigError, ModelsConfig, OptimizerConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.tokenizer import eos_token_ids, load_tokenizer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def world() -> World:
    return join_world()


def make_actor(folder: Path, world: World, stage: int = 2) -> DeepSpeedEngine:
    actor = load_actor(str(folder), ModelsConfig(), CPU)
    return DeepSpeedEngine(actor, OptimizerConfig(lr=1e-2), zero_stage=stage, total_steps=9, world=world)


@pytest.fixture(scope="module")
def engines(tiny: Path, world: World) -> dict[str, DeepSpeedEngine]:
    module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    critic = DeepSpeedEngine(module, OptimizerConfig(), zero_stage=2, total_steps=9, world=world)
    return {"actor": make_actor(tiny / "policy", world), "critic": critic}


def weights(trainer: DeepSpeedEngine) -> dict[str, torch.Tensor]:
    with trainer.gathered([name for name, _, _ in trainer.named_shapes()]) as tensors:
        return {name: t.clone() for name, t in tensors.items()}


def save(run_dir: Path, number: int, engines, world: World, *, keep_last: int = 2, **state) -> Path:
    saver = checkpoint.Saver(run_dir, keep_last=keep_last, world=world)
    for name, engine in engines.items():
        saver.take(name, engine)
    saver.start(number, {"loader": number, **state})
    saver.wait()
    return run_dir / "checkpoints" / checkpoint.checkpoint_name(number)


def steps_on_disk(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_nothing_saved(tmp_path):
    assert checkpoint.latest(tmp_path) is None


def test_state_comes_back(tmp_path, engines, world):
    folder = save(tmp_path, 4, engines, world, note="n")
    assert folder == checkpoint.latest(tmp_path) == tmp_path / "checkpoints" / "step_000004"
    assert checkpoint.read_state(folder) == {"step": 4, "world_size": 1, "loader": 4, "note": "n"}
    assert steps_on_disk(tmp_path) == ["step_000004"]
    assert {path.name for path in folder.iterdir()} == {"actor", "critic", "rng_rank0.pt", "state.json"}


def test_weights_come_back(tmp_path, tiny, engines, world, train_step):
    actor = make_actor(tiny / "policy", world)
    train_step(actor)
    before = weights(actor)
    folder = save(tmp_path, 1, {**engines, "actor": actor}, world)
    train_step(actor)
    assert not torch.equal(weights(actor)["model.norm.weight"], before["model.norm.weight"])
    actor.load(folder / "actor")
    after = weights(actor)
    assert all(torch.equal(after[name], before[name]) for name in before)


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_random_generators_come_back(tmp_path, engines, world):
    folder = save(tmp_path, 1, engines, world)
    expected = [draw() for _ in range(3)]
    for _ in range(5):
        draw()
    checkpoint.load_rng(folder, world)
    assert [draw() for _ in range(3)] == expected


def test_old_checkpoints_go(tmp_path, engines, world):
    for number in (1, 2, 3, 10):
        save(tmp_path, number, engines, world, keep_last=2)
    assert steps_on_disk(tmp_path) == ["step_000003", "step_000010"]
    save(tmp_path, 11, engines, world, keep_last=1)
    assert steps_on_disk(tmp_path) == ["step_000011"]
    assert checkpoint.latest(tmp_path).name == "step_000011"


@pytest.mark.parametrize("keep_last", [1, 2])
def test_a_new_run_in_an_old_folder_keeps_its_own_checkpoint(tmp_path, engines, world, keep_last):
    """run.resume = never starts at step 1 again, beside checkpoints with higher numbers."""
    for number in (50, 60):
        save(tmp_path, number, engines, world)
    folder = save(tmp_path, 4, engines, world, keep_last=keep_last)
    assert checkpoint.latest(tmp_path) == folder
    assert checkpoint.read_state(folder)["step"] == 4
    assert len(steps_on_disk(tmp_path)) <= keep_last


def test_same_step_again_replaces_it(tmp_path, engines, world):
    save(tmp_path, 3, engines, world, note="old")
    folder = save(tmp_path, 3, engines, world, note="new")
    assert checkpoint.read_state(folder)["note"] == "new"
    assert steps_on_disk(tmp_path) == ["step_000003"]


class Killed(BaseException):
    """Stands for the end of the process at this place."""


FILE_OPERATIONS = [(os, "replace"), (shutil, "rmtree"), (torch, "save"), (Path, "write_text"), (Path, "mkdir")]


@pytest.mark.parametrize("first_step", [1, 2], ids=["another step", "the same step"])
def test_a_kill_anywhere_leaves_a_checkpoint_in_force(tmp_path, engines, world, monkeypatch, first_step):
    """Kill before the n-th file operation of a save, for every n, and look at what a new process would find."""
    saved: list[str] = []
    for count in range(200):
        run_dir = tmp_path / str(count)
        save(run_dir, first_step, engines, world, note="first")
        remaining = count

        def counted(original, *args, **kwargs):
            nonlocal remaining
            if remaining == 0:
                raise Killed
            remaining -= 1
            return original(*args, **kwargs)

        with monkeypatch.context() as patch:
            for owner, name in FILE_OPERATIONS:
                original = getattr(owner, name)
                patch.setattr(owner, name, lambda *a, _original=original, **k: counted(_original, *a, **k))
            try:
                save(run_dir, 2, engines, world, keep_last=1, note="second")
                killed = False
            except Killed:
                killed = True
        found = checkpoint.latest(run_dir)
        assert found is not None, f"killed before file operation {count}: no checkpoint is in force"
        saved.append(checkpoint.read_state(found)["note"])
        for name, engine in engines.items():
            engine.load(found / name)
        save(run_dir, 5, engines, world, keep_last=1)  # and the next save works, leftovers or not
        assert checkpoint.latest(run_dir).name == "step_000005" and steps_on_disk(run_dir)[-1] == "step_000005"
        shutil.rmtree(run_dir)
        if not killed:
            break
    assert not killed and len(saved) > 8
    assert saved == sorted(saved) and set(saved) == {"first", "second"}  # the old one up to some moment, then the new


def test_kill_while_a_part_is_written(tmp_path, engines, world, monkeypatch):
    save(tmp_path, 1, engines, world)
    write = Snapshot.write

    def killed(self: Snapshot, folder: Path, rank: int) -> None:
        if folder.name == "critic":
            folder.mkdir(parents=True)
            (folder / "part_00007.safetensors").write_text("half")
            raise Killed
        write(self, folder, rank)

    monkeypatch.setattr(Snapshot, "write", killed)
    with pytest.raises(Killed):
        save(tmp_path, 2, engines, world)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path).name == "step_000001"
    assert checkpoint.read_state(checkpoint.latest(tmp_path))["step"] == 1
    folder = save(tmp_path, 2, engines, world)
    assert not list(folder.rglob("part_00007*")) and steps_on_disk(tmp_path) == ["step_000001", "step_000002"]


class Slow(Snapshot):
    """Is written when it is told to."""

    may_go = threading.Event()

    def write(self, folder: Path, rank: int) -> None:
        assert self.may_go.wait(timeout=60)
        super().write(folder, rank)


class SlowPart:
    def __init__(self, engine: DeepSpeedEngine) -> None:
        self.engine = engine

    def snapshot(self) -> Slow:
        taken = self.engine.snapshot()
        return Slow(tensors=taken.tensors, notes=taken.notes)


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path, tiny, world, train_step):
    actor = make_actor(tiny / "policy", world)
    train_step(actor)
    before = weights(actor)
    saver = checkpoint.Saver(tmp_path, keep_last=2, world=world)
    saver.take("actor", SlowPart(actor))
    saver.start(1, {})
    train_step(actor)
    saver.surface()
    assert checkpoint.latest(tmp_path) is None
    Slow.may_go.set()
    saver.wait()
    actor.load(checkpoint.latest(tmp_path) / "actor")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())


def test_what_cannot_be_written_is_an_error_of_the_run(tmp_path, engines, world):
    saver = checkpoint.Saver(tmp_path, keep_last=2, world=world)
    saver.take("actor", engines["actor"])
    (tmp_path / "checkpoints" / ".partial-step_000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".partial-step_000001" / "actor").write_text("in the way")
    saver.start(1, {})
    with pytest.raises(OSError, match="step 1 could not be written; rank 0: FileExistsError"):
        saver.wait()
    assert checkpoint.latest(tmp_path) is None
    saver.wait()  # said once


def test_a_full_disk_is_refused_in_numbers(tmp_path, world):
    saver = checkpoint.Saver(tmp_path / "not_there_yet", keep_last=2, world=world)
    saver.check_space(1)
    with pytest.raises(ConfigError, match=rf"takes 1,152,921,504,606,846,976 bytes and {tmp_path} has [\d,]+ free"):
        saver.check_space(1 << 60)


def test_pointer_to_a_folder_that_is_gone(tmp_path, engines, world):
    shutil.rmtree(save(tmp_path, 1, engines, world))
    assert checkpoint.latest(tmp_path) is None


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


def test_the_best_actor_is_kept(tmp_path, tiny, world, train_step):
    actor, tokenizer, folder = (
        make_actor(tiny / "policy", world, 1),
        load_tokenizer(str(tiny / "policy")),
        tmp_path / "b",
    )

    def offer(accuracy: float, number: int) -> bool:
        return export.export_best(folder, actor, tokenizer, world, accuracy=accuracy, step=number)

    assert offer(0.5, 1)
    kept = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    train_step(actor)
    assert not offer(0.5, 2) and not offer(0.25, 3)
    again = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert all(torch.equal(again[name], kept[name]) for name in kept)
    assert offer(0.75, 4)
    better = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert not all(torch.equal(better[name], kept[name]) for name in kept)
    assert json.loads((folder / "best.json").read_text()) == {"step": 4, "accuracy": 0.75}


class Part:
    def __init__(self, world: World) -> None:
        self.world = world

    def snapshot(self) -> Snapshot:
        return Snapshot(tensors={f"of rank {self.world.rank}": torch.full((3,), self.world.rank)}, notes={"n": "1"})


def main() -> None:
    """Run as one of two ranks: save, save again where rank 1 cannot write, and read the first one."""
    folder = Path(sys.argv[1])
    world = join_world()
    saver = checkpoint.Saver(folder / "run", keep_last=2, world=world)
    result = {}
    for number in (1, 2):
        saver.take("part", Part(world))
        if number == 2 and world.rank == 1:
            place = folder / "run/checkpoints/.partial-step_000002/part"
            (place / "part_00001.safetensors").mkdir(parents=True)
        saver.start(number, {})
        world.sum(torch.ones(1))  # the run's own collectives go on
        try:
            saver.wait()
        except OSError as error:
            result["error"] = str(error)
    parts = Parts(checkpoint.latest(folder / "run") / "part")
    result |= {"step": checkpoint.read_state(checkpoint.latest(folder / "run"))["step"], "notes": parts.notes}
    result |= {name: parts[name].tolist() for name in parts.names}
    torch.save(result, folder / f"rank{world.rank}.pt")


def test_two_ranks_write_and_every_rank_learns_what_failed(on_two_ranks):
    for result in on_two_ranks(__file__):
        assert result.pop("error").startswith("the checkpoint of step 2 could not be written; rank 1: ")
        assert result == {"step": 1, "notes": {"n": "1"}, "of rank 0": [0, 0, 0], "of rank 1": [1, 1, 1]}


if __name__ == "__main__":
    main()
