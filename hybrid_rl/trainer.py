"""The whole run on one page: who is on the GPU in which phase, the loop, and what each phase does."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from hybrid_rl import checkpoint, rollout, update
from hybrid_rl import score as scoring
from hybrid_rl.batch import Rollout, TrainBatch
from hybrid_rl.build import Run, build
from hybrid_rl.config import Config
from hybrid_rl.memory import Phase
from hybrid_rl.models import choose_dtype
from hybrid_rl.validate import validate

SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase

RESIDENCY = {
    "engine_weights": frozenset({SYNC, ROLLOUT}),
    "engine_kv_cache": frozenset({ROLLOUT}),
    "reference": frozenset({SCORE}),
    "reward_model": frozenset({SCORE}),
    "critic_states": frozenset({UPDATE_CRITIC}),
    "actor_states": frozenset({UPDATE_ACTOR}),
    # Parameters of actor and critic stay: DeepSpeed cannot bring them back without the optimizer states.
}

Metrics = dict[str, float]


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
            rollouts = generate(run, step)
        with phase(run, SCORE, step):
            batch, sums, gap = score(run, rollouts)
        with phase(run, UPDATE_CRITIC, step):
            critic_metrics = learn_values(run, batch, step)
        with phase(run, UPDATE_ACTOR, step):
            actor_metrics = learn_policy(run, batch, step)
        state = pushed.metrics() | {f"memory/{where.value}_bytes": n for where, n in run.memory.used_bytes.items()}
        run.recorder.step(step, rollouts, batch, sums, evaluation | gap | critic_metrics | actor_metrics | state)
        save(run, step)
    run.recorder.summary(first, last)
    if config.checkpoint.export:
        checkpoint.export(config.run_dir / "export", run.actor, run.data.tokenizer, run.world)
    return last


@contextmanager
def phase(run: Run, which: Phase, step: int) -> Iterator[None]:
    """Open a phase and show it."""
    run.recorder.show_phase(which.value)
    with run.memory.phase(which, step):
        yield


def generate(run: Run, step: int) -> list[Rollout]:
    """Take the next prompts and sample their responses."""
    return rollout.collect_rollouts(
        run.data.loader.next_batch(),
        run.engine,
        run.data.tokenizer,
        run.config.rollout,
        stop_token_ids=run.data.stop_token_ids,
        run_seed=run.config.run.seed,
        step=step,
    )


def evaluate(run: Run, step: int, is_over: bool) -> Metrics:
    """Return exact accuracy on the held-out prompts, before step 1, every few steps and at the end; else nothing."""
    every = run.config.run.eval_every_steps
    if run.data.eval_scorer is None or not (is_over or step == 1 or (step - 1) % every == 0):
        return {}
    responses = rollout.generate_greedy(
        run.data.eval_prompts,
        run.engine,
        run.data.tokenizer,
        run.config.rollout,
        stop_token_ids=run.data.stop_token_ids,
    )
    scores = run.data.eval_scorer.score(responses).scores
    sums = {
        "accuracy": float(sum(value >= 1 for value in scores)),
        "eval/score": sum(scores),
        "eval/response_length": float(sum(len(r.response_ids) for r in responses)),
    }
    return run.world.means(sums, dict.fromkeys(sums, len(responses)))


def has_arrived(run: Run, evaluation: Metrics) -> bool:
    """Return whether an evaluation reached the accuracy at which the run may end."""
    goal = run.config.run.stop_at_accuracy
    return goal is not None and evaluation.get("accuracy", -1.0) >= goal


def score(run: Run, rollouts: Sequence[Rollout]) -> tuple[TrainBatch, Metrics, Metrics]:
    """Return the batch ready for the updates, this rank's sums of its rewards, and the gap between the engines."""
    config, world, actor, critic = run.config, run.world, run.actor, run.critic
    packing = scoring.Packing(max_tokens=config.update.micro_batch_tokens, world=world)
    temperature = config.rollout.temperature
    batch, sums = scoring.score_rollouts(
        rollouts, packing, config.reward, scorer=run.data.scorer, reward_model=run.reward_model
    )
    batch = batch.with_fields(
        old_logprobs=scoring.token_logprobs(actor.forward, batch, packing, temperature=temperature)
    )
    gap = scoring.check_logprob_gap(batch, limit=max_logprob_gap(run), world=world)
    if run.reference:
        ref_logprobs = scoring.token_logprobs(run.reference, batch, packing, temperature=temperature)
        batch = batch.with_fields(ref_logprobs=ref_logprobs)
    bootstrap_values = None
    if critic:
        batch = batch.with_fields(values=scoring.token_values(critic.forward, batch, packing))
        if config.advantage.bootstrap_truncated:
            bootstrap_values = scoring.sequence_values(critic.forward, batch, packing)
    batch, more = scoring.add_advantages(batch, config.advantage, world, bootstrap_values=bootstrap_values)
    return batch, sums | more, {"rollout/logprob_gap": gap}


def max_logprob_gap(run: Run) -> float:
    """Return the gap between engine and trainer at which the run stops: rounding noise of the dtype, with room."""
    is_float32 = choose_dtype(run.config.models.dtype, run.world.device) == torch.float32
    return run.config.rollout.max_logprob_gap or (1e-3 if is_float32 else 0.1)


def learn_values(run: Run, batch: TrainBatch, step: int) -> Metrics:
    """Update the critic, if the run has one."""
    if run.critic is None:
        return {}
    config = run.config
    metrics = update.update_critic(
        run.critic,
        batch,
        config.update,
        run.world,
        seed=config.run.seed + step,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return {f"critic/{name}": value for name, value in metrics.items()}


def learn_policy(run: Run, batch: TrainBatch, step: int) -> Metrics:
    """Update the actor, once the critic has warmed up."""
    config = run.config
    if step <= config.update.critic_warmup_steps:
        return {}
    metrics = update.update_actor(
        run.actor,
        batch,
        config.update,
        run.world,
        seed=config.run.seed + step,
        temperature=config.rollout.temperature,
        max_response_tokens=config.rollout.max_response_tokens,
    )
    return {f"actor/{name}": value for name, value in metrics.items()}


def save(run: Run, step: int) -> None:
    """Write a checkpoint if one is due after this step; the last step always is."""
    every = run.config.checkpoint.every_steps
    if not every or (step % every and step != run.config.run.num_steps):
        return
    engines = {"actor": run.actor} | ({"critic": run.critic} if run.critic else {})
    state = {"loader": run.data.loader.state_dict()}
    checkpoint.save(
        run.config.run_dir, step, engines, state, keep_last=run.config.checkpoint.keep_last, world=run.world
    )
