"""A checkpoint is complete or absent and restores everything."""

import os
import random
import re
import shutil
import sys
import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.checkpoints.find import checkpoint_name, find_newest, read_state
from hybrid_rl.checkpoints.run_folder import RunFolder
from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.config import Config, ConfigError, ModelsConfig, OptimizerConfig, RunConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.errors import FileWriteError
from hybrid_rl.models.loading import load_value_model
from tests.checkpoints.conftest import CPU, make_actor, weights
from tests.disks import a_full_disk


@pytest.fixture(scope="module")
def engines(tiny: Path, world: World) -> dict[str, DeepSpeedEngine]:
    module = load_value_model(str(tiny / "reward"), ModelsConfig(), CPU, field="models.critic")
    critic = DeepSpeedEngine(module, OptimizerConfig(), zero_stage=2, total_steps=9, world=world)
    return {"actor": make_actor(tiny / "policy", world), "critic": critic}


def save(run_dir: Path, number: int, engines, world: World, *, keep_last: int = 2, **state) -> Path:
    saver = checkpoint.Saver(run_dir, keep_last=keep_last, world=world)
    for name, engine in engines.items():
        saver.snapshot(name, engine)
    saver.start(number, {"loader": number, **state})
    saver.wait()
    return run_dir / "checkpoints" / checkpoint_name(number)


def latest(run_dir: Path) -> Path | None:
    return find_newest(run_dir, may_lose_steps=True)[0]


def steps_on_disk(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_a_run_without_checkpoints_has_no_latest_one(tmp_path):
    assert latest(tmp_path) is None


def test_state_is_restored(tmp_path, engines, world):
    folder = save(tmp_path, 4, engines, world, note="n")
    assert folder == latest(tmp_path) == tmp_path / "checkpoints" / "step_000004"
    assert read_state(folder) == {"step": 4, "world_size": 1, "loader": 4, "note": "n"}
    assert steps_on_disk(tmp_path) == ["step_000004"]
    assert {path.name for path in folder.iterdir()} == {
        "actor",
        "critic",
        "random_state",
        "state.json",
        "manifest.json",
    }


def test_weights_are_restored(tmp_path, tiny, engines, world, train_step):
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


def test_random_generators_are_restored(tmp_path, engines, world):
    folder = save(tmp_path, 1, engines, world)
    expected = [draw() for _ in range(3)]
    for _ in range(5):
        draw()
    checkpoint.load_random_state(folder, world)
    assert [draw() for _ in range(3)] == expected


def test_old_checkpoints_are_deleted(tmp_path, engines, world):
    for number in (1, 2, 3, 10):
        save(tmp_path, number, engines, world, keep_last=2)
    assert steps_on_disk(tmp_path) == ["step_000003", "step_000010"]
    save(tmp_path, 11, engines, world, keep_last=1)
    assert steps_on_disk(tmp_path) == ["step_000011"]
    assert latest(tmp_path).name == "step_000011"


def test_newer_checkpoints_stay(tmp_path, engines, world):
    """Only checkpoints before the one that is written count as old."""
    for number in (50, 60):
        save(tmp_path, number, engines, world)
    save(tmp_path, 4, engines, world, keep_last=1)
    assert steps_on_disk(tmp_path) == ["step_000004", "step_000050", "step_000060"]
    found, (warning,) = find_newest(tmp_path, may_lose_steps=True)
    assert found.name == "step_000060" and "latest names step_000004, but step_000060 is whole" in warning


def test_same_step_again_replaces_it(tmp_path, engines, world):
    save(tmp_path, 3, engines, world, note="old")
    folder = save(tmp_path, 3, engines, world, note="new")
    assert read_state(folder)["note"] == "new"
    assert steps_on_disk(tmp_path) == ["step_000003"]


class Killed(BaseException):
    """Stands for a process that ends here."""


FILE_OPERATIONS = [(os, "replace"), (os, "fsync"), (shutil, "rmtree"), (Path, "mkdir")]


@pytest.mark.parametrize("first_step", [1, 2], ids=["another step", "the same step"])
def test_a_kill_at_any_moment_leaves_a_complete_checkpoint(tmp_path, engines, world, monkeypatch, first_step):
    """Kill a save before its n-th file operation, for every n, and check what a new process would find."""
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
        found = latest(run_dir)
        assert found is not None, f"killed before file operation {count}: no checkpoint is complete"
        saved.append(read_state(found)["note"])
        for name, engine in engines.items():
            engine.load(found / name)
        save(run_dir, 5, engines, world, keep_last=1)  # the next save works with what the killed one left
        assert latest(run_dir).name == "step_000005" and steps_on_disk(run_dir)[-1] == "step_000005"
        shutil.rmtree(run_dir)
        if not killed:
            break
    assert not killed and len(saved) > 8
    assert saved == sorted(saved) and set(saved) == {
        "first",
        "second",
    }  # the old one up to some operation, then the new one


def test_kill_while_a_part_is_written(tmp_path, engines, world, monkeypatch):
    save(tmp_path, 1, engines, world)
    write = Snapshot.write

    def killed(self: Snapshot, folder: Path, rank: int) -> Path:
        if folder.name == "critic":
            folder.mkdir(parents=True)
            (folder / "part_00007.safetensors").write_text("half")
            raise Killed
        return write(self, folder, rank)

    monkeypatch.setattr(Snapshot, "write", killed)
    with pytest.raises(Killed):
        save(tmp_path, 2, engines, world)
    monkeypatch.undo()
    assert latest(tmp_path).name == "step_000001"
    assert read_state(latest(tmp_path))["step"] == 1
    folder = save(tmp_path, 2, engines, world)
    assert not list(folder.rglob("part_00007*")) and steps_on_disk(tmp_path) == ["step_000001", "step_000002"]


class Slow(Snapshot):
    """A snapshot that is written after `may_go` is set."""

    may_go = threading.Event()

    def write(self, folder: Path, rank: int) -> Path:
        assert self.may_go.wait(timeout=60)
        return super().write(folder, rank)


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
    saver.snapshot("actor", SlowPart(actor))
    saver.start(1, {})
    train_step(actor)
    saver.raise_if_failed()
    assert latest(tmp_path) is None
    Slow.may_go.set()
    saver.wait()
    actor.load(latest(tmp_path) / "actor")
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(actor).items())


