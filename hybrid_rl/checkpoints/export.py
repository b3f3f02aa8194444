"""Export of the actor, its EMA and its adapter as Hugging Face folders."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor
from transformers import PreTrainedTokenizerBase

from hybrid_rl.atomic import flush_folder, flush_tree, writing
from hybrid_rl.distributed import World
from hybrid_rl.models.exporting import save_model
from hybrid_rl.models.lora import save_adapter
from hybrid_rl.weights.protocols import WeightSource


class ExportedEngine(WeightSource, Protocol):
    """The training engine of the actor, as far as an export reads it."""

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


def export(folder: Path, actor: ExportedEngine, tokenizer: PreTrainedTokenizerBase, world: World) -> None:
    """Write actor and tokenizer as a Hugging Face folder that transformers and vLLM load; a collective.

    Adapters are merged into the weights.
    """
    with actor.gathered([name for name, _, _ in actor.named_shapes()]) as tensors:
        export_weights(folder, actor, tensors, tokenizer, world)


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
        with actor.gathered([name for name, _, _ in actor.named_shapes()]) as tensors:
            export_weights(folder, actor, tensors, tokenizer, world, notes={note.name: content})
    return is_better


def export_weights(
    folder: Path,
    actor: ExportedEngine,
    tensors: Mapping[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    world: World,
    *,
    notes: Mapping[str, str] | None = None,
) -> None:
    """Write a Hugging Face folder with the given weights in place of the actor's; a collective.

    Args:
        tensors: weights by the actor's parameter names; read on rank 0 only.
        notes: name -> text of further files in the folder.
    """
    if world.is_main:
        with _replacing(folder) as partial:
            save_model(partial, actor.model, {name: t.cpu() for name, t in tensors.items()})
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
