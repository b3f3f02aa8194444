"""ColossalChat's `examples/training_scripts/train_grpo.py`, read at commit 4f9953be (April 2026)."""

from .coati_shared import (
    CHECKPOINTS,
    DATA,
    LOOP,
    OPTIMIZERS,
    OUTPUT,
    PLUGIN,
    PTX,
    REWARD_FUNCTIONS,
    RULES,
    functions,
    num_gpus,
    weights,
)
from .program import Command, Program, fixed, lost, maps, moot
from .reading import count, finite


def _reward(c: Command) -> str | None:
    return c["rm_checkpoint_path"] or c["rm_pretrain"]


def _functions(c: Command) -> list[str]:
    return [] if _reward(c) else functions(c["reward_functions"] or [])


def _function_weights(c: Command) -> list[float] | None:
    """Return ColossalChat's weights: 1 for the format, per function, and 9 more per right answer."""
    num_answers = len(_functions(c)) - 1
    return [1.0 * num_answers] + [9.0] * num_answers if num_answers > 0 else None


MODELS = (
    maps("pretrain", str, "", "models.actor"),
    maps("rm_pretrain", str, None, "models.reward", "reward.functions", "reward.weights"),
    *CHECKPOINTS,
)
ALGORITHM = (
    fixed("estimator", "", "advantage.estimator"),
    maps("num_generations", count, 8, "rollout.group_size"),
    maps("lr", finite, 1e-6, "update.actor.lr"),
    fixed(
        "schedule",
        "ColossalChat plans the cosine over num_episodes but advances it with every optimizer step, so that it ends "
        "early; here it spans the run's optimizer steps",
        "update.actor.schedule",
        "update.actor.min_lr_ratio",
    ),
    maps(
        "kl_coef",
        finite,
        0.7,
        "advantage.kl_coef",
        note="ColossalChat subtracts the mean KL of a response from its reward before it compares the group; here a "
        "token's advantage loses that token's KL",
        when=lambda c: c["kl_coef"] != 0,
    ),
    fixed("group std", "ColossalChat adds 1e-4 to the group's standard deviation, here it is 1e-6"),
    maps(
        "initial_temperature",
        finite,
        1.0,
        "rollout.temperature",
        note="ColossalChat samples from the 50 likeliest tokens but takes log-probs over all, at temperature 1; here "
        "both are over all tokens at rollout.temperature",
        when=lambda c: True,
    ),
    lost(
        "final_temperature",
        finite,
        0.9,
        "the temperature stays at its initial value",
        when=lambda c: c["final_temperature"] != c["initial_temperature"],
    ),
    moot("max_tokens_thinking", int, "ColossalChat's generation does not read it"),
    fixed("sampling seed", "ColossalChat sets seed 41 before every generation; here each sample has its own seed"),
    fixed(
        "loss",
        "ColossalChat skips a step whose mean ratio is above 20, bounds the ratio by 10, and averages the loss over "
        "each response",
        "update.aggregation",
    ),
    maps(
        "reward_functions",
        str,
        None,
        "reward.functions",
        "reward.weights",
        choices=REWARD_FUNCTIONS,
        num_values=None,
        note="ColossalChat gives 1 for the format and 10 for a right answer in it; here a right answer in a wrong "
        "format counts, too, and math compares expressions instead of texts",
    ),
    moot("inference_batch_size", int, "the engine batches requests itself"),
    moot("logits_forward_batch_size", int, "forwards are packed by update.micro_batch_tokens"),
)

PROGRAM = Program(
    title="ColossalChat's train_grpo.py",
    names=("train_grpo.py",),
    arguments=MODELS + DATA + LOOP + OPTIMIZERS + ALGORITHM + PTX + PLUGIN + OUTPUT,
    rules={
        **RULES,
        "models.actor": lambda c: weights(c["checkpoint_path"], c["pretrain"]),
        "models.reward": _reward,
        "prompts.answer_column": lambda c: None if _reward(c) else "gt_answer",
        "reward.functions": _functions,
        "reward.weights": _function_weights,
        "advantage.estimator": lambda c: "grpo",
    },
    num_gpus=num_gpus,
)
