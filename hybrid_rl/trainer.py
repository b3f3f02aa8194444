"""The training loop on one page. `stages.py` has what each phase does, `memory/residency.py` which tenants it needs."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.build import build
from hybrid_rl.config import Config
from hybrid_rl.errors import EngineLostError
from hybrid_rl.evaluation import evaluate, is_target_reached
from hybrid_rl.exports import (
    export_actor,
    export_actor_of,
    export_critic,
    export_critic_of,
    has_final_critic,
    keep_best,
)
from hybrid_rl.memory.residency import ROLLOUT, SCORE, SYNC, UPDATE_ACTOR, UPDATE_CRITIC, Phase
from hybrid_rl.monitoring.start import Start
from hybrid_rl.rewards.filtering import DynamicFilter
from hybrid_rl.rewards.scoring import Scored, balance_by_tokens
from hybrid_rl.run import Metrics, Run
from hybrid_rl.stages import (
    compute_advantages,
    compute_logprobs,
    end_preempted,
    finish_saving,
    generate,
    is_unsaved,
    make_batch,
    restart_engine,
    restart_metrics,
    save,
    score_responses,
    start_saving,
    take_snapshot,
    update_actor,
    update_critic,
    update_reference,
)
from hybrid_rl.weights.sync import SyncReport

T = TypeVar("T")


def train(config: Config, start: Start | None = None) -> Metrics:
    """Run the steps that are not done yet and return the last evaluation; every rank calls it.

    Args:
        config: settings of the run.
        start: stages of the start so far; None for a start that begins here.

    Raises:
        ConfigError: a setting or an input file cannot work; before any model loads.
    """
    run = build(config, start)
    try:
        with run.recorder, run.preemption:
            return loop(run)
    finally:
        run.close()


def loop(run: Run) -> Metrics:
    """Train step by step until all steps are done or an evaluation reaches the target accuracy."""
    num_steps = run.config.run.num_steps
    for step in range(run.steps_done + 1, num_steps + 1):
        if not train_step(run, step):
            return finish(run, step - 1)
    roll_out(run, num_steps + 1, lambda: evaluate(run, num_steps + 1, is_final=True))
    return finish(run, num_steps)


def train_step(run: Run, step: int) -> bool:
    """Run the phases of one step; return False instead of training if its evaluation reaches the target accuracy."""
    prompts = run.data.loader.next_batch()
    synced, (evaluation, responses) = roll_out(run, step, lambda: evaluate_and_generate(run, step, prompts))
    if responses is None:
        return False
    with phase(run, SCORE, step):
        scored = score_responses(run, step, *responses)
    scored, filtering = filter_groups(run, scored, step)
    scored = balance_by_tokens(scored, run.world, run.data_parallel)
    with phase(run, SCORE, step):
        keep_best(run, evaluation, steps_done=step - 1)
        update_reference(run, steps_done=step - 1)
        batch = make_batch(run, scored)
        batch, logprob_gap = compute_logprobs(run, batch, scored.rollouts)
        batch, sums, kl = compute_advantages(run, batch)
    with phase(run, UPDATE_CRITIC, step):
        critic = update_critic(run, step, batch)
        export_critic_of(run, step)
    with phase(run, UPDATE_ACTOR, step):
        actor = update_actor(run, step, batch)
        export_actor_of(run, step)
    state = logprob_gap | kl | synced.metrics() | restart_metrics(run) | run.memory.device_memory.metrics()
    state |= run.throughput.metrics()
    metrics = evaluation | filtering | critic | actor | state
    sums, counts, details = scored.sums | sums, scored.counts, scored.details
    run.recorder.step(step, scored.rollouts, batch, sums, metrics, counts=counts, details=details)
    save(run, step)
    return True


def roll_out(run: Run, step: int, work: Callable[[], T]) -> tuple[SyncReport, T]:
    """Sync the weights and let the engine work; where it is lost, repeat both with a new one.

    Raises:
        EngineLostError: rollout.restarts are used up.
    """
    while True:
        try:
            with phase(run, SYNC, step):
                synced = run.weight_sync.sync()
            with phase(run, ROLLOUT, step):
                return synced, work()
        except EngineLostError as error:
            if not run.config.rollout.restarts:
                raise
            loss = str(error)  # the error itself holds tensors, by its trace
        restart_engine(run, step, loss)


def evaluate_and_generate(
    run: Run, step: int, prompts: Sequence[Prompt]
) -> tuple[Metrics, tuple[list[Rollout], list[Rollout]] | None]:
    """Return the evaluation of a step and the responses of `generate`; None if the evaluation ends the run."""
    evaluation = evaluate(run, step)
    return evaluation, None if is_target_reached(run, evaluation) else generate(run, step, prompts)


def finish(run: Run, last_step: int) -> Metrics:
    """Save and export what the run has trained; return the last evaluation."""
    if run.config.checkpoint.every_steps:
        save_unsaved(run)
    finish_saving(run)
    evaluations = run.evaluations
    run.recorder.summary(evaluations.first, evaluations.last)
    with phase(run, SYNC, last_step + 1):  # in ROLLOUT the actor's weights need not be on the GPU
        keep_best(run, evaluations.last, steps_done=last_step)
        export_actor(run)
    if has_final_critic(run):
        with phase(run, UPDATE_CRITIC, last_step + 1):
            export_critic(run)
    return evaluations.last


def save_unsaved(run: Run) -> None:
    """Start to write the checkpoint of the last finished step where none was due."""
    if is_unsaved(run):
        with phase(run, UPDATE_CRITIC, run.finished.step):
            take_snapshot(run, "critic", run.critic)
        with phase(run, UPDATE_ACTOR, run.finished.step):
            take_snapshot(run, "actor", run.actor)
        start_saving(run)


@contextmanager
def phase(run: Run, which: Phase, step: int) -> Iterator[None]:
    """Open a phase and show it on the display; in a run that is to end, save the last finished step instead.

    SYNC, ROLLOUT and SCORE open before their step changes anything that a checkpoint holds as tensors.

    Raises:
        PreemptedError: the checkpoint is complete.
    """
    if which in (SYNC, ROLLOUT, SCORE) and run.preemption.is_asked():
        save_unsaved(run)
        end_preempted(run)
    run.recorder.show_phase(which.value, step)
    with run.memory.phase(which, step):
        yield


def filter_groups(run: Run, scored: Scored, step: int) -> tuple[Scored, Metrics]:
    """Replace groups whose rewards carry no gradient by groups of further prompts; without dynamic filtering, keep all.

    Source: Yu et al. 2025 (DAPO), section 3.2.
    """
    config = run.config.rollout
    if config.dynamic_filtering_reward_range is None:
        return scored, {}
    kept = DynamicFilter(config.dynamic_filtering_reward_range, run.world)
    kept.add(scored)
    for _ in range(config.dynamic_filtering_max_retries):
        if kept.num_groups >= config.rollout_batch_size:
            break
        prompts = [prompt for prompt in run.data.loader.next_batch() if prompt.prompt_id not in kept.seen]
        _, responses = roll_out(run, step, partial(generate, run, step, prompts))
        with phase(run, SCORE, step):
            kept.add(score_responses(run, step, *responses))
    return kept.take(config.rollout_batch_size, seed=run.config.run.seed + step)
