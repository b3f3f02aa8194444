"""What each phase of the loop does with the parts of a run."""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Concatenate, NoReturn, ParamSpec, TypeVar

import torch

from hybrid_rl.batch import Prompt, Rollout, TrainBatch, make_train_batch
from hybrid_rl.checkpoints.random_state import unchanged_generators
from hybrid_rl.checkpoints.saver import CheckpointPart
from hybrid_rl.config import RolloutConfig
from hybrid_rl.conversations.loop import collect_conversations
from hybrid_rl.engines import FirstWait
from hybrid_rl.engines.restarts import RestartableEngine
from hybrid_rl.errors import EngineLostError, PreemptedError
from hybrid_rl.models.loading import choose_dtype
from hybrid_rl.monitoring.throughput import Work
from hybrid_rl.rewards import scoring
from hybrid_rl.rewards.scoring import Scored
from hybrid_rl.run import Metrics, Run
from hybrid_rl.steps import advantages, logprobs, loss_weights, rollout, updates
from hybrid_rl.steps.ema import MovingReference

logger = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")
NUM_PROBED = 8
"""Responses per rank whose log-probs engine and trainer compare where the trainer computes no others."""


def logged(
    name: str, *classes: type
) -> Callable[[Callable[Concatenate[Run, int, P], T]], Callable[Concatenate[Run, int, P], T]]:
    """Decorate a stage so that its result is read from the phase log where a run that was killed has written it.

    Args:
        name: of the phase.
        classes: dataclasses that may occur in the result.
    """

    def decorate(stage: Callable[Concatenate[Run, int, P], T]) -> Callable[Concatenate[Run, int, P], T]:
        @functools.wraps(stage)
        def run_once(run: Run, step: int, *args: P.args, **kwargs: P.kwargs) -> T:
            if run.phase_log is None:
                return stage(run, step, *args, **kwargs)
            return run.phase_log.get_or_compute(step, name, lambda: stage(run, step, *args, **kwargs), *classes)

        return run_once

    return decorate


# ROLLOUT


def restart_engine(run: Run, step: int, loss: str) -> None:
    """Start the rollout engine again after it was lost; the next weight sync fills it.

    Args:
        step: step that generates again.
        loss: how the engine was lost, in a sentence.

    Raises:
        EngineLostError: rollout.restarts are used up.
    """
    engine, limit, is_lost = run.engine, run.config.rollout.restarts, True
    assert isinstance(engine, RestartableEngine)
    while is_lost:
        if engine.num_restarts == limit:
            raise EngineLostError(f"{loss}; rollout.restarts = {limit} are used up")
        number = engine.num_restarts + 1
        if run.world.is_main:
            logger.warning(
                "%s; restart %d of rollout.restarts = %d, step %d generates again", loss, number, limit, step
            )
        run.recorder.show_restart(step, number)
        try:
            with run.recorder.timeline.span("restart_engine", step=step), unchanged_generators():
                run.memory.replace(["engine_weights", "engine_kv_cache"], engine.restart, step=step)
            run.weight_sync.connect()
            is_lost = False
        except EngineLostError as error:
            loss = str(error)


def restart_metrics(run: Run) -> Metrics:
    """Return how often this process has started the engine again; {} without rollout.restarts."""
    return {"rollout/restarts": run.engine.num_restarts} if isinstance(run.engine, RestartableEngine) else {}


@logged("rollout", Rollout)
def generate(run: Run, step: int, prompts: Sequence[Prompt]) -> tuple[list[Rollout], list[Rollout]]:
    """Return sampled responses to the prompts, and the greedy response to each where the estimator compares with it."""
    config = run.config
    with run.throughput.work("rollout") as work:
        sampled = sample(run, prompts, config.rollout, seed=config.run.seed, step=step)
        greedily = replace(config.rollout, temperature=0.0, group_size=1)
        greedy = sample(run, prompts, greedily, seed=config.run.seed, step=step) if config.needs_greedy else []
        responses = [*sampled, *greedy]
        work.add(sum(r.num_sampled for r in responses), generation_flops(run, responses))
    return sampled, greedy


