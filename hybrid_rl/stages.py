"""What each phase of the loop does with the parts of a run."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch
from hybrid_rl.checkpoints import export as exporting
from hybrid_rl.checkpoints import saver as checkpoint
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.planning.footprint import forward_tokens
from hybrid_rl.rewards import ScorerPool
from hybrid_rl.rewards import scoring as judging
from hybrid_rl.rewards.scoring import Scored
from hybrid_rl.run import Run
from hybrid_rl.steps import logprobs as scoring
from hybrid_rl.steps import rollout, update
from hybrid_rl.steps.ema import MovingReference

Metrics = dict[str, float]
T = TypeVar("T")
PROBED_RESPONSES = 8  # of each rank, whose log-probs trainer and engine compare where the trainer would compute none


def once(run: Run, step: int, name: str, compute: Callable[[], T]) -> T:
    """Return what compute gives, or what the phase log holds of it."""
    return compute() if run.phase_log is None else run.phase_log.once(step, name, compute)


def generate(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[list[Rollout], list[Rollout]]:
    """Sample the prompts' responses, and for ReMax each prompt's most likely one too."""
    return once(run, step, "rollout", lambda: _generate(run, prompts, step))


def _generate(run: Run, prompts: Sequence[Prompt], step: int) -> tuple[list[Rollout], list[Rollout]]:
    config, data = run.config, run.data
    arguments, stop_token_ids = (prompts, run.engine, data.tokenizer, config.rollout), data.stop_token_ids
    sampled = rollout.collect_rollouts(*arguments, stop_token_ids=stop_token_ids, run_seed=config.run.seed, step=step)
    if config.advantage.estimator != "remax":
        return sampled, []
    return sampled, rollout.generate_greedy(*arguments, stop_token_ids=stop_token_ids)


def judge(run: Run, rollouts: Sequence[Rollout], greedy: Sequence[Rollout], step: int) -> Scored:
    """Score responses, and the greedy ones as their prompts' baselines."""
    return once(run, step, "scores", lambda: _judge(run, rollouts, greedy))


def _judge(run: Run, rollouts: Sequence[Rollout], greedy: Sequence[Rollout]) -> Scored:
    scored = judging.score_responses(rollouts, run.sources, run.config.reward)
    if run.config.advantage.estimator != "remax":
        return scored
    scores = judging.score_responses(greedy, run.sources, run.config.reward).scores.tolist()
    return replace(scored, baselines={r.prompt.prompt_id: s for r, s in zip(greedy, scores, strict=True)})


def evaluate(run: Run, step: int, is_over: bool) -> Metrics:
    """Return exact accuracy on the held-out prompts, before step 1, every few steps and at the end; else nothing."""
    every, scorer = run.config.run.eval_every_steps, run.data.eval_scorer
    if scorer is None or not (is_over or step == 1 or (step - 1) % every == 0):
        return {}
    return once(run, step, "evaluation", lambda: _evaluate(run, scorer, step))


def _evaluate(run: Run, scorer: ScorerPool, step: int) -> Metrics:
    config, data, num_samples = run.config, run.data, run.config.run.eval_samples
    arguments = (data.eval_prompts, run.engine, data.tokenizer)
    if num_samples == 1:
        responses = rollout.generate_greedy(*arguments, config.rollout, stop_token_ids=data.stop_token_ids)
    else:
        settings = replace(config.rollout, group_size=num_samples)
        responses = rollout.collect_rollouts(
            *arguments, settings, stop_token_ids=data.stop_token_ids, run_seed=config.run.seed + 1, step=step
        )
    result = rollout.evaluation_sums(responses, scorer.score(responses).scores, num_samples)
    return run.world.means(result, dict.fromkeys(result, len(data.eval_prompts)))


def keep_best(run: Run, evaluation: Metrics, step: int) -> None:
    """Write the actor, if the step began with an evaluation and none was better."""
    if evaluation and run.config.checkpoint.keep_best:
        folder, accuracy = run.config.run_dir / "best", evaluation["accuracy"]
        exporting.export_best(folder, run.actor, run.data.tokenizer, run.world, accuracy=accuracy, step=step - 1)


def reached_accuracy(run: Run, evaluation: Metrics) -> bool:
    """Return whether an evaluation reached the accuracy at which the run may end."""
    goal = run.config.run.stop_at_accuracy
    return goal is not None and evaluation.get("accuracy", -1.0) >= goal


def refresh_reference(run: Run, step: int) -> None:
    """Move the reference towards the actor, every so many finished steps."""
    every = run.config.models.reference_every_steps
    if every and step > 1 and (step - 1) % every == 0 and isinstance(run.reference, MovingReference):
        run.reference.blend(run.actor, run.config.models.reference_alpha)


