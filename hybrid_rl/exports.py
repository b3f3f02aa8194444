"""The Hugging Face folders that a run writes: every few steps, for the best evaluation, and after the last step."""

from pathlib import Path

from hybrid_rl.checkpoints import export as exporting
from hybrid_rl.run import Metrics, Run


def is_due(run: Run, step: int) -> bool:
    """Return whether an export is due after this step."""
    every = run.config.checkpoint.export_every_steps
    return bool(every) and step % every == 0


def export_critic_of(run: Run, step: int) -> None:
    """Write the critic where an export is due after this step; its weights must be on the device."""
    if is_due(run, step) and run.critic and run.config.checkpoint.export_critic:
        _write_critic(run, exporting.step_folder(run.config.run_dir, step))


def export_actor_of(run: Run, step: int) -> None:
    """Write the actor where an export is due after this step, and delete old exports; see export_critic_of."""
    if is_due(run, step):
        _write_actor(run, exporting.step_folder(run.config.run_dir, step))
        if run.world.is_main:
            exporting.delete_old(run.config.run_dir, step, keep_last=run.config.checkpoint.export_keep_last)


def keep_best(run: Run, evaluation: Metrics, *, steps_done: int) -> None:
    """Export the actor if the evaluation of its weights is the best so far."""
    if evaluation and run.config.checkpoint.keep_best:
        folder, accuracy = run.config.run_dir / "best", evaluation["accuracy"]
        exporting.export_best(
            folder,
            run.actor,
            run.data.tokenizer,
            run.world,
            accuracy=accuracy,
            step=steps_done,
            run_id=run.folder.run_id,
        )


def export_actor(run: Run) -> None:
    """Write the final actor, its EMA and its adapter."""
    if run.config.checkpoint.export:
        _write_actor(run, run.config.run_dir / "export")


def export_critic(run: Run) -> None:
    """Write the final critic."""
    _write_critic(run, run.config.run_dir / "export")


def has_final_critic(run: Run) -> bool:
    """Return whether the final critic is written."""
    checkpoint = run.config.checkpoint
    return run.critic is not None and checkpoint.export and checkpoint.export_critic


def _write_actor(run: Run, folder: Path) -> None:
    """Write the actor as a Hugging Face folder; its EMA and its adapter get a folder each, if the run has them."""
    actor, tokenizer, world, lora = run.actor, run.data.tokenizer, run.world, run.config.models.lora
    if not lora.rank or lora.export != "adapter":
        exporting.export(folder, actor, tokenizer, world)
    if run.ema:
        exporting.export_weights(exporting.beside(folder, "ema"), actor, run.ema, tokenizer, world)
    if lora.rank and lora.export != "merged":
        exporting.export_adapter(exporting.beside(folder, "adapter"), actor, world)


def _write_critic(run: Run, folder: Path) -> None:
    assert run.critic is not None
    exporting.export(exporting.beside(folder, "critic"), run.critic, run.data.tokenizer, run.world)