def test_a_failed_write_raises_in_the_run_once(tmp_path, engines, world):
    saver = checkpoint.Saver(tmp_path, keep_last=2, world=world)
    saver.snapshot("actor", engines["actor"])
    (tmp_path / "checkpoints" / ".partial-step_000001").mkdir(parents=True)
    (tmp_path / "checkpoints" / ".partial-step_000001" / "actor").write_text("in the way")
    saver.start(1, {})
    with pytest.raises(
        FileWriteError, match=r"step 1 is not complete: rank 0: .*/actor/part_00000\.safetensors cannot"
    ):
        saver.wait()
    assert latest(tmp_path) is None and steps_on_disk(tmp_path) == []
    saver.wait()  # raises once


def with_free(monkeypatch, num_bytes: int) -> None:
    usage = shutil.disk_usage("/")._replace(free=num_bytes)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)


def test_a_start_asks_for_all_checkpoints_that_exist_at_once_and_for_the_exports(tmp_path, engines, world, monkeypatch):
    """With keep_last = 2 there are three for a moment; one that exists is not to be written again."""
    folder = tmp_path / "not_there_yet"
    saver = checkpoint.Saver(folder, keep_last=2, world=world, export_bytes=50)
    with_free(monkeypatch, 350)
    saver.check_space(100)
    sentence = (
        rf"3 checkpoints of 101 bytes and exports of 50 are .* {re.escape(str(folder))} has 350 free: .*keep_last"
    )
    with pytest.raises(ConfigError, match=sentence):
        saver.check_space(101)
    (folder / "checkpoints/step_000001").mkdir(parents=True)
    saver.check_space(150)
    with pytest.raises(ConfigError, match="2 checkpoints of 151 bytes"):
        saver.check_space(151)


def test_a_save_without_room_for_one_checkpoint_ends_the_run_before_it_writes(tmp_path, world, monkeypatch, caplog):
    saver = checkpoint.Saver(tmp_path, keep_last=2, world=world, export_bytes=1 << 40)
    saver.snapshot("part", Part(world))
    with_free(monkeypatch, 1 << 20)
    saver.start(1, {})  # the export may find room until the end of the run
    saver.wait()
    assert "too few for the checkpoint of step 1 and the export" in caplog.text
    saver.snapshot("part", Part(world))
    with_free(monkeypatch, 11)
    with pytest.raises(FileWriteError, match=r"the checkpoint of step 2 takes [\d,]+ bytes and .* has 11 free"):
        saver.start(2, {})
    assert steps_on_disk(tmp_path) == ["step_000001"]


