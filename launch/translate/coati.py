"""ColossalChat's `examples/training_scripts/train_ppo.py`, read at commit 4f9953be (April 2026)."""

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
from .program import Command, Program, fixed, maps
from .reading import finite


def _reward(c: Command) -> str | None:
    return None if c["no_neural_reward_model"] else c["rm_checkpoint_path"] or c["rm_pretrain"]


def _functions(c: Command) -> list[str]:
    return functions(c["reward_functions"] or [] if c["no_neural_reward_model"] else [])


def _function_weights(c: Command) -> list[float] | None:
    """Return ColossalChat's weights, doubled: 1 for the format, per function, and 9 more per right answer."""
    num_answers = len(_functions(c)) - 1
    return [2.0 * num_answers] + [18.0] * num_answers if num_answers > 0 else None


MODELS = (
    maps("pretrain", str, "", "models.actor"),
    maps(
        "rm_pretrain",
        str,
        None,
        "models.reward",
        "models.critic",
        note="ColossalChat adds an untrained head if there is none; here a reward model is a trained classifier",
    ),
    *CHECKPOINTS,
    maps(
        "critic_checkpoint_path",
        str,
        None,
        "models.critic",
        note="a path with 'modeling' in it holds the weights; a training state cannot be read here",
    ),
)
ALGORITHM = (
    maps("lr", finite, 9e-6, "update.actor.lr", "update.critic.min_lr_ratio"),
    maps("critic_lr", finite, 9e-6, "update.critic.lr", "update.critic.min_lr_ratio"),
    fixed(
        "schedule",
        "ColossalChat plans the cosine over num_episodes but advances it with every optimizer step, so that it ends "
        "early; here it spans the run's optimizer steps",
        "update.actor.schedule",
        "update.critic.schedule",
        "update.actor.min_lr_ratio",
    ),
    maps("kl_coef", finite, 0.1, "advantage.kl_coef"),
    fixed(
        "score",
        "ColossalChat clips the score to [-5, 5] and adds it at every token, so that early tokens get it many times; "
        "here the last token alone gets it",
        "reward.clip",
    ),
    fixed(
        "advantages", "ColossalChat does not whiten them; GAE has gamma 1 and lambda 0.95 in both", "advantage.whiten"
    ),
    fixed(
        "sampling",
        "ColossalChat samples at temperature 0.7 from the 50 likeliest tokens but takes log-probs at temperature 1 "
        "over all tokens; here both are at 0.7 over all tokens",
        "rollout.temperature",
    ),
    fixed("sampling seed", "ColossalChat sets seed 41 before every generation; here each sample has its own seed"),
    fixed("value clip", "", "update.value_clip"),
    fixed(
        "loss",
        "ColossalChat skips a step whose mean ratio is above 20, bounds the ratio by 10, and averages the policy loss "
        "over each response, the value loss over tokens; here both are averaged over each response",
        "update.aggregation",
    ),
    maps(
        "no_neural_reward_model",
        bool,
        False,
        "models.reward",
        "models.critic",
        "reward.functions",
        "reward.weights",
    ),
    maps(
        "reward_functions",
        str,
        None,
        "reward.functions",
        "reward.weights",
        choices=REWARD_FUNCTIONS,
        num_values=None,
        note="ColossalChat gives 1 for the format and 10 for a right answer in it, counts each function twice, and "
        "clips the sum to 5; here a right answer in a wrong format counts, too",
    ),
)

PROGRAM = Program(
    title="ColossalChat's train_ppo.py",
    names=("train_ppo.py",),
    arguments=MODELS + DATA + LOOP + OPTIMIZERS + ALGORITHM + PTX + PLUGIN + OUTPUT,
    rules={
        **RULES,
        "models.actor": lambda c: weights(c["checkpoint_path"], c["pretrain"]),
        "models.reward": _reward,
        "models.critic": lambda c: weights(c["critic_checkpoint_path"], c["rm_pretrain"]),
        "prompts.answer_column": lambda c: "gt_answer" if c["no_neural_reward_model"] else None,
        "rollout.temperature": lambda c: 0.7,
        "reward.functions": _functions,
        "reward.weights": _function_weights,
        "reward.clip": lambda c: 5.0,
        "advantage.whiten": lambda c: False,
        "update.value_clip": lambda c: 0.2,
        "update.critic.schedule": lambda c: "cosine",
        "update.critic.min_lr_ratio": lambda c: 0.1 * c["lr"] / (c["critic_lr"] or 1.0),
    },
    num_gpus=num_gpus,
)
