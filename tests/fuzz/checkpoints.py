"""Fuzz subjects: checkpoints and the files beside them, whole and damaged. What is loaded is what was saved."""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_rl.checkpoints.find import find_newest, read_state
from hybrid_rl.checkpoints.phase_log import PhaseLog
from hybrid_rl.checkpoints.saver import RANDOM_STATE, Saver, load_random_state
from hybrid_rl.checkpoints.snapshot import SavedTensors, Snapshot
from hybrid_rl.checkpoints.start import decide_start
from hybrid_rl.distributed import World
from hybrid_rl.monitoring.metrics import MetricsWriter
from hybrid_rl.serialization import encode
from tests.conftest import VALID_CONFIG, change
from tests.fuzz.cases import Refusal, check_refused, check_sentence, outcome

WORLD = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
DTYPES = [torch.float32, torch.bfloat16, torch.int64, torch.float16]
Saved = dict[str, Any]
"""What a checkpoint holds: step, state, tensors of each part, notes, and the next number of the random generator."""


class HeldPart:
    """A part of a run with given tensors."""

    def __init__(self, tensors: dict[str, torch.Tensor], notes: dict[str, str]) -> None:
        self._snapshot = Snapshot(tensors=tensors, notes=notes)

    def snapshot(self) -> Snapshot:
        """Return the tensors."""
        return self._snapshot

    def load(self, folder: Path) -> None:
        """Do nothing."""


def random_tensor(rng: random.Random) -> torch.Tensor:
    """Return a small tensor of a random shape and dtype."""
    shape = [rng.randint(1, 5) for _ in range(rng.randint(0, 3))]
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    return (torch.randn(shape, generator=generator) * 100).to(rng.choice(DTYPES))


def save_run(rng: random.Random, run_dir: Path) -> list[Saved]:
    """Save some checkpoints as a run does, and return what each holds, the newest last."""
    saver, saved, step = Saver(run_dir, keep_last=3, world=WORLD), [], 0
    for _ in range(rng.randint(1, 3)):
        step += rng.randint(1, 5)
        parts = {
            name: {f"layer.{i}.weight": random_tensor(rng) for i in range(rng.randint(1, 4))}
            for name in ("actor", "critic")[: rng.randint(1, 2)]
        }
        notes, state = {"optimizer_steps": str(step)}, {"loader": {"epoch": 0, "position": step}, "kl": {"coef": 0.1}}
        for name, tensors in parts.items():
            saver.snapshot(name, HeldPart(tensors, notes))
        torch.manual_seed(step)
        saver.start(step, state)
        saver.wait()
        saved.append({"step": step, "state": state, "parts": parts, "notes": notes, "draw": float(torch.rand(()))})
    saver.close()
    return saved


def load(folder: Path) -> Saved:
    """Return what a run reads from a checkpoint."""
    state = read_state(folder)
    parts, notes = {}, {}
    for part in sorted(path for path in folder.iterdir() if path.is_dir() and path.name != RANDOM_STATE):
        tensors = SavedTensors(part)
        parts[part.name] = {name: tensors[name] for name in sorted(tensors.names)}
        notes = tensors.notes
    load_random_state(folder, WORLD)
    draw = float(torch.rand(()))
    kept = {name: state[name] for name in ("loader", "kl")}
    return {"step": state["step"], "state": kept, "parts": parts, "notes": notes, "draw": draw}


def is_same(found: Saved, saved: Saved) -> bool:
    """Return whether all that was loaded is what was saved, bit by bit."""
    if any(found[name] != saved[name] for name in ("step", "state", "draw")):
        return False
    if any(found["notes"].get(name) != value for name, value in saved["notes"].items()):
        return False
    if found["parts"].keys() != saved["parts"].keys():
        return False
    return all(
        found["parts"][part].keys() == tensors.keys()
        and all(
            found["parts"][part][name].dtype == t.dtype
            and found["parts"][part][name].shape == t.shape
            and found["parts"][part][name].flatten().contiguous().view(torch.uint8).tolist()
            == t.flatten().contiguous().view(torch.uint8).tolist()
            for name, t in tensors.items()
        )
        for part, tensors in saved["parts"].items()
    )