def score(run: Run, scored: Scored) -> tuple[TrainBatch, Metrics, Metrics]:
    """Return the batch ready for the updates, this rank's sums of what went into it, and metrics of all ranks."""
    config, world, actor, critic = run.config, run.data_parallel, run.actor, run.critic
    is_free = all(trainer.module.packs_freely for trainer in (actor, critic) if trainer)
    packing = scoring.Packing(max_tokens=forward_tokens(config.update, is_free=is_free), world=world)
    temperature, max_tokens = config.rollout.temperature, config.rollout.max_response_tokens
    batch = judging.add_rewards(
        scored, config.reward, max_response_tokens=max_tokens, world=world, normalizer=run.normalizer
    )
    metrics: Metrics = {}
    is_given = config.update.old_logprobs == "rollout"
    probe = make_train_batch(scored.rollouts[:PROBED_RESPONSES]) if is_given else batch
    probe = probe.with_fields(
        old_logprobs=scoring.token_logprobs(actor.forward, probe, packing, temperature=temperature)
    )
    metrics["rollout/logprob_gap"] = scoring.check_logprob_gap(probe, limit=max_logprob_gap(run), world=world)
    batch = batch.with_fields(old_logprobs=batch.rollout_logprobs if is_given else probe.old_logprobs)
    if run.reference:
        ref_logprobs = scoring.token_logprobs(run.reference, batch, packing, temperature=temperature)
        batch = batch.with_fields(ref_logprobs=ref_logprobs)
    bootstrap_values = None
    if critic:
        batch = batch.with_fields(values=scoring.token_values(critic.forward, batch, packing))
        if config.advantage.bootstrap_truncated:
            bootstrap_values = scoring.sequence_values(critic.forward, batch, packing)
    kl_coef = metrics["kl_coef"] = run.kl.coef
    batch, sums = scoring.add_advantages(
        batch, config.advantage, world, kl_coef=kl_coef, bootstrap_values=bootstrap_values
    )
    batch, more = scoring.correct(batch, config.update)
    if run.reference:
        totals = world.sum(torch.tensor([sums["kl"], len(batch)], dtype=torch.float64)).tolist()
        run.kl.update(totals[0] / totals[1], int(totals[1]))
    return batch, scored.sums | sums | more, metrics


def max_logprob_gap(run: Run) -> float:
    """Return the gap between engine and trainer at which the run stops: rounding noise of the dtype, with room."""
    is_float32 = choose_dtype(run.config.models.dtype, run.world.device) == torch.float32
    return run.config.rollout.max_logprob_gap or (1e-3 if is_float32 else 0.1)


def update_critic(run: Run, batch: TrainBatch, step: int) -> Metrics:
    """Update the critic, if the run has one; its states are here now, so a checkpoint's copy is taken now."""
    if run.critic is None:
        return {}
    config = run.config
    metrics = update.update_critic(
        run.critic,
        batch,
        config.update,
        run.data_parallel,
        seed=config.run.seed + step,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    if is_saved(run, step):
        run.saver.take("critic", run.critic)
    return {f"critic/{name}": value for name, value in metrics.items()}


def update_actor(run: Run, batch: TrainBatch, step: int) -> Metrics:
    """Update the actor, once the critic has warmed up, and its average; then take a checkpoint's copy of it."""
    metrics = _update_actor(run, batch, step) if step > run.config.update.critic_warmup_steps else {}
    if is_saved(run, step):
        run.saver.take("actor", run.actor)
    return metrics


def _update_actor(run: Run, batch: TrainBatch, step: int) -> Metrics:
    config, advantage = run.config, run.config.advantage
    kl = None
    if run.reference and advantage.kl_in == "loss":
        kl = update.KlInLoss(coef=run.kl.coef, estimator=advantage.kl_estimator, is_unbiased=advantage.kl_unbiased)
    metrics = update.update_actor(
        run.actor,
        batch,
        config.update,
        run.data_parallel,
        seed=config.run.seed + step,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
        kl=kl,
        ptx=run.ptx.backward if run.ptx else None,
        ptx_coef=config.ptx.coef if run.ptx else 0.0,
    )
    if run.ema:
        run.ema.update()
    return {f"actor/{name}": value for name, value in metrics.items()}


def is_saved(run: Run, step: int) -> bool:
    """Return whether a checkpoint is due after this step; the last step always has one."""
    every = run.config.checkpoint.every_steps
    return bool(every) and (step % every == 0 or step == run.config.run.num_steps)


def save(run: Run, step: int) -> None:
    """Begin to write a checkpoint if one is due; it is written beside the next steps unless settings forbid that."""
    run.saver.surface()
    newest = checkpoint.latest(run.config.run_dir)
    if run.phase_log and newest:
        run.phase_log.forget(checkpoint.read_state(newest)["step"])
    if not is_saved(run, step):
        return
    start_saving(run, step)
    if not run.config.checkpoint.overlap:
        run.saver.wait()


def start_saving(run: Run, step: int) -> None:
    """Begin to write the checkpoint of a step, whose copies of critic and actor are taken."""
    for name, part in run.saved_parts.items():
        run.saver.take(name, part)
    run.saver.start(step, {name: part.state_dict() for name, part in run.counters.items()})


def is_unsaved(run: Run, last_step: int) -> bool:
    """Return whether the run ended after a step that had no checkpoint due, and wants one."""
    return bool(run.config.checkpoint.every_steps) and last_step > run.steps_done and not is_saved(run, last_step)


def finish(run: Run) -> None:
    """Wait until the last checkpoint is in force; nothing is left to replay then."""
    run.saver.wait()
    if run.phase_log:
        run.phase_log.forget_all()


def export(run: Run) -> None:
    """Write the final actor as a Hugging Face folder, and beside it its average and its adapter, if there are any."""
    if not run.config.checkpoint.export:
        return
    folder, tokenizer = run.config.run_dir, run.data.tokenizer
    exporting.export(folder / "export", run.actor, tokenizer, run.world)
    if run.ema:
        exporting.export_weights(folder / "export_ema", run.actor, run.ema.weights(), tokenizer, run.world)
    if run.config.models.lora.rank:
        exporting.export_adapter(folder / "export_adapter", run.actor, run.world)
