"""Every setting of a run: one frozen dataclass per step of the loop, checked before anything loads."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to run, for how long, and where it leaves its files."""

    name: str = "demo"
    """Folder under `dir` that holds everything this run leaves behind."""
    dir: str = "runs"
    """Parent folder of all runs."""
    num_steps: int = 100
    """Iterations of the loop: rollout, score, update, sync."""
    seed: int = 0
    """Seeds weight initialisation, prompt order and sampling; each rank and request derives its own."""
    resume: Literal["never", "auto", "must"] = "auto"
    """Continue from the latest checkpoint: never, when there is one, or fail without one."""
    eval_every_steps: int = 10
    """Evaluate on `prompts.eval_path` before step 1, every this many steps and after the last; 0 turns it off."""
    eval_function: str = "exact_match"
    """Rule function of an evaluation, as in `reward.functions`; a score of at least 1 counts as right."""
    stop_at_accuracy: float | None = None
    """End the run when an evaluation reaches this exact accuracy; null runs all steps."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """The four models. Each value is a folder in Hugging Face format (a hub name works where the network does)."""

    actor: str = ""
    """The policy that is trained; a causal language model that vLLM serves too."""
    critic: str | None = None
    """Initial critic; null takes the reward model, else the actor with a zero value head."""
    reference: str | None = None
    """Frozen policy of the KL penalty; null takes the actor's initial weights. Unused when `advantage.kl_coef` is 0."""
    reward: str | None = None
    """Frozen sequence classifier with one label; null when `reward.functions` scores alone."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of parameters and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    attention: Literal["auto", "flash_attention_2", "varlen", "sdpa"] = "auto"
    """auto takes flash-attn where it is installed, else torch's varlen kernel on a GPU, else SDPA."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more compute."""