def test_a_disk_that_fills_while_a_checkpoint_is_written_is_named_and_nothing_half_written_stays(
    tmp_path, engines, world
):
    save(tmp_path, 1, engines, world)
    saver = checkpoint.Saver(tmp_path, keep_last=2, world=world)
    saver.snapshot("actor", engines["actor"])
    with a_full_disk(1000), pytest.raises(FileWriteError) as failed:
        saver.start(2, {})
        saver.wait()
    path = tmp_path / "checkpoints/.partial-step_000002/actor/part_00000.safetensors"
    assert f"rank 0: {path} cannot be written" in str(failed.value) and "File too large" in str(failed.value)
    assert steps_on_disk(tmp_path) == ["step_000001"]
    save(tmp_path, 2, engines, world)
    assert steps_on_disk(tmp_path) == ["step_000001", "step_000002"]


def test_all_of_a_checkpoint_is_on_the_disk_before_latest_names_it(tmp_path, engines, world, monkeypatch):
    """Every file and folder is flushed after its last change, and each folder above after the rename."""
    events: list[tuple[str, str]] = []
    fsync, replace = os.fsync, os.replace

    def name_of(descriptor: int) -> str:
        return os.readlink(f"/proc/self/fd/{descriptor}")

    def watched_replace(source, target) -> None:
        replace(source, target)
        events.append(("rename", str(target)))

    monkeypatch.setattr(os, "fsync", lambda fd: events.append(("flush", name_of(fd))) or fsync(fd))
    monkeypatch.setattr(os, "replace", watched_replace)
    run_dir = tmp_path / "runs" / "run"
    folder = save(run_dir, 1, engines, world)
    partial = folder.with_name(f".partial-{folder.name}")
    is_published, is_pointed = (events.index(("rename", str(path))) for path in (folder, run_dir / "latest"))
    for path in (folder, *folder.rglob("*")):
        place = partial / path.relative_to(folder)
        written = place.with_name(f".{place.name}.partial") if path.name in ("state.json", "manifest.json") else place
        assert ("flush", str(written)) in events[:is_published], path
    assert ("flush", str(folder.parent)) in events[is_published:is_pointed]
    for parent in (run_dir / "checkpoints", run_dir, tmp_path / "runs", tmp_path):
        assert ("flush", str(parent)) in events[:is_pointed], parent
    assert ("flush", str(run_dir)) in events[is_pointed:]


def test_a_deleted_checkpoint_is_not_found(tmp_path, engines, world):
    shutil.rmtree(save(tmp_path, 1, engines, world))
    with pytest.raises(
        ConfigError, match=r"no checkpoint is whole \(step_000001, which the file latest names, is not there"
    ):
        latest(tmp_path)


def test_tensors_of_a_wider_model_are_named(tmp_path):
    Snapshot(tensors={"weight": torch.zeros(2, 3)}).write(tmp_path / "actor", 0)
    message = "1 tensors of actor differ, such as weight, of shape [2, 3] there and [2, 4] in the model"
    with pytest.raises(ConfigError, match=re.escape(message)):
        SavedTensors(tmp_path / "actor").check_shapes({"weight": (2, 4)})


@pytest.mark.parametrize("content", [b"", b"half", b"\xff" * 64])
def test_a_damaged_part_is_named(tmp_path, content):
    (tmp_path / "part_00000.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"part_00000\.safetensors: damaged, or not a safetensors file"):
        SavedTensors(tmp_path)


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
        saver.snapshot("part", Part(world))
        if number == 2 and world.rank == 1:
            place = folder / "run/checkpoints/.partial-step_000002/part"
            (place / "part_00001.safetensors").mkdir(parents=True)
        saver.start(number, {})
        world.sum(torch.ones(1))  # a collective of the run, meanwhile
        try:
            saver.wait()
        except FileWriteError as error:
            result["error"] = str(error)
    if world.is_main:
        (folder / "file").write_text("")
    try:
        RunFolder(Config(run=RunConfig(dir=str(folder / "file"))), world)
    except ConfigError as error:
        result["refused"] = str(error)
    parts = SavedTensors(latest(folder / "run") / "part")
    result |= {"step": read_state(latest(folder / "run"))["step"], "notes": parts.notes}
    result |= {name: parts[name].tolist() for name in parts.names}
    torch.save(result, folder / f"rank{world.rank}.pt")


def test_two_ranks_write_and_every_rank_raises_what_failed(on_two_ranks):
    for result in on_two_ranks(__file__):
        assert result.pop("error").startswith("the checkpoint of step 2 is not complete: rank 1: ")
        assert "file/demo: cannot be written (Not a directory" in result.pop("refused")
        assert result == {"step": 1, "notes": {"n": "1"}, "of rank 0": [0, 0, 0], "of rank 1": [1, 1, 1]}


if __name__ == "__main__":
    main()
