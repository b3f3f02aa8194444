"""The whole run on one page: who is on the GPU in which phase, and the loop. `stages.py` has what each phase does."""

from collections.abc import Iterator
from contextlib import contextmanager

from hybrid_rl.build import Run, build
from hybrid_rl.config import Config
from hybrid_rl.memory.phases import Phase
from hybrid_rl.rewards.scoring import Filter, Scored, spread_by_tokens
from hybrid_rl.stages import (
    Metrics,
    evaluate,
    export,
    finish,
    generate,
    has_arrived,
    is_unsaved,
    judge,
    keep_best,
    learn_policy,
    learn_values,
    refresh_reference,
    save,
    score,
    start_saving,
)
from hybrid_rl.validate import validate

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase

RESIDENCY = {
    "engine_weights": frozenset({SYNC, ROLLOUT}),
    "engine_kv_cache": frozenset({ROLLOUT}),
    "reference": frozenset({SCORE}),
    "reward_model": frozenset({SCORE}),
    "critic_parameters": frozenset({SCORE, UPDATE_CRITIC}),
    "critic_states": frozenset({UPDATE_CRITIC}),
    "actor_parameters": frozenset({SYNC, SCORE, UPDATE_ACTOR}),
    "actor_states": frozenset({UPDATE_ACTOR}),
}


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
            pushed = run.sync.push()
        with phase(run, ROLLOUT, step):
            evaluation = evaluate(run, step, is_over)
            first, last = first or evaluation, evaluation or last
            if is_over or has_arrived(run, evaluation):
                break
            rollouts, greedy = generate(run, run.data.loader.next_batch(), step)
        with phase(run, SCORE, step):
            scored = judge(run, rollouts, greedy, step)
        scored, filtered = refill(run, scored, step)
        scored = spread_by_tokens(scored, run.world, run.batch_world)
        with phase(run, SCORE, step):
            keep_best(run, evaluation, step)
            refresh_reference(run, step)
            batch, sums, state = score(run, scored)
        with phase(run, UPDATE_CRITIC, step):
            critic_metrics = learn_values(run, batch, step)
        with phase(run, UPDATE_ACTOR, step):
            actor_metrics = learn_policy(run, batch, step)
        state |= pushed.metrics() | run.memory.measured.metrics()
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
                run.sync.push()
            with phase(run, ROLLOUT, step):
                rollouts, greedy = generate(run, fresh, step)
            with phase(run, SCORE, step):
                scored = judge(run, rollouts, greedy, step)
        seen |= {i for ids in world.gather({r.prompt.prompt_id for r in scored.rollouts}) for i in ids}
        if kept.add(scored) >= wanted:
            break
    return kept.take(wanted, seed=run.config.run.seed + step)