def damage(rng: random.Random, run_dir: Path) -> str:
    """Damage one file of a run's checkpoints, or the pointer to the latest, and return how."""
    files = sorted(path for path in run_dir.rglob("*") if path.is_file() and "lock" not in path.name)
    newest = sorted((run_dir / "checkpoints").iterdir())[-1]
    path = rng.choice([f for f in files if newest in f.parents] if rng.random() < 0.7 else files)
    data = path.read_bytes()
    kind = rng.choice(
        ["flip", "flip", "flip", "cut", "empty", "delete", "garbage", "swap", "folder", "append", "stray"]
    )
    if kind == "flip":
        place = rng.randrange(len(data))
        path.write_bytes(data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :])
    elif kind == "cut":
        path.write_bytes(data[: rng.randrange(len(data))])
    elif kind == "empty":
        path.write_bytes(b"")
    elif kind == "delete":
        path.unlink()
    elif kind == "garbage":
        path.write_bytes(rng.randbytes(rng.randint(1, 100)))
    elif kind == "append":
        path.write_bytes(data + rng.choice([b"\n", b"\x00", b"x" * 9]))
    elif kind == "swap":
        other = rng.choice(files)
        content = other.read_bytes()
        other.write_bytes(data)
        path.write_bytes(content)
    elif kind == "stray":
        part = rng.choice(sorted(path for path in newest.iterdir() if path.is_dir()))
        other = rng.choice([f for f in files if f.suffix == ".safetensors"])
        shutil.copy(other, part / "part_00007.safetensors")
    else:
        shutil.rmtree(newest)
        return f"{newest.name} deleted"
    return f"{kind} of {path.relative_to(run_dir)}"


def check_checkpoint(rng: random.Random, folder: Path) -> None:
    """A checkpoint is loaded bit by bit; a damaged one is refused, or passed over with a warning that names it."""
    run_dir = folder / "run"
    saved = save_run(rng, run_dir)
    how = damage(rng, run_dir) if rng.random() < 0.85 else None
    may_lose_steps = rng.random() < 0.7
    found = find_and_load(run_dir, may_lose_steps=may_lose_steps)
    if isinstance(found, Refusal):
        assert how is not None, f"refuses whole checkpoints: {found}"
        return
    loaded, warnings = found
    assert loaded is None or any(is_same(loaded, one) for one in saved), f"loads what nobody saved after {how}"
    if loaded is None or loaded["step"] != saved[-1]["step"]:
        assert how is not None, "a whole checkpoint is passed over"
        assert may_lose_steps, f"must continues from an older checkpoint after {how}"
        assert warnings, f"passes over the newest checkpoint without a word after {how}"


def find_and_load(run_dir: Path, *, may_lose_steps: bool) -> tuple[Saved | None, list[str]] | Refusal:
    """Return what a run continues from, None for a new run, and the warnings; or how it is refused.

    The random generators are as before.
    """

    def load_newest() -> tuple[Saved | None, list[str]]:
        newest, warnings = find_newest(run_dir, may_lose_steps=may_lose_steps)
        return (None if newest is None else load(newest)), warnings

    generators = random.getstate(), np.random.get_state()
    try:
        found = outcome(load_newest, str(run_dir))
    finally:
        random.setstate(generators[0])
        np.random.set_state(generators[1])
    if not isinstance(found, Refusal):
        for warning in found[1]:
            check_sentence(warning, str(run_dir))
    return found


