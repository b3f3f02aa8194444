"""Export of actor, critic, EMA and adapter as Hugging Face folders."""

import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rl.atomic import flush_folder, flush_tree, make_folder, writing
from hybrid_rl.checkpoints.start import EXPORTS
from hybrid_rl.distributed import World
from hybrid_rl.models.exporting import ModelWriter, layers_together
from hybrid_rl.models.lora import save_adapter
from hybrid_rl.weights.bucket import plan_buckets
from hybrid_rl.weights.protocols import NamedShape, WeightSource

GATHERED_BYTES = 1 << 30
"""Bytes of weights that are gathered at a time where ZeRO-3 shards them."""
_STEP = re.compile(r"step_(\d{6,})(?:_ema|_adapter|_critic)?")


class ExportedEngine(WeightSource, Protocol):
    """The training engine of actor or critic, as far as an export reads it."""

    @property
    def model(self) -> Any:
        """The Hugging Face model."""
        ...

    @property
    def has_adapters(self) -> bool:
        """Whether low-rank adapters are trained."""
        ...

    def adapter(self) -> dict[str, Tensor]:
        """Return the adapters on the host, named as in peft's files; a collective under ZeRO-3."""
        ...


def step_folder(run_dir: Path, step: int) -> Path:
    """Return the folder of the actor that is exported after a step."""
    return run_dir / EXPORTS / f"step_{step:06d}"


def beside(folder: Path, part: str) -> Path:
    """Return the folder of another part of the same export, such as `export_ema` beside `export`."""
    return folder.with_name(f"{folder.name}_{part}")


def delete_old(run_dir: Path, step: int, *, keep_last: int) -> None:
    """Delete all parts of the exports before a step, except for the last ones.

    Args:
        step: step of the newest export, which counts as one of keep_last.
        keep_last: number of steps whose exports stay.
    """
    found: dict[int, list[Path]] = {}
    for folder in (run_dir / EXPORTS).iterdir():
        matched = _STEP.fullmatch(folder.name)
        if matched and int(matched[1]) < step:
            found.setdefault(int(matched[1]), []).append(folder)
    for older in sorted(found)[: max(0, len(found) - keep_last + 1)]:
        for folder in found[older]:
            shutil.rmtree(folder)


def export(folder: Path, engine: ExportedEngine, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    """Write actor or critic, with the tokenizer, as a Hugging Face folder that transformers loads; a collective.

    vLLM loads the actor. Adapters are merged into the weights.
    """
    export_weights(folder, engine, engine, tokenizer, world)


def host_weights(source: WeightSource, tensors: Iterable[NamedShape], world: World) -> dict[str, Tensor]:
    """Return name -> unsharded weight on the host of rank 0, and nothing on other ranks; a collective.

    Where weights are gathered, the device holds GATHERED_BYTES of them at a time.
    """
    weights: dict[str, Tensor] = {}
    for bucket in plan_buckets(tensors, GATHERED_BYTES):
        with source.gathered([slot.name for slot in bucket]) as gathered:
            if world.is_main:
                weights |= {name: tensor.to("cpu", copy=True) for name, tensor in gathered.items()}
    return weights


def export_best(
    folder: Path,
    actor: ExportedEngine,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    accuracy: float,
    step: int,
    run_id: str,
) -> bool:
    """Export the actor if its accuracy exceeds the one in the folder's best.json, and return whether it does.

    Args:
        folder: of the best actor; best.json gets step and accuracy.
        accuracy: accuracy of the actor's current weights, the same on every rank.
        step: last step that these weights were trained in.
        run_id: of this run, so that it recognises the folder when it continues.
    """
    note = folder / "best.json"
    before = json.loads(note.read_text())["accuracy"] if world.is_main and note.exists() else None
    is_better = world.all_gather(before is None or accuracy > before)[0]
    if is_better:
        content = json.dumps({"step": step, "accuracy": accuracy, "run_id": run_id}) + "\n"
        export_weights(folder, actor, actor, tokenizer, world, notes={note.name: content})
    return is_better


def export_weights(
    folder: Path,
    engine: ExportedEngine,
    source: WeightSource,
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a Hugging Face folder of an engine's model with the weights of a source; a collective.

    The weights pass layer by layer through rank 0, whose host holds those of one file at a time.

    Args:
        source: the engine, or its EMA.
        notes: name -> text of further files in the folder.
    """
    with _replacing(folder) if world.is_main else nullcontext() as partial:
        writer = ModelWriter(partial, engine.model) if partial else None
        for layer in layers_together(source.named_shapes()):
            tensors = host_weights(source, layer, world)
            if writer:
                writer.add(tensors)
        if writer and partial:
            writer.finish()
            tokenizer.save_pretrained(partial)
            for name, text in (notes or {}).items():
                (partial / name).write_text(text)
    world.barrier()


def export_adapter(folder: Path, actor: ExportedEngine, world: World) -> None:
    """Write the actor's adapter, which peft.PeftModel.from_pretrained loads on its base model; a collective.

    Raises:
        ValueError: the actor has no adapter.
    """
    if not actor.has_adapters:
        raise ValueError("the actor has no adapter to export; models.lora.rank is 0")
    tensors = actor.adapter()
    if world.is_main:
        with _replacing(folder) as partial:
            save_adapter(partial, actor.model, tensors)
    world.barrier()


@contextmanager
def _replacing(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder to write to, which replaces `folder` when the body ends without an error.

    The new folder is on the disk before it replaces the earlier one. After a crash between the two renames the earlier
    folder is at `.replaced-<name>`; see run_folder.tidy.

    Raises:
        FileWriteError: a file cannot be written; the earlier folder is unchanged, and what was written is deleted.
    """
    with writing(folder.parent):
        make_folder(folder.parent)
    partial, replaced = (folder.with_name(f".{word}-{folder.name}") for word in ("partial", "replaced"))
    shutil.rmtree(partial, ignore_errors=True)
    shutil.rmtree(replaced, ignore_errors=True)
    with writing(folder):
        try:
            yield partial
            flush_tree(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        if folder.exists():
            os.rename(folder, replaced)
        os.rename(partial, folder)
        flush_folder(folder.parent)
    shutil.rmtree(replaced, ignore_errors=True)
