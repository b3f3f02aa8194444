"""The whole run on one page: who is on the GPU in which phase, and the loop. `stages.py` has what each phase does."""

from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_rl.build import build
from hybrid_rl.config import Config
from hybrid_rl.memory.residency import RESIDENCY, ROLLOUT, SCORE, SYNC, UPDATE_ACTOR, UPDATE_CRITIC, Phase
from hybrid_rl.rewards.scoring import Filter, Scored, balance_by_tokens
from hybrid_rl.run import Run
from hybrid_rl.stages import (
    Metrics,
    evaluate,
    export,
    finish,
    generate,
    is_unsaved,
    judge,
    keep_best,
    reached_accuracy,
    refresh_reference,
    save,
    score,
    start_saving,
    update_actor,
    update_critic,
)
from hybrid_rl.validate import validate


def train(config: Config) -> Metrics:
    """Run the steps that are not done yet and return the last evaluation; every rank calls it.

    Raises:
        ConfigError: a setting or an input file cannot work; before any model loads.
    """
    run = build(validate(config), RESIDENCY)
    try:
        with run.recorder:
            return loop(run)
    finally:
        run.close()


def loop(run: Run) -> Metrics:
    """Alternate the phases until all steps are done or the accuracy asked for is reached."""
    config = run.config
    first: Metrics = {}
    last: Metrics = {}
    for step in range(run.steps_done + 1, config.run.num_steps + 2):
        is_over = step > config.run.num_steps
        with phase(run, SYNC, step):
            synced = run.weight_sync.sync()
        with phase(run, ROLLOUT, step):
            evaluation = evaluate(run, step, is_over)
            first, last = first or evaluation, evaluation or last
            if is_over or reached_accuracy(run, evaluation):
                break
            rollouts, greedy = generate(run, run.data.loader.next_batch(), step)
        with phase(run, SCORE, step):
            scored = judge(run, rollouts, greedy, step)
        scored, filtered = refill(run, scored, step)
        scored = balance_by_tokens(scored, run.world, run.data_parallel)
        with phase(run, SCORE, step):
            keep_best(run, evaluation, step)
            refresh_reference(run, step)
            batch, sums, state = score(run, scored)
        with phase(run, UPDATE_CRITIC, step):
            critic_metrics = update_critic(run, batch, step)
        with phase(run, UPDATE_ACTOR, step):
            actor_metrics = update_actor(run, batch, step)
        state |= synced.metrics() | run.memory.measured.metrics()
        metrics = evaluation | filtered | critic_metrics | actor_metrics | state
        run.recorder.step(step, scored.rollouts, batch, sums, metrics)
        save(run, step)
    save_early_end(run, step - 1)
    finish(run)
    run.recorder.summary(first, last)
    with run.memory.phase(SYNC, step):  # the actor's weights are not on the GPU while the engine generates
        keep_best(run, evaluation, step)
        export(run)
    return last


@contextmanager
def phase(run: Run, which: Phase, step: int) -> Iterator[None]:
    """Open a phase and show it."""
    run.recorder.show_phase(which.value, step)
    with run.memory.phase(which, step):
        yield


def save_early_end(run: Run, step: int) -> None:
    """Begin to write the last step's checkpoint where the run ended before one was due."""
    if is_unsaved(run, step):
        with phase(run, UPDATE_CRITIC, step):
            if run.critic:
                run.saver.take("critic", run.critic)
        with phase(run, UPDATE_ACTOR, step):
            run.saver.take("actor", run.actor)
        start_saving(run, step)


def refill(run: Run, scored: Scored, step: int) -> tuple[Scored, Metrics]:
    """Replace the groups that teach nothing by those of further prompts; nothing to do without dynamic filtering."""
    bounds, world, wanted = run.config.rollout.keep_scores, run.world, run.config.rollout.rollout_batch_size
    if bounds is None:
        return scored, {}
    kept, seen = Filter(bounds, world), set[int]()
    for attempt in range(run.config.rollout.max_refills + 1):
        if attempt:
            fresh = [prompt for prompt in run.data.loader.next_batch() if prompt.prompt_id not in seen]
            with phase(run, SYNC, step):
                run.weight_sync.sync()
            with phase(run, ROLLOUT, step):
                rollouts, greedy = generate(run, fresh, step)
            with phase(run, SCORE, step):
                scored = judge(run, rollouts, greedy, step)
        seen |= {i for ids in world.all_gather({r.prompt.prompt_id for r in scored.rollouts}) for i in ids}
        if kept.add(scored) >= wanted:
            break
    return kept.take(wanted, seed=run.config.run.seed + step)