def check_metrics_file(rng: random.Random, folder: Path) -> None:
    """A run continues metrics.jsonl after its whole rows; a file that is damaged is refused, or its rows are kept."""
    writer = MetricsWriter(folder)
    rows = [{"step": step, "loss": step / 8} for step in range(1, rng.randint(2, 6))]
    for row in rows:
        writer.write(row["step"], {"loss": row["loss"]})
    path = folder / "metrics.jsonl"
    data = path.read_bytes()
    kind = rng.choice([None, "cut", "garbage line", "binary", "empty", "no step", "list"])
    if kind == "cut":
        data = data[: rng.randrange(len(data))]
    elif kind in ("garbage line", "no step", "list"):
        lines = data.splitlines(keepends=True)
        line = {"garbage line": b"oops\n", "no step": b'{"loss": 1}\n', "list": b"[1]\n"}[kind]
        lines.insert(rng.randint(0, len(lines)), line)
        data = b"".join(lines)
    elif kind == "binary":
        data = rng.randbytes(50) + b"\xff\n"
    elif kind == "empty":
        data = b""
    path.write_bytes(data)
    first = rng.randint(1, len(rows) + 1)
    found = outcome(lambda: MetricsWriter(folder, resume_step=first), "metrics.jsonl")
    if isinstance(found, Refusal):
        assert kind is not None, f"refuses whole rows: {found}"
        return
    found.write(first, {"loss": 9.0})
    after = [json.loads(line) for line in path.read_text().splitlines()]
    kept = rows[: first - 1]
    if kind == "cut":
        kept = kept[: data.count(b"\n")]
    if kind in (None, "cut"):
        assert after == [*kept, {"step": first, "loss": 9.0}], f"{after} after {kind}"
    else:
        assert after[-1] == {"step": first, "loss": 9.0} and all(row in rows for row in after[:-1]), f"{after}"


def check_phase_log(rng: random.Random, folder: Path) -> None:
    """The phase log returns what a phase gave; a damaged result is computed again or refused, never another value."""
    log = PhaseLog(folder / "log", key="k", first_step=1, world=WORLD)
    values = {step: {"x": [rng.random() for _ in range(4)]} for step in range(1, rng.randint(2, 4))}
    for step, value in values.items():
        assert log.get_or_compute(step, "rollout", lambda value=value: value) == value
    path = rng.choice(sorted((folder / "log").rglob("*.msgpack")))
    kind, data = rng.choice([None, None, "flip", "cut", "empty", "garbage", "key"]), path.read_bytes()
    place = rng.randrange(len(data))
    flipped = data[:place] + bytes([data[place] ^ (1 << rng.randrange(8))]) + data[place + 1 :]
    other = encode({"x": "other"})[: rng.randint(1, 30)]
    path.write_bytes({"flip": flipped, "cut": data[:place], "empty": b"", "garbage": other}.get(kind or "", data))

    def reopen() -> dict[int, Any]:
        again = PhaseLog(folder / "log", key="other" if kind == "key" else "k", first_step=1, world=WORLD)
        return {step: again.get_or_compute(step, "rollout", lambda: "computed again") for step in values}

    found = outcome(reopen, "phase log", "phase_log", "msgpack", "log")
    if kind is None:
        assert found == values, f"{found} instead of {values}"
    elif kind == "key":
        assert set(found.values()) == {"computed again"}, f"results of other settings: {found}"
    elif not isinstance(found, Refusal):
        for step, value in found.items():
            assert value in (values[step], "computed again"), f"step {step}: {value} after {kind}"


def check_pointer(rng: random.Random, folder: Path) -> None:
    """A pointer to what is gone, half written or outside the run never makes a run start anew without a word."""
    run_dir = folder / "run"
    saved = save_run(rng, run_dir)
    pointer = run_dir / "latest"
    content: Any = rng.choice(
        [b"", b"\n", b"step_999999", b"../..", b"/", b"\xff\xfe", b"\x00", b"step_", b".", b"step_000000", None]
    )
    if content is None:
        pointer.unlink(missing_ok=True)
    else:
        pointer.write_bytes(content)
    found = find_and_load(run_dir, may_lose_steps=rng.random() < 0.5)
    if isinstance(found, Refusal):
        return
    loaded, warnings = found
    assert loaded is not None, f"starts anew with a pointer {content!r} and checkpoints of {len(saved)} steps"
    assert is_same(loaded, saved[-1]), f"continues from step {loaded['step']} with a pointer {content!r}"
    assert warnings or content is None, f"says nothing about a pointer {content!r}"


def check_no_checkpoint(rng: random.Random, folder: Path) -> None:
    """A run without a checkpoint starts at step 1; with `must` it is refused."""
    for path in rng.choice([[], ["run"], ["run", "run/checkpoints"]]):
        (folder / path).mkdir()
    config = change(VALID_CONFIG, {"run.dir": str(folder), "run.name": "run", "run.resume": "must"})
    check_refused(outcome(lambda: decide_start(config), "run.resume"), "must without a checkpoint")
    start = decide_start(change(config, {"run.resume": "auto"}))
    assert start.checkpoint is None and not start.warnings, f"{start}"
