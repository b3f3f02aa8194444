"""ColossalChat's `examples/training_scripts/train_ppo.py`, read at commit 4f9953be (April 2026)."""

from pathlib import PurePath
from typing import Any

from launch.translate.program import KEEP_DEFAULT, Command, Program, fixed, lost, maps, moot

NO_PIPELINE = "there are no pipeline stages; update.zero_stage = 3 or update.tensor_parallel_size splits the model"
EACH_PROCESS = "counted per process in ColossalChat, over all ranks here"
REWARD_FUNCTIONS = {"gsm8k_reward_fn": "gsm8k", "math_competition_reward_fn": "math"}
ZERO_STAGES = {"gemini": 3, "gemini_auto": 3, "zero2": 2, "zero2_cpu": 2}


def _num_data_parallel(c: Command) -> int:
    """Return the number of processes with different prompts; 1 if the command line does not name its launcher."""
    return max(1, (c.num_processes or 1) // (c["tp"] * c["pp"] * c["sp"]))


def _responses(c: Command) -> int:
    return c["num_collect_steps"] * c["experience_batch_size"] * _num_data_parallel(c)


def _coati_mini_batch_size(c: Command) -> int:
    return c["train_batch_size"] * c["accumulation_steps"] * _num_data_parallel(c)


def _mini_batch_size(c: Command) -> int:
    """Return the largest mini-batch that divides the rollout batch and does not exceed ColossalChat's."""
    return max(n for n in range(1, _responses(c) + 1) if _responses(c) % n == 0 and n <= _coati_mini_batch_size(c))


def _zero_stage(c: Command) -> int:
    return c["zero_stage"] if c["plugin"] == "3d" else ZERO_STAGES[c["plugin"]]


def _tensor_parallel_size(c: Command) -> int:
    return c["tp"] if c["plugin"] == "3d" else 1


def _sequence_parallel_size(c: Command) -> int:
    """Return the ranks per sequence; 1 with tensor parallelism, which excludes sequence parallelism here."""
    return c["sp"] if c["plugin"] == "3d" and c["enable_sequence_parallelism"] and c["tp"] == 1 else 1


def _is_on_host(c: Command) -> bool:
    return c["plugin"] == "zero2_cpu" or (c["plugin"] == "3d" and c["zero_stage"] > 0 and c["zero_cpu_offload"])


def _weights(path: str | None, otherwise: Any) -> Any:
    """Return a checkpoint of weights alone, recognised by its name as in ColossalChat, or the given model."""
    return path if path and "modeling" in path else otherwise


def _reward(c: Command) -> str | None:
    return None if c["no_neural_reward_model"] else c["rm_checkpoint_path"] or c["rm_pretrain"]


def _functions(c: Command) -> list[str]:
    names = c["reward_functions"] or () if c["no_neural_reward_model"] else ()
    return ["think_format", *(REWARD_FUNCTIONS[name] for name in names)] if names else []


def _function_weights(c: Command) -> list[float] | None:
    """Return ColossalChat's weights, doubled: 1 for the format, per function, and 9 more per right answer."""
    num_answers = len(_functions(c)) - 1
    return [2.0 * num_answers] + [18.0] * num_answers if num_answers > 0 else None


def _has_ptx(c: Command) -> bool:
    return bool(c["ptx_dataset"]) and c["ptx_coef"] > 0


def _ptx(c: Command, value: Any) -> Any:
    return value if _has_ptx(c) else KEEP_DEFAULT


def _warmup_steps(c: Command) -> int:
    return int(0.025 * c["num_episodes"]) if c["warmup_steps"] is None else c["warmup_steps"]


def _first(paths: list[str]) -> str:
    return paths[0] if paths else ""


TRAIN_PPO = (
    maps("pretrain", str, "", "models.actor"),
    maps(
        "rm_pretrain",
        str,
        None,
        "models.reward",
        "models.critic",
        note="ColossalChat adds an untrained head if there is none; here a reward model is a trained classifier",
    ),
    maps(
        "rm_checkpoint_path",
        str,
        None,
        "models.reward",
        note="ColossalChat's is a Booster checkpoint; export it as a Hugging Face sequence classifier first",
    ),
    maps(
        "checkpoint_path",
        str,
        None,
        "models.actor",
        note="a path with 'modeling' in it holds the weights, also those of the reference; a training state cannot be "
        "read here, as run.resume continues only runs of this trainer",
    ),
    maps(
        "critic_checkpoint_path",
        str,
        None,
        "models.critic",
        note="a path with 'modeling' in it holds the weights; a training state cannot be read here",
    ),
    moot("tokenizer_dir", str, "the tokenizer in the actor's folder serves all four models"),
    maps(
        "prompt_dataset",
        str,
        [],
        "prompts.path",
        num_values=None,
        note="ColossalChat's are folders of token ids; give the raw rows, with 'role' for 'from' in each message, and "
        "join several into one file",
    ),
    maps("conversation_template_config", str, None, "prompts.template_path"),
    fixed("columns", "", "prompts.prompt_column", "prompts.answer_column"),
    maps("max_length", int, 2048, "prompts.max_prompt_tokens", "update.micro_batch_tokens", "ptx.max_tokens"),
    maps("max_seq_len", int, 256, "rollout.max_response_tokens", "prompts.max_prompt_tokens"),
    fixed(
        "long prompts",
        "ColossalChat truncates a prompt that is too long; here it is dropped and counted",
        "prompts.overlong_prompts",
    ),
    maps("num_episodes", int, 1, "run.num_steps", "update.actor.warmup_steps", "update.critic.warmup_steps"),
    maps(
        "num_collect_steps",
        int,
        2,
        "rollout.rollout_batch_size",
        note="a batch is what ColossalChat collects in an episode, num_collect_steps x experience_batch_size",
        when=lambda c: True,
    ),
    maps("experience_batch_size", int, 16, "rollout.rollout_batch_size", note=EACH_PROCESS, when=lambda c: True),
    maps("num_update_steps", int, 5, "update.num_epochs"),
    maps("train_batch_size", int, 16, "update.mini_batch_size", "update.micro_batch_tokens", note=EACH_PROCESS),
    maps(
        "accumulation_steps",
        int,
        8,
        "update.mini_batch_size",
        note="ColossalChat sums gradients over num_update_steps passes until train_batch_size x accumulation_steps "
        "responses are seen; here an optimizer step ends with the pass, so that steps are smaller and more numerous",
        when=lambda c: _mini_batch_size(c) != _coati_mini_batch_size(c),
    ),
    fixed(
        "processes",
        "the command line does not give their number, so batches are those of one process; multiply "
        "rollout.rollout_batch_size, update.mini_batch_size and ptx.batch_size by the number",
        when=lambda c: c.num_processes is None,
    ),
    maps("lr", float, 9e-6, "update.actor.lr", "update.critic.min_lr_ratio"),
    maps("critic_lr", float, 9e-6, "update.critic.lr", "update.critic.min_lr_ratio"),
    maps("weight_decay", float, 0.1, "update.actor.weight_decay", "update.critic.weight_decay"),
    maps("grad_clip", float, 1.0, "update.actor.max_grad_norm", "update.critic.max_grad_norm"),
    maps("warmup_steps", int, None, "update.actor.warmup_steps", "update.critic.warmup_steps"),
    fixed(
        "schedule",
        "ColossalChat plans the cosine over num_episodes but advances it with every optimizer step, so that it ends "
        "early; here it spans the run's optimizer steps",
        "update.actor.schedule",
        "update.critic.schedule",
        "update.actor.min_lr_ratio",
    ),
    maps("kl_coef", float, 0.1, "advantage.kl_coef"),
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
    maps("ptx_dataset", str, [], "ptx.path", num_values=None, note="give the raw texts, in one file", when=_has_ptx),
    maps("ptx_coef", float, 0.0, "ptx.coef", "ptx.path"),
    maps("ptx_batch_size", int, 4, "ptx.batch_size"),
    maps(
        "plugin",
        str,
        "gemini",
        "update.zero_stage",
        "update.actor.kind",
        "update.critic.kind",
        "memory.swap",
        note="Gemini's chunks become ZeRO 3, and 3d's pipeline stages become data-parallel ranks",
        when=lambda c: c["plugin"] not in ("zero2", "zero2_cpu"),
    ),
    maps("zero_stage", int, 0, "update.zero_stage", "memory.swap"),
    maps("zero_cpu_offload", bool, False, "update.actor.kind", "update.critic.kind"),
    maps("tp", int, 1, "update.tensor_parallel_size"),
    lost("pp", int, 1, NO_PIPELINE),
    maps(
        "sp",
        int,
        1,
        "update.sequence_parallel_size",
        note="GPUs of a sequence exchange heads, whatever sp_mode says; with tp there is no sequence parallelism here",
        when=lambda c: c["sp"] > 1 or (c["enable_sequence_parallelism"] and c["tp"] > 1),
    ),
    moot("sp_mode", str, "GPUs of a sequence exchange heads, as all_to_all"),
    maps("enable_sequence_parallelism", bool, False, "update.sequence_parallel_size"),
    lost("lora_config", str, None, "set models.lora.rank, alpha and target_modules from this file"),
    maps(
        "mixed_precision",
        str,
        "fp16",
        "models.dtype",
        choices={"fp16": "auto", "bf16": "auto"},
        note="float16 and its loss scale become bfloat16",
        when=lambda c: c["mixed_precision"] == "fp16",
    ),
    maps("grad_checkpoint", bool, False, "models.gradient_checkpointing"),
    moot("use_flash_attn", bool, "models.attention = auto takes flash-attn where it is installed"),
    lost("disable_loss_mask", bool, False, "padding is never in a loss"),
    maps("save_path", str, "actor_checkpoint_prompts", "run.dir", "run.name"),
    maps(
        "save_interval",
        int,
        1000,
        "checkpoint.every_steps",
        note="ColossalChat counts micro steps and checks at the end of an episode; here it counts steps of the loop",
        when=lambda c: True,
    ),
    moot("log_dir", str, "tensorboard/ is always in the run's folder"),
    moot("use_wandb", bool, "metrics.jsonl always has a row per step"),
)

TRAIN_PPO_RULES = {
    "run.dir": lambda c: str(PurePath(c["save_path"]).parent),
    "run.name": lambda c: PurePath(c["save_path"]).name,
    "models.actor": lambda c: _weights(c["checkpoint_path"], c["pretrain"]),
    "models.reward": _reward,
    "models.critic": lambda c: _weights(c["critic_checkpoint_path"], c["rm_pretrain"]),
    "prompts.path": lambda c: _first(c["prompt_dataset"]),
    "prompts.prompt_column": lambda c: "messages",
    "prompts.answer_column": lambda c: "gt_answer" if c["no_neural_reward_model"] else None,
    "prompts.max_prompt_tokens": lambda c: c["max_length"] - c["max_seq_len"],
    "prompts.overlong_prompts": lambda c: "drop",
    "rollout.rollout_batch_size": _responses,
    "rollout.temperature": lambda c: 0.7,
    "reward.functions": _functions,
    "reward.weights": _function_weights,
    "reward.clip": lambda c: 5.0,
    "advantage.whiten": lambda c: False,
    "update.mini_batch_size": _mini_batch_size,
    "update.micro_batch_tokens": lambda c: c["train_batch_size"] * c["max_length"],
    "update.value_clip": lambda c: 0.2,
    "update.aggregation": lambda c: "sequence_mean",
    "update.zero_stage": _zero_stage,
    "update.tensor_parallel_size": _tensor_parallel_size,
    "update.sequence_parallel_size": _sequence_parallel_size,
    "update.actor.kind": lambda c: "cpu_adam" if _is_on_host(c) else "adamw",
    "update.critic.kind": lambda c: "cpu_adam" if _is_on_host(c) else "adamw",
    "update.actor.warmup_steps": _warmup_steps,
    "update.critic.warmup_steps": _warmup_steps,
    "update.actor.schedule": lambda c: "cosine",
    "update.critic.schedule": lambda c: "cosine",
    "update.actor.min_lr_ratio": lambda c: 0.1,
    "update.critic.min_lr_ratio": lambda c: (
        0.1 * c["lr"] / c["critic_lr"]
    ),  # ColossalChat takes the actor's minimum for both
    "ptx.path": lambda c: _ptx(c, _first(c["ptx_dataset"])),
    "ptx.coef": lambda c: _ptx(c, c["ptx_coef"]),
    "ptx.batch_size": lambda c: _ptx(c, c["ptx_batch_size"] * c["accumulation_steps"] * _num_data_parallel(c)),
    "ptx.max_tokens": lambda c: _ptx(c, c["max_length"]),
    "memory.swap": lambda c: "auto" if _zero_stage(c) else "off",
}

PROGRAM = Program(
    title="ColossalChat's train_ppo.py", names=("train_ppo.py",), arguments=TRAIN_PPO, rules=TRAIN_PPO_RULES
)
