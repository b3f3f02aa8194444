"""What ColossalChat's train_ppo.py and train_grpo.py have in common: arguments of data, loop, plugin and output."""

from pathlib import PurePath
from typing import Any

from .program import KEEP_DEFAULT, Command, fixed, lost, maps, missing, moot
from .reading import count, finite
from .trackers import known

NO_PIPELINE = "there are no pipeline stages; update.zero_stage = 3 or update.tensor_parallel_size splits the model"
EACH_PROCESS = "counted per process in ColossalChat, over all ranks here"
GPUS_PER_NODE = 8
REWARD_FUNCTIONS = {"gsm8k_reward_fn": "gsm8k", "math_competition_reward_fn": "math"}
ZERO_STAGES = {"gemini": 3, "gemini_auto": 3, "zero2": 2, "zero2_cpu": 2}


def _num_data_parallel(c: Command) -> int:
    """Return the number of processes with different prompts; 1 if the command line does not name its launcher."""
    return max(1, (c.num_processes or 1) // (c["tp"] * c["pp"] * c["sp"]))


def rollout_batch_size(c: Command) -> int:
    """Return the prompts of a step, over all processes."""
    return c["num_collect_steps"] * c["experience_batch_size"] * _num_data_parallel(c)


def _responses(c: Command) -> int:
    return rollout_batch_size(c) * c.values.get("num_generations", 1)


def _coati_mini_batch_size(c: Command) -> int:
    return c["train_batch_size"] * c["accumulation_steps"] * _num_data_parallel(c)


def _mini_batch_size(c: Command) -> int:
    """Return the largest mini-batch that divides the rollout batch and does not exceed ColossalChat's."""
    return max(n for n in range(1, _responses(c) + 1) if _responses(c) % n == 0 and n <= _coati_mini_batch_size(c))


def _zero_stage(c: Command) -> int:
    return max(1, c["zero_stage"]) if c["plugin"] == "3d" else ZERO_STAGES[c["plugin"]]


def _tensor_parallel_size(c: Command) -> int:
    return c["tp"] if c["plugin"] == "3d" else 1


def _sequence_parallel_size(c: Command) -> int:
    """Return the ranks per sequence; 1 with tensor parallelism, which excludes sequence parallelism here."""
    return c["sp"] if c["plugin"] == "3d" and c["enable_sequence_parallelism"] and c["tp"] == 1 else 1


def _is_on_host(c: Command) -> bool:
    return c["plugin"] == "zero2_cpu" or (c["plugin"] == "3d" and c["zero_stage"] > 0 and c["zero_cpu_offload"])


def weights(path: str | None, otherwise: Any) -> Any:
    """Return a checkpoint of weights alone, recognised by its name as in ColossalChat, or the given model."""
    return path if path and "modeling" in path else otherwise


def _has_ptx(c: Command) -> bool:
    return bool(c["ptx_dataset"]) and c["ptx_coef"] > 0


def _ptx(c: Command, value: Any) -> Any:
    return value if _has_ptx(c) else KEEP_DEFAULT


def _warmup_steps(c: Command) -> int:
    return int(0.025 * c["num_episodes"]) if c["warmup_steps"] is None else c["warmup_steps"]


def _first(paths: list[str]) -> str:
    return paths[0] if paths else ""


def num_gpus(c: Command) -> tuple[int, int] | None:
    """Return GPUs per node and nodes, one GPU per process."""
    if c.num_processes is None:
        return None
    nodes = -(-c.num_processes // GPUS_PER_NODE)
    return -(-c.num_processes // nodes), nodes


def functions(names: list[str]) -> list[str]:
    """Return the rule functions that do what ColossalChat's do, the format's first."""
    return ["think_format", *(REWARD_FUNCTIONS[name] for name in names)] if names else []


DATA = (
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
    maps("max_length", count, 2048, "prompts.max_prompt_tokens", "update.micro_batch_tokens", "ptx.max_tokens"),
    maps("max_seq_len", count, 256, "rollout.max_response_tokens", "prompts.max_prompt_tokens"),
    fixed(
        "long prompts",
        "ColossalChat truncates a prompt that is too long; here it is dropped and counted",
        "prompts.overlong_prompts",
    ),
)
LOOP = (
    fixed("engine", "ColossalChat generates with transformers, here vLLM does", "rollout.kv_cache_memory_bytes"),
    maps("num_episodes", count, 1, "run.num_steps", "update.actor.warmup_steps", "update.critic.warmup_steps"),
    maps(
        "num_collect_steps",
        count,
        2,
        "rollout.rollout_batch_size",
        note="a batch is what ColossalChat collects in an episode, num_collect_steps x experience_batch_size",
        when=lambda c: True,
    ),
    maps("experience_batch_size", count, 16, "rollout.rollout_batch_size", note=EACH_PROCESS, when=lambda c: True),
    maps("num_update_steps", count, 5, "update.num_epochs"),
    maps("train_batch_size", count, 16, "update.mini_batch_size", "update.micro_batch_tokens", note=EACH_PROCESS),
    maps(
        "accumulation_steps",
        count,
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
)
OPTIMIZERS = (
    maps("weight_decay", finite, 0.1, "update.actor.weight_decay", "update.critic.weight_decay"),
    maps("grad_clip", finite, 1.0, "update.actor.max_grad_norm", "update.critic.max_grad_norm"),
    maps("warmup_steps", int, None, "update.actor.warmup_steps", "update.critic.warmup_steps"),
)
PTX = (
    maps("ptx_dataset", str, [], "ptx.path", num_values=None, note="give the raw texts, in one file", when=_has_ptx),
    maps("ptx_coef", finite, 0.0, "ptx.coef", "ptx.path"),
    maps("ptx_batch_size", count, 4, "ptx.batch_size"),
)
PLUGIN = (
    maps(
        "plugin",
        str,
        "gemini",
        "update.zero_stage",
        "update.actor.kind",
        "update.critic.kind",
        "memory.swap",
        choices={"gemini": 3, "gemini_auto": 3, "zero2": 2, "zero2_cpu": 2, "3d": "zero_stage"},
        note="Gemini's chunks become ZeRO 3, and 3d's pipeline stages become data-parallel ranks",
        when=lambda c: c["plugin"] not in ("zero2", "zero2_cpu"),
    ),
    maps(
        "zero_stage",
        int,
        0,
        "update.zero_stage",
        "memory.swap",
        choices={0: 1, 1: 1, 2: 2},
        note="stage 0 keeps no float32 weights beside bfloat16; stage 1 gives the same result with less memory",
        when=lambda c: c["plugin"] == "3d" and c["zero_stage"] == 0,
    ),
    maps("zero_cpu_offload", bool, False, "update.actor.kind", "update.critic.kind"),
    maps("tp", count, 1, "update.tensor_parallel_size"),
    missing("pp", count, 1, NO_PIPELINE),
    maps(
        "sp",
        count,
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
)
OUTPUT = (
    maps("save_path", str, "actor_checkpoint_prompts", "run.dir", "run.name"),
    maps(
        "save_interval",
        count,
        1000,
        "checkpoint.every_steps",
        note="ColossalChat counts micro steps and checks at the end of an episode; here it counts steps of the loop",
        when=lambda c: True,
    ),
    maps("log_dir", str, None, "run.trackers", note="TensorBoard's files lie in tensorboard/ of the run's folder"),
    maps("use_wandb", bool, False, "run.trackers"),
)

RULES = {
    "run.dir": lambda c: str(PurePath(c["save_path"]).parent),
    "run.name": lambda c: PurePath(c["save_path"]).name,
    "run.trackers": lambda c: (
        known([*["tensorboard"] * bool(c["log_dir"]), *["wandb"] * c["use_wandb"]]) or KEEP_DEFAULT
    ),
    "prompts.path": lambda c: _first(c["prompt_dataset"]),
    "prompts.prompt_column": lambda c: "messages",
    "prompts.max_prompt_tokens": lambda c: c["max_length"] - c["max_seq_len"],
    "prompts.overlong_prompts": lambda c: "drop",
    "rollout.rollout_batch_size": rollout_batch_size,
    "rollout.kv_cache_memory_bytes": lambda c: None,
    "update.mini_batch_size": _mini_batch_size,
    "update.micro_batch_tokens": lambda c: c["train_batch_size"] * c["max_length"],
    "update.aggregation": lambda c: "sequence_mean",
    "update.zero_stage": _zero_stage,
    "update.tensor_parallel_size": _tensor_parallel_size,
    "update.sequence_parallel_size": _sequence_parallel_size,
    "update.actor.kind": lambda c: "cpu_adam" if _is_on_host(c) else "adamw",
    "update.critic.kind": lambda c: "cpu_adam" if _is_on_host(c) else "adamw",
    "update.actor.warmup_steps": _warmup_steps,
    "update.critic.warmup_steps": _warmup_steps,
    "update.actor.schedule": lambda c: "cosine",
    "update.actor.min_lr_ratio": lambda c: 0.1,
    "ptx.path": lambda c: _ptx(c, _first(c["ptx_dataset"])),
    "ptx.coef": lambda c: _ptx(c, c["ptx_coef"]),
    "ptx.batch_size": lambda c: _ptx(c, c["ptx_batch_size"] * c["accumulation_steps"] * _num_data_parallel(c)),
    "ptx.max_tokens": lambda c: _ptx(c, c["max_length"]),
    "memory.swap": lambda c: "off" if c["plugin"] == "3d" and not c["zero_stage"] else "auto",
}
"""Setting -> its value, for settings that both programs compute in the same way."""

CHECKPOINTS = (
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
)
"""Arguments of checkpoints of the reward model and the actor."""
