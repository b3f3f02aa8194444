"""ColossalChat's `examples/community/ray/train_prompts_on_ray.py`, read at commit 4f9953be (April 2026).

At that commit it cannot run because modules that it imports are missing; its arguments still have a clear meaning.
"""

from pathlib import PurePath

from .program import Command, Program, fixed, maps, moot
from .reading import count

PROMPT_TOKENS, SEQUENCE_TOKENS = 96, 128
ONE_POOL = "models have no GPUs of their own here; every GPU holds a shard of every model"


def _num_actors(c: Command) -> int:
    return c["num_actor_nodes"] * c["num_gpus_per_node"]


def _num_steps(c: Command) -> int:
    return max(1, c["num_episodes"] * c["max_timesteps"] // c["update_timesteps"])


ARGUMENTS = (
    maps(
        "prompt_csv_url",
        str,
        "",
        "prompts.path",
        note="in ColossalChat each rank draws rows at random; here an epoch has each row once",
    ),
    fixed("columns", "", "prompts.answer_column"),
    fixed(
        "lengths",
        "ColossalChat truncates prompts to 96 tokens and sequences to 128, prompt included; here a longer prompt is "
        "dropped and every response may have 32 tokens",
        "prompts.max_prompt_tokens",
        "prompts.overlong_prompts",
        "rollout.max_response_tokens",
    ),
    maps(
        "strategy",
        str,
        "ddp",
        "update.zero_stage",
        "memory.swap",
        choices={"ddp": 1, "colossalai_gemini": 3, "colossalai_zero2": 2},
        note="ddp becomes ZeRO 1, which gives the same result with less memory",
        when=lambda c: c["strategy"] == "ddp",
    ),
    moot("model", str, "the architecture is read from the model's folder"),
    maps(
        "pretrain",
        str,
        "gpt2",
        "models.actor",
        note="ColossalChat takes this model for the reward, too, with an untrained head, whose scores mean nothing; "
        "set models.reward to a trained sequence classifier",
        when=lambda c: True,
    ),
    maps("save_path", str, "actor_checkpoint_prompts.pt", "run.dir", "run.name"),
    maps(
        "need_optim_ckpt",
        str,
        "",
        "checkpoint.every_steps",
        note="ColossalChat takes any text as true, even 'False'",
    ),
    maps("num_episodes", count, 10, "run.num_steps"),
    maps("max_timesteps", count, 10, "run.num_steps"),
    maps(
        "update_timesteps",
        count,
        10,
        "run.num_steps",
        "rollout.rollout_batch_size",
        note="a batch is what ColossalChat collects between two updates, all of it with the same weights",
        when=lambda c: True,
    ),
    maps(
        "experience_batch_size",
        count,
        8,
        "rollout.rollout_batch_size",
        "update.mini_batch_size",
        "update.micro_batch_tokens",
        note="counted per actor rank in ColossalChat, over all ranks here",
        when=lambda c: True,
    ),
    moot("train_batch_size", int, "ColossalChat never reads it"),
    maps(
        "num_actor_nodes",
        count,
        1,
        "rollout.rollout_batch_size",
        "update.mini_batch_size",
        note=f"{ONE_POOL}, and the number of actor ranks only sizes the batches",
    ),
    moot("num_critic_nodes", int, ONE_POOL),
    moot("num_initial_nodes", int, ONE_POOL),
    moot("num_reward_nodes", int, ONE_POOL),
    maps("num_gpus_per_node", count, 1, "rollout.rollout_batch_size", "update.mini_batch_size"),
    fixed("optimizer", "", "update.actor.lr", "update.critic.lr", "update.actor.betas", "update.critic.betas"),
    fixed("KL", "", "advantage.kl_coef"),
    fixed(
        "advantages",
        "ColossalChat's are reward minus value, without GAE and whitening; lambda 1 comes closest, in which the KL of "
        "later tokens counts, too",
        "advantage.gae_lambda",
        "advantage.whiten",
    ),
    fixed(
        "score",
        "ColossalChat clips the score to [-5, 5] and adds it at every token; here the last token alone gets it",
        "reward.clip",
    ),
    fixed("engine", "ColossalChat generates with transformers, here vLLM does", "rollout.kv_cache_memory_bytes"),
    fixed(
        "sampling",
        "ColossalChat samples from the 50 likeliest tokens but takes log-probs over all; here both are over all tokens",
    ),
    fixed("loss", "ColossalChat bounds the ratio by 10 before it clips", "update.aggregation", "update.value_clip"),
)

RULES = {
    "run.num_steps": _num_steps,
    "run.dir": lambda c: str(PurePath(c["save_path"]).parent),
    "run.name": lambda c: PurePath(c["save_path"]).name,
    "models.actor": lambda c: c["pretrain"],
    "prompts.answer_column": lambda c: None,
    "prompts.max_prompt_tokens": lambda c: PROMPT_TOKENS,
    "prompts.overlong_prompts": lambda c: "drop",
    "rollout.max_response_tokens": lambda c: SEQUENCE_TOKENS - PROMPT_TOKENS,
    "rollout.kv_cache_memory_bytes": lambda c: None,
    "rollout.rollout_batch_size": lambda c: c["experience_batch_size"] * c["update_timesteps"] * _num_actors(c),
    "reward.clip": lambda c: 5.0,
    "advantage.kl_coef": lambda c: 0.1,
    "advantage.gae_lambda": lambda c: 1.0,
    "advantage.whiten": lambda c: False,
    "update.mini_batch_size": lambda c: c["experience_batch_size"] * _num_actors(c),
    "update.micro_batch_tokens": lambda c: c["experience_batch_size"] * SEQUENCE_TOKENS,
    "update.value_clip": lambda c: 0.4,
    "update.aggregation": lambda c: "sequence_mean",
    "update.actor.lr": lambda c: 5e-6,
    "update.critic.lr": lambda c: 5e-6,
    "update.actor.betas": lambda c: [0.9, 0.999],
    "update.critic.betas": lambda c: [0.9, 0.999],
    "memory.swap": lambda c: "auto" if c["strategy"] != "ddp" else "off",
    "checkpoint.every_steps": lambda c: _num_steps(c) if c["need_optim_ckpt"] else 0,
}

PROGRAM = Program(
    title="ColossalChat's train_prompts_on_ray.py",
    names=("train_prompts_on_ray.py",),
    arguments=ARGUMENTS,
    rules=RULES,
)
