"""Checkpoints that are either whole or absent, and the export of the actor as a Hugging Face folder."""

import json
import os
import random
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rl.distributed import World
from hybrid_rl.engines.deepspeed import TrainEngine
from hybrid_rl.lora import save_adapter


class Saved(Protocol):
    """What a checkpoint keeps in a folder of its own."""

    def save(self, folder: Path) -> None:
        """Write into the folder; every rank calls it."""
        ...

    def load(self, folder: Path) -> None:
        """Read what save wrote."""
        ...


def checkpoint_name(step: int) -> str:
    """Return the folder name of a step's checkpoint."""
    return f"step_{step:06d}"


def latest(run_dir: Path) -> Path | None:
    """Return the newest complete checkpoint of a run, or None."""
    pointer = run_dir / "latest"
    if not pointer.exists():
        return None
    folder = run_dir / "checkpoints" / pointer.read_text().strip()
    found = [f for f in (folder, _replaced(folder)) if f.is_dir()]
    return found[0] if found else None


def _replaced(folder: Path) -> Path:
    """Where a checkpoint waits while another of the same step takes its place."""
    return folder.with_name(f".replaced-{folder.name}")


def save(
    run_dir: Path,
    step: int,
    engines: Mapping[str, Saved],
    state: Mapping[str, Any],
    *,
    keep_last: int,
    world: World,
) -> Path:
    """Write the checkpoint of a finished step; a crash at any moment leaves the one before it in force.

    Everything goes into a temporary folder, which is renamed when all ranks are done; then `latest` is replaced, and
    only then old checkpoints are deleted.

    Args:
        state: plain JSON values that are the same on every rank (loader position, versions).
    """
    folder = run_dir / "checkpoints" / checkpoint_name(step)
    partial = folder.with_name(f".partial-{folder.name}")
    if world.is_main:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    for name, engine in engines.items():
        engine.save(partial / name)
    torch.save(_rng_state(), partial / f"rng_rank{world.rank}.pt")
    world.barrier()
    if world.is_main:
        (partial / "state.json").write_text(json.dumps({"step": step, "world_size": world.size, **state}))
        if folder.exists():
            shutil.rmtree(_replaced(folder), ignore_errors=True)
            os.replace(folder, _replaced(folder))
        os.replace(partial, folder)
        _replace_text(run_dir / "latest", folder.name)
        shutil.rmtree(_replaced(folder), ignore_errors=True)
        others = sorted(f for f in (run_dir / "checkpoints").glob("step_*") if f != folder)
        for old in others[: max(0, len(others) - keep_last + 1)]:
            shutil.rmtree(old)
    world.barrier()
    return folder


def read_state(folder: Path) -> dict[str, Any]:
    """Return the step, the number of ranks, and the state that was given to save."""
    return json.loads((folder / "state.json").read_text())


def load_rng(folder: Path, world: World) -> None:
    """Set this rank's random generators as they were; the engines load their own files."""
    _set_rng_state(torch.load(folder / f"rng_rank{world.rank}.pt", weights_only=False))


def export(folder: Path, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    """Write actor and tokenizer as a Hugging Face folder that transformers and vLLM load; a collective under ZeRO-3.

    Low-rank adapters are merged into the weights.
    """
    with actor.gathered([name for name, _, _ in actor.named_shapes()]) as tensors:
        export_weights(folder, actor, tensors, tokenizer, world)


def export_best(
    folder: Path, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase, world: World, *, accuracy: float, step: int
) -> bool:
    """Export the actor if this accuracy beats that of the folder's, and note it in best.json; return whether it did.

    Args:
        accuracy: of the actor as it is, the same on every rank.
        step: optimizer has finished this one.
    """
    note = folder / "best.json"
    before = json.loads(note.read_text())["accuracy"] if world.is_main and note.exists() else None
    is_better = world.gather(before is None or accuracy > before)[0]
    if is_better:
        export(folder, actor, tokenizer, world)
        if world.is_main:
            note.write_text(json.dumps({"step": step, "accuracy": accuracy}) + "\n")
    return is_better


def export_weights(
    folder: Path, actor: TrainEngine, tensors: Mapping[str, Tensor], tokenizer: PreTrainedTokenizerBase, world: World
) -> None:
    """Write such a folder with other weights than the actor's own; only those of rank 0 count."""
    if world.is_main:
        with _replaced_when_whole(folder) as partial:
            actor.model.save_pretrained(partial, state_dict={name: t.cpu() for name, t in tensors.items()})
            tokenizer.save_pretrained(partial)
    world.barrier()


def export_adapter(folder: Path, actor: TrainEngine, world: World) -> None:
    """Write the actor's adapter for peft.PeftModel.from_pretrained on its base; a collective under ZeRO-3.

    Raises:
        ValueError: the actor has no adapter.
    """
    if not actor.has_adapters:
        raise ValueError("the actor has no adapter to export; models.lora.rank is 0")
    tensors = actor.adapter()
    if world.is_main:
        with _replaced_when_whole(folder) as partial:
            save_adapter(partial, actor.model, tensors)
    world.barrier()


@contextmanager
def _replaced_when_whole(folder: Path) -> Iterator[Path]:
    """Yield the place to write to; it becomes the folder when the body is done."""
    partial = folder.with_name(f".partial-{folder.name}")
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    shutil.rmtree(folder, ignore_errors=True)
    os.replace(partial, folder)


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.partial")
    temporary.write_text(text)
    os.replace(temporary, path)


def _rng_state() -> dict[str, Any]:
    state = {"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}
    return state | ({"cuda": torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"])