def sample(
    run: Run,
    prompts: Sequence[Prompt],
    settings: RolloutConfig,
    *,
    seed: int,
    step: int,
    top_p: float = 1.0,
    environment_step: int | None = None,
) -> list[Rollout]:
    """Return responses to the prompts, or conversations where the run has environments.

    Args:
        settings: how to sample; temperature 0 is greedy decoding.
        seed, step: determine the samples.
        environment_step: determines what environments draw; None is `step`.
    """
    data = run.data
    if run.environments:
        with scoring.fail_together(run.world):
            return collect_conversations(
                prompts,
                run.engine,
                run.environments,
                settings,
                stop_token_ids=data.stop_token_ids,
                run_seed=seed,
                step=step,
                top_p=top_p,
                environment_step=environment_step,
            )
    arguments, stop_token_ids = (prompts, run.engine, data.tokenizer, settings), data.stop_token_ids
    if settings.temperature == 0:
        return rollout.generate_greedy(*arguments, stop_token_ids=stop_token_ids)
    return rollout.collect_rollouts(*arguments, stop_token_ids=stop_token_ids, run_seed=seed, step=step, top_p=top_p)


def generation_flops(run: Run, responses: Sequence[Rollout]) -> float | None:
    """Return the operations of generating responses; None if they are not known."""
    prompts = {r.prompt.prompt_id: len(r.prompt.token_ids) for r in responses}
    sequences = [(r.prompt.prompt_id, len(r.prompt.token_ids) + len(r.response_ids), r.num_sampled) for r in responses]
    return run.flops.generation(prompts, sequences)


# SCORE


def count(run: Run, work: Work, batch: TrainBatch, model: str, flops: Callable[..., float | None]) -> None:
    """Add the work of a model on a batch, which all ranks of a model-parallel group hold.

    Args:
        model: name of its shape.
        flops: run.flops.forward or run.flops.update.
    """
    lengths, copies = batch.sequence_lengths, run.world.size // run.data_parallel.size
    work.add(sum(lengths), flops(model, lengths, int(batch.response_mask.sum())), copies=copies)


@logged("scores", Scored)
def score_responses(run: Run, step: int, rollouts: Sequence[Rollout], greedy: Sequence[Rollout]) -> Scored:
    """Return the responses with their scores; the greedy responses' scores become their prompts' baselines."""
    with scoring.fail_together(run.world):
        scored = scoring.score_responses(rollouts, run.sources, run.config.reward)
    if not run.config.needs_greedy:
        return scored
    with scoring.fail_together(run.world):
        scores = scoring.score_responses(greedy, run.sources, run.config.reward).scores.tolist()
    return replace(scored, baselines={r.prompt.prompt_id: s for r, s in zip(greedy, scores, strict=True)})


def update_reference(run: Run, *, steps_done: int) -> None:
    """Move the reference towards the actor, every models.reference_sync_steps steps."""
    every = run.config.models.reference_sync_steps
    if every and steps_done > 0 and steps_done % every == 0 and isinstance(run.reference, MovingReference):
        run.reference.blend(run.actor, run.config.models.reference_mixup_alpha)


def make_batch(run: Run, scored: Scored) -> TrainBatch:
    """Return the batch of the responses with their rewards: scores after penalties, normalisation and clip."""
    return scoring.add_rewards(
        scored,
        run.config.reward,
        max_response_tokens=run.config.rollout.max_response_tokens,
        world=run.data_parallel,
        normalizer=run.normalizer,
    )


def packing(run: Run) -> logprobs.Packing:
    """Return how forwards without gradient pack sequences."""
    return logprobs.Packing(
        limit=run.limits.forward,
        world=run.data_parallel,
        do_others_wait=run.actor.first_wait is FirstWait.FORWARD,
    )