@dataclass(frozen=True, kw_only=True)
class PromptsConfig:
    """Where prompts come from and how a row becomes token ids."""

    path: str = ""
    """JSONL, CSV or Parquet file, a Hugging Face dataset folder, or `reasoning_gym:<task>`."""
    eval_path: str | None = None
    """Held-out prompts, same forms; null turns evaluation off."""
    prompt_column: str = "prompt"
    """Text, or a list of chat messages with `role` and `content`."""
    answer_column: str | None = "answer"
    """Ground truth for rule rewards and exact accuracy; null when the data has none."""
    system_message: str | None = None
    """Put before every chat prompt; needs chat messages or `chat: true`."""
    chat: bool = False
    """Wrap text prompts as one user message and apply the tokenizer's chat template."""
    max_prompt_tokens: int = 512
    """Longer prompts are an error or filtered, see `overlong`."""
    overlong: Literal["error", "drop"] = "error"
    """What to do with a prompt above `max_prompt_tokens`; dropped rows are counted and shown."""
    shuffle: bool = True
    """New order every epoch from `run.seed`; false keeps the file's order."""
    num_generated: int = 10_000
    """Rows made by `reasoning_gym:<task>`."""
    num_eval: int = 256
    """Held-out rows used by an evaluation, from the start of `eval_path`."""
    task_options: dict = field(default_factory=dict)
    """Passed to the reasoning_gym task, for example {min_terms: 2, max_terms: 3}."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    engine: Literal["vllm", "hf"] = "vllm"
    """hf generates with transformers in this process: the oracle of the tests, and slow."""
    rollout_batch_size: int = 128
    """Prompts per step, all ranks."""
    group_size: int = 1
    """Responses per prompt."""
    max_response_tokens: int = 256
    """A response that reaches it is truncated."""
    temperature: float = 1.0
    """Divides the logits, in the engine and in the trainer."""
    stop_token_ids: list[int] = field(default_factory=list)
    """End a response like EOS, beside the EOS ids of tokenizer and generation config."""
    seed_per_request: bool = True
    """Reproducible samples whatever the batching; false samples from one engine-wide generator, faster on a GPU."""
    kv_cache_memory_bytes: int | None = 1 << 30
    """Exact size of the KV cache per engine; null lets vLLM take `gpu_memory_utilization` of the card."""
    gpu_memory_utilization: float = 0.5
    """Only read when `kv_cache_memory_bytes` is null."""
    enforce_eager: bool = False
    """Skip CUDA graphs and compilation: starts 30 s sooner, decodes slower."""
    max_num_seqs: int = 256
    """Sequences decoded at once."""
    prefix_caching: bool = True
    """Share the KV cache of equal prompt prefixes, as in a group."""
    max_logprob_gap: float | None = None
    """Mean |engine - trainer| log-prob of sampled tokens that stops the run; null is 1e-3 in float32, else 0.1."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """What a response is worth: the sum of the reward model (if any) and the weighted rule functions."""

    functions: list[str] = field(default_factory=list)
    """exact_match, last_number, reasoning_gym (the task's own scorer), or `path.py:function`."""
    weights: list[float] | None = None
    """One per function; null is 1 for each."""
    model_weight: float = 1.0
    """Factor on the reward model's score."""
    timeout_s: float = 10.0
    """Per response, for all functions together; a slower scorer is killed."""
    on_error: Literal["raise", "zero"] = "raise"
    """A scorer that fails or runs out of time: stop the run, or count it, show it and give 0."""
    num_workers: int = 1
    """Scorer processes per rank."""
    truncation_penalty: float = 0.0
    """Subtracted from the reward of a truncated response."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: Literal["gae", "grpo", "rloo", "dr_grpo"] = "gae"
    """gae trains a critic; the others compare the responses of a group and need `rollout.group_size` >= 2."""
    gamma: float = 1.0
    """Discount per token, in [0, 1]."""
    gae_lambda: float = 0.95
    """Bias against variance of GAE, in [0, 1]."""
    kl_coef: float = 0.0
    """Factor on the KL estimate to the reference, subtracted from every token's reward."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """See hybrid_rl.loss.kl_estimate."""
    whiten: bool = True
    """Give GAE advantages mean 0 and variance 1 over the whole step, all ranks."""
    bootstrap_truncated: bool = False
    """Let a truncated response end in the critic's value of its last state instead of 0."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule, over true optimizer steps."""

    lr: float = 1e-6
    """Peak learning rate, after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.0
    """On matrices only, never on biases and norms."""
    max_grad_norm: float = 1.0
    """Global gradient norm is clipped to it."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """After warm-up, over the run's remaining optimizer steps."""
    min_lr_ratio: float = 0.0
    """Floor of linear and cosine, as a share of `lr`."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How actor and critic learn from a batch of rollouts."""

    num_epochs: int = 1
    """Passes over each batch."""
    mini_batch_size: int = 128
    """Responses per optimizer step, all ranks; must divide the step's responses."""
    micro_batch_tokens: int = 8192
    """Tokens packed into one forward, per rank. The result does not depend on it."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high."""
    value_clip: float | None = 0.5
    """Values move at most this far from the rollout's; null does not clip."""
    entropy_coef: float = 0.0
    """Entropy bonus."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = "token_mean"
    """How token losses become one number, always over the whole optimizer step and all ranks."""
    critic_warmup_steps: int = 0
    """Steps at the start in which only the critic learns."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage of actor and critic."""
    actor: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=9e-6))


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What leaves the GPU between phases."""

    swap: Literal["deepspeed", "off"] = "deepspeed"
    """deepspeed: the engine sleeps, optimizer states and frozen models go to the host. off: all stay, as on a CPU."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How new weights reach the rollout engine, and how that is proved."""

    bucket_bytes: int = 1 << 30
    """Size of the shared staging buffer; at least the largest tensor, at most the model."""
    num_verified: int = 8
    """Tensors whose checksums are compared after each sync, in rotation; the first sync compares all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and how often."""

    every_steps: int = 50
    """Steps between checkpoints, the last step always has one; 0 saves none."""
    keep_last: int = 2
    """Older checkpoints are deleted once a newer one is complete."""
    export: bool = True
    """Write the final actor and tokenizer as a Hugging Face folder."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run: RunConfig = field(default_factory=RunConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def run_dir(self) -> Path:
        """Folder that holds everything this run leaves behind."""
        return Path(self.run.dir) / self.run.name

    @property
    def responses_per_step(self) -> int:
        """Responses generated in one step, all ranks."""
        return self.rollout.rollout_batch_size * self.rollout.group_size

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator trains a critic."""
        return self.advantage.estimator == "gae"

    @property
    def has_reference(self) -> bool:
        """Whether a KL penalty needs the reference model."""
        return self.advantage.kl_coef != 0