def compute_logprobs(run: Run, batch: TrainBatch, rollouts: Sequence[Rollout]) -> tuple[TrainBatch, Metrics]:
    """Return the batch with the log-probs of actor and reference, and the gap between engine and trainer.

    Raises:
        LogprobGapError: the gap is above rollout.max_logprob_gap.
    """
    config, pack, temperature = run.config, packing(run), run.config.rollout.temperature
    is_given = config.update.old_logprobs == "rollout"
    probe = make_train_batch(rollouts[:NUM_PROBED]) if is_given else batch
    with run.throughput.work("score") as work:
        old_logprobs = logprobs.token_logprobs(run.actor.forward, probe, pack, temperature=temperature)
        count(run, work, probe, "actor", run.flops.forward)
    probe = probe.with_fields(old_logprobs=old_logprobs)
    gap = logprobs.check_logprob_gap(probe, limit=max_logprob_gap(run), world=run.data_parallel)
    batch = batch.with_fields(old_logprobs=batch.rollout_logprobs if is_given else old_logprobs)
    if run.reference:
        pack = replace(pack, do_others_wait=pack.do_others_wait or run.shards_frozen)
        with run.throughput.work("score") as work:
            free = batch.with_fields(routed_experts=None)  # the reference chooses its own experts
            ref_logprobs = logprobs.token_logprobs(run.reference, free, pack, temperature=temperature)
            count(run, work, batch, "reference", run.flops.forward)
        batch = batch.with_fields(ref_logprobs=ref_logprobs)
    return batch, {"rollout/logprob_gap": gap}


def max_logprob_gap(run: Run) -> float:
    """Return rollout.max_logprob_gap; null is 1e-3 in float32 and 0.1 in bfloat16."""
    is_float32 = choose_dtype(run.config.models.dtype, run.world.device) == torch.float32
    return run.config.rollout.max_logprob_gap or (1e-3 if is_float32 else 0.1)


def compute_advantages(run: Run, batch: TrainBatch) -> tuple[TrainBatch, Metrics, Metrics]:
    """Return the batch with values, advantages and loss weights, this rank's sums of KL and correction, and kl_coef.

    The KL coefficient adapts to the KL of this step; the step itself uses the coefficient before.
    """
    config, critic, bootstrap_values = run.config, run.critic, None
    if critic:
        with run.throughput.work("score") as work:
            batch = batch.with_fields(values=logprobs.token_values(critic.forward, batch, packing(run)))
            count(run, work, batch, "critic", run.flops.forward)
            if config.advantage.bootstrap_truncated:
                bootstrap_values = logprobs.sequence_values(critic.forward, batch, packing(run))
                count(run, work, batch, "critic", run.flops.forward)
    kl_coef = run.kl.coef
    batch, sums = advantages.add_advantages(
        batch, config.advantage, run.data_parallel, kl_coef=kl_coef, bootstrap_values=bootstrap_values
    )
    batch, correction = loss_weights.add_loss_weights(batch, config.update)
    if run.reference:
        totals = torch.tensor([sums["kl"], len(batch)], dtype=torch.float64)
        kl, num_responses = run.data_parallel.sum(totals).tolist()
        run.kl.update(kl / num_responses, int(num_responses))
    return batch, sums | correction, {"kl_coef": kl_coef}


# UPDATE


def update_critic(run: Run, step: int, batch: TrainBatch) -> Metrics:
    """Take the critic's optimizer steps, if the run has a critic, and its snapshot where a checkpoint is due."""
    if run.critic is None:
        return {}
    config = run.config
    with run.throughput.work("update_critic") as work:
        metrics = updates.update_critic(
            run.critic,
            batch,
            config.update,
            run.data_parallel,
            seed=config.run.seed + step,
            max_response_tokens=config.rollout.max_response_tokens,
            limit=run.limits.critic,
        )
        for _ in range(config.update.num_epochs):
            count(run, work, batch, "critic", run.flops.update)
    if is_save_due(run, step):
        take_snapshot(run, "critic", run.critic)
    return {f"critic/{name}": value for name, value in metrics.items()}


def update_actor(run: Run, step: int, batch: TrainBatch) -> Metrics:
    """Take the actor's optimizer steps after the critic's warm-up, and its snapshot where a checkpoint is due."""
    metrics = train_actor(run, step, batch) if step > run.config.update.critic_warmup_steps else {}
    if is_save_due(run, step):
        take_snapshot(run, "actor", run.actor)
    return metrics


def train_actor(run: Run, step: int, batch: TrainBatch) -> Metrics:
    """Take the actor's optimizer steps on the batch, and update its EMA."""
    config, advantage, kl = run.config, run.config.advantage, None
    if run.reference and advantage.kl_in == "loss":
        kl = updates.KlInLoss(coef=run.kl.coef, estimator=advantage.kl_estimator, is_unbiased=advantage.kl_unbiased)
    with run.throughput.work("update_actor") as work:
        metrics = updates.update_actor(
            run.actor,
            batch,
            config.update,
            run.data_parallel,
            seed=config.run.seed + step,
            temperature=config.rollout.temperature,
            max_response_tokens=config.rollout.max_response_tokens,
            limit=run.limits.actor,
            kl=kl,
            ptx=run.ptx.next_batch if run.ptx else None,
            ptx_coef=config.ptx.coef if run.ptx else 0.0,
        )
        for _ in range(config.update.num_epochs):
            count(run, work, batch, "actor", run.flops.update)
    if run.ema:
        run.ema.update()
    return {f"actor/{name}": value for name, value in metrics.items()}


# Checkpoints


def is_save_due(run: Run, step: int) -> bool:
    """Return whether a checkpoint is due after this step; it is after the last one."""
    every = run.config.checkpoint.every_steps
    return bool(every) and (step % every == 0 or step == run.config.run.num_steps)


def is_unsaved(run: Run) -> bool:
    """Return whether no checkpoint was due at the last finished step."""
    step = run.finished.step
    return step > run.steps_done and not is_save_due(run, step)


def take_snapshot(run: Run, name: str, part: CheckpointPart | None) -> None:
    """Copy one part of the next checkpoint to the host; its tensors must be on the device."""
    if part:
        run.saver.snapshot(name, part)


def save(run: Run, step: int) -> None:
    """Start to write a checkpoint where one is due; with checkpoint.async_save the next step runs meanwhile."""
    run.finished.keep(step, run.counters, rank=run.world.rank)
    run.saver.raise_if_failed()
    if run.phase_log:
        run.phase_log.delete_up_to(run.saver.last_step)
    if not is_save_due(run, step):
        return
    start_saving(run)
    if not run.config.checkpoint.async_save:
        run.saver.wait()


def start_saving(run: Run) -> None:
    """Start to write the checkpoint of the last finished step; the snapshots of critic and actor are taken."""
    for name, part in run.saved_parts.items():
        take_snapshot(run, name, part)
    finished = run.finished
    state = finished.counters | {"run": run.folder.identity()}
    run.saver.start(finished.step, state, random_state=finished.random_state)


def finish_saving(run: Run) -> None:
    """Wait until the last checkpoint is complete; the phase log has nothing to replay after that."""
    run.saver.wait()
    if run.phase_log:
        run.phase_log.delete_all()


def end_preempted(run: Run) -> NoReturn:
    """Wait until the checkpoint of the last finished step is complete, and end the run; the phase log stays.

    Raises:
        PreemptedError: always.
    """
    run.saver.wait()
    step = run.saver.last_step
    kept = f"the checkpoint of step {step} is complete" if step else "no step is finished"
    raise PreemptedError(f"preempted by SIGTERM: {kept}, and the same command continues the run")