class ConfigError(ValueError):
    """A setting that cannot work; the message names field, value and rule."""


def check(ok: bool, message: str) -> None:
    """Raise ConfigError with the message unless ok."""
    if not ok:
        raise ConfigError(message)


def _check_positive(config: Config) -> None:
    for section, names in {
        "run": ["num_steps"],
        "prompts": ["max_prompt_tokens", "num_generated", "num_eval"],
        "rollout": ["rollout_batch_size", "group_size", "max_response_tokens", "temperature", "max_num_seqs"],
        "reward": ["timeout_s", "num_workers"],
        "update": ["num_epochs", "mini_batch_size", "micro_batch_tokens"],
        "sync": ["bucket_bytes"],
        "checkpoint": ["keep_last"],
    }.items():
        for name in names:
            value = getattr(getattr(config, section), name)
            check(value > 0, f"{section}.{name} = {value}: must be greater than 0")


def _check_not_negative(config: Config) -> None:
    update = config.update
    values = {
        "run.eval_every_steps": config.run.eval_every_steps,
        "reward.truncation_penalty": config.reward.truncation_penalty,
        "advantage.kl_coef": config.advantage.kl_coef,
        "update.clip_high": update.clip_high,
        "update.value_clip": update.value_clip or 0,
        "update.critic_warmup_steps": update.critic_warmup_steps,
        "sync.num_verified": config.sync.num_verified,
        "checkpoint.every_steps": config.checkpoint.every_steps,
    }
    for name in ("actor", "critic"):
        optimizer = dataclasses.asdict(getattr(update, name))
        values |= {f"update.{name}.{key}": value for key, value in optimizer.items() if isinstance(value, int | float)}
    for key, value in values.items():
        check(value >= 0, f"{key} = {value}: must not be negative")


def validate(config: Config) -> Config:
    """Return the config if every rule that needs no file holds.

    Raises:
        ConfigError: names the field, its value and the rule.
    """
    rollout, update, advantage, reward = config.rollout, config.update, config.advantage, config.reward
    _check_positive(config)
    _check_not_negative(config)
    check(bool(config.models.actor), "models.actor is empty: give a Hugging Face folder")
    check(bool(config.prompts.path), "prompts.path is empty: give a file, a dataset folder or reasoning_gym:<task>")
    check(
        config.models.reward is not None or bool(reward.functions),
        "models.reward is null and reward.functions is empty: one of them must score the responses",
    )
    check(
        reward.weights is None or len(reward.weights) == len(reward.functions),
        f"reward.weights has {len(reward.weights or [])} values, reward.functions {len(reward.functions)}: one each",
    )
    check(
        config.has_critic or rollout.group_size >= 2,
        f"rollout.group_size = {rollout.group_size}: advantage.estimator = {advantage.estimator} needs 2 or more",
    )
    for name in ("gamma", "gae_lambda"):
        value = getattr(advantage, name)
        check(0 <= value <= 1, f"advantage.{name} = {value}: must lie in [0, 1]")
    check(
        config.responses_per_step % update.mini_batch_size == 0,
        f"update.mini_batch_size = {update.mini_batch_size}: must divide the {config.responses_per_step} responses "
        f"of a step "
        f"(rollout.rollout_batch_size {rollout.rollout_batch_size} x rollout.group_size {rollout.group_size})",
    )
    total = config.prompts.max_prompt_tokens + rollout.max_response_tokens
    check(
        total <= update.micro_batch_tokens,
        f"update.micro_batch_tokens = {update.micro_batch_tokens}: must hold one sequence, prompts.max_prompt_tokens "
        f"{config.prompts.max_prompt_tokens} + rollout.max_response_tokens {rollout.max_response_tokens} = {total}",
    )
    check(0 <= update.clip_low < 1, f"update.clip_low = {update.clip_low}: must lie in [0, 1)")
    check(
        config.memory.swap == "off" or update.zero_stage > 0,
        "memory.swap = deepspeed: DeepSpeed cannot offload with update.zero_stage = 0; use 1 to 3 or swap = off",
    )
    return config


def as_dict(config: Config) -> dict:
    """Return the config as plain nested dictionaries, for config.yaml."""
    return dataclasses.asdict(config)
