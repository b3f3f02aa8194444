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
    eval_samples: int = 1
    """Responses per held-out prompt: 1 is greedy, more are sampled at `rollout.temperature` and give pass@k too."""
    profile_steps: tuple[int, int] | None = None
    """First and last step that Nsight Systems records, see profiling/nsys.sh; null is none."""
    stop_at_accuracy: float | None = None
    """End the run, with a checkpoint, when an evaluation reaches this exact accuracy; null runs all steps."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters on actor and critic: only they learn, and the reference is the actor without its adapter."""

    rank: int = 0
    """Of every adapter; 0 trains all weights."""
    alpha: float = 32.0
    """The adapter's product is scaled by alpha / rank."""
    target_modules: list[str] | None = None
    """Names of the linear layers that get one; null is every linear layer but the head."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """The four models. Each value is a folder in Hugging Face format (a hub name works where the network does)."""

    actor: str = ""
    """The policy that is trained; a causal language model that vLLM serves too."""
    critic: str | None = None
    """Initial critic; null takes the reward model, else the actor with a zero value head."""
    reference: str | None = None
    """Policy of the KL penalty; null takes the actor's initial weights. Never loaded when `advantage.kl_coef` is 0."""
    reference_sync_steps: int = 0
    """Steps between updates of the reference, reference = (1 - alpha) reference + alpha actor; 0 keeps it frozen."""
    reference_mixup_alpha: float = 0.6
    """Share of the actor in such an update, in (0, 1]."""
    ema_decay: float | None = None
    """Keep ema = decay * ema + (1 - decay) * actor on the host after every step, and export it beside the actor."""
    reward: str | None = None
    """Frozen sequence classifier with one label; null when `reward.functions` scores alone."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of parameters and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    attention: Literal["auto", "flash_attention_2", "varlen", "sdpa", "eager"] = "auto"
    """auto takes flash-attn where it is installed, else torch's varlen kernel on a GPU, else SDPA, else eager."""
    fused_layers: Literal["auto", "liger", "off"] = "auto"
    """auto takes Liger's kernels on a GPU in bfloat16, where they are installed and checked: see fused_layers.py."""
    gradient_checkpointing: bool = False
    """Recompute activations in backward: less memory, about a third more compute."""
    lora: LoraConfig = field(default_factory=LoraConfig)


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
    template_path: str | None = None
    """Conversation template (JSON: chat_template, system_message, stop_ids, end_of_assistant, response_format_tags)."""
    chat: bool = False
    """Wrap text prompts as one user message and apply the tokenizer's chat template."""
    max_prompt_tokens: int = 512
    """Longer prompts are an error or filtered, see `overlong_prompts`."""
    overlong_prompts: Literal["error", "drop"] = "error"
    """What to do with a prompt above `max_prompt_tokens`; dropped rows are counted and shown."""
    shuffle: bool = True
    """New order every epoch from `run.seed`; false keeps the file's order."""
    num_generated: int = 10_000
    """Rows made by `reasoning_gym:<task>`."""
    max_eval_samples: int = 256
    """Held-out rows used by an evaluation, from the start of `eval_path`."""
    task_options: dict = field(default_factory=dict)
    """Passed to the reasoning_gym task, for example {min_terms: 2, max_terms: 3}."""


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    engine: Literal["vllm", "hf"] = "vllm"
    """hf generates with transformers in this process: the oracle of the tests, and slow."""
    tensor_parallel_size: int = 1
    """GPUs that share a vLLM engine: as many consecutive ranks of one node, which generate together."""
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
    stop_strings: list[str] = field(default_factory=list)
    """End a response as soon as its text contains one of them, which stays in the response."""
    dynamic_filtering_reward_range: tuple[float, float] | None = None
    """DAPO's dynamic filtering: keep the groups whose mean score lies strictly between; null keeps all."""
    dynamic_filtering_max_retries: int = 8
    """Further batches of prompts that may be drawn in a step to replace filtered groups."""
    seed_per_request: bool = True
    """Reproducible samples whatever the batching; false draws from one generator per engine: no faster, on an H200."""
    kv_cache_memory_bytes: int | None = 1 << 30
    """Exact size of an engine's KV cache on each of its GPUs; null takes what the plan leaves, at most one wave's."""
    gpu_memory_utilization: float = 0.5
    """Share of the card that must be free when vLLM starts: all that it checks beside an exact KV cache."""
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
    """exact_match, last_number, math, gsm8k, think_format, reasoning_gym (the task's scorer) or `path.py:function`."""
    weights: list[float] | None = None
    """One per function; null is 1 for each."""
    model_weight: float = 1.0
    """Factor on the reward model's score."""
    remote_urls: list[str] = field(default_factory=list)
    """HTTP reward services; a batch is spread over them, and a failed part goes to the next one."""
    remote_weight: float = 1.0
    """Factor on the remote score."""
    remote_timeout_s: float = 60.0
    """Per request: to connect, and between two parts of the answer."""
    remote_retries: int = 3
    """Further attempts of a failed request, each at the next service, with growing pauses."""
    timeout_s: float = 10.0
    """Per response, for all functions together; a slower scorer is killed."""
    on_error: Literal["raise", "zero"] = "raise"
    """A scorer that fails or runs out of time: stop the run, or count it, show it and give 0."""
    num_workers: int = 1
    """Scorer processes per rank."""
    truncation_penalty: float = 0.0
    """Subtracted from the reward of a truncated response."""
    overlong_buffer: int = 0
    """DAPO's soft limit: the penalty grows over the last this many tokens before `max_response_tokens`; 0 is off."""
    overlong_penalty: float = 1.0
    """Subtracted at the end of that buffer."""
    clip: float | None = None
    """Rewards are cut to [-clip, clip], after penalties and normalisation; null leaves them."""
    normalize: bool = False
    """Subtract the running mean of all rewards seen, penalties included, and divide by their standard deviation."""


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """From rewards to advantages."""

    estimator: Literal["gae", "grpo", "rloo", "dr_grpo", "opo", "reinforce_pp", "reinforce_pp_baseline", "remax"] = (
        "gae"
    )
    """gae trains a critic; reinforce_pp and remax take any group size; the others compare the responses of a group."""
    gamma: float = 1.0
    """Discount per token, in [0, 1]."""
    gae_lambda: float = 0.95
    """Bias against variance of GAE, in [0, 1]."""
    critic_lambda: float | None = None
    """Another lambda for the critic's targets (VAPO uses 1); null takes `gae_lambda`, the length-adaptive one too."""
    length_adaptive_alpha: float | None = None
    """GAE's lambda becomes 1 - 1 / (alpha * response length) for the actor (VAPO uses 0.05); null is off."""
    kl_coef: float = 0.0
    """Factor on the KL estimate to the reference; 0 loads no reference."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Subtract the KL from every token's reward, or add it to the actor's loss."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k1"
    """See hybrid_rl.algorithms.loss.kl_estimate."""
    kl_unbiased: bool = False
    """Weight the KL in the loss by the ratio to the sampling policy: its gradient is the KL's own."""
    kl_target: float | None = None
    """Adapt `kl_coef` so that the KL per response approaches this; null keeps it."""
    kl_horizon: int = 10_000
    """Responses over which it adapts."""
    whiten: bool = True
    """Give advantages mean 0 and variance 1 over the whole step, all ranks (gae, reinforce_pp*)."""
    bootstrap_truncated: bool = False
    """Let a truncated response end in the critic's value of its last state instead of 0."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule, over true optimizer steps."""

    kind: Literal["adamw", "cpu_adam"] = "adamw"
    """cpu_adam keeps states and step on the host (DeepSpeed's ZeRO-Offload): slow, but nothing of them on the GPU."""
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
    """Tokens packed into one forward and backward, of each rank or of all that share them; no result depends on it.
    SCORE packs four times as many on a GPU whose attention is told where sequences end."""
    sequence_parallel_size: int = 1
    """Ranks that share the tokens of each micro-batch, for long responses; consecutive ranks of one node."""
    tensor_parallel_size: int = 1
    """Ranks that hold the matrices of the trained models between them; consecutive ranks of one node."""
    policy_loss: Literal["clip", "gspo", "cispo", "pg"] = "clip"
    """PPO's clip, GSPO's sequence ratio, CISPO's clipped weight, or the plain policy gradient."""
    clip_low: float = 0.2
    """Ratio is clipped at 1 - clip_low; with cispo 1 is no lower bound, as in its paper."""
    clip_high: float = 0.2
    """Ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = None
    """With a negative advantage the ratio counts at most this, above 1 (3 is usual); null is off."""
    correction: Literal["none", "tis", "icepop", "sequence_mask"] = "none"
    """Importance weight of trainer against engine log-probs: truncated, masked outside, or by whole sequences."""
    correction_low: float = 0.5
    """Lower bound of that weight."""
    correction_high: float = 2.0
    """Upper bound of that weight."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """rollout takes the engine's log-probs as the old policy's and saves a forward, of all but a probe of 8 responses;
    `correction` is then none."""
    mask_truncated: bool = False
    """Truncated responses keep their part in baselines but not in the losses."""
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
class PtxConfig:
    """A language-model loss on a second data set, mixed into the actor's: (1 - coef) * policy + coef * ptx."""

    path: str | None = None
    """JSONL, CSV or Parquet file, or a Hugging Face dataset folder; null is off."""
    column: str = "text"
    """Text, or a list of chat messages."""
    coef: float = 0.1
    """Share of the language-model loss, in (0, 1)."""
    batch_size: int = 32
    """Texts per optimizer step, all ranks."""
    max_tokens: int = 512
    """Longer texts are cut."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What leaves the GPU between phases."""

    swap: Literal["auto", "vmm", "deepspeed", "off"] = "auto"
    """vmm: the engine sleeps; states, weights and frozen models go to the host, by the native pool. deepspeed: weights
    stay, states go by DeepSpeed's offload. off: all stay, as on a CPU. auto: vmm where it is built, else deepspeed."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How new weights reach the rollout engine, and how that is proved."""

    mode: Literal["auto", "alias", "copy"] = "auto"
    """alias: the engine computes with the trainer's weights where they lie, so nothing moves and they exist once. copy:
    through a bucket. auto: alias where ZeRO stage, adapters and architecture allow it, else copy, and says why."""
    bucket_bytes: int = 1 << 30
    """Size of the shared staging buffer, at most the model; a tensor larger than half of it makes its half larger."""
    num_verified: int = 8
    """Tensors whose checksums are compared after each sync, in rotation; the first sync compares all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and how often."""

    every_steps: int = 50
    """Steps between checkpoints, the last step always has one; 0 saves none."""
    async_save: bool = True
    """Write while the next step runs; false waits. Both copy what learns to the host first, 12 bytes per parameter."""
    phase_log: bool = False
    """Keep rollouts and rewards of the steps since the last checkpoint on disk: a restart does not generate again."""
    keep_last: int = 2
    """Older checkpoints are deleted once a newer one is complete."""
    keep_best: bool = False
    """Export the actor to `best/` whenever an evaluation beats all before."""
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
    ptx: PtxConfig = field(default_factory=PtxConfig)
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
        """Whether a KL penalty needs the reference's log-probs."""
        return self.advantage.kl_coef != 0

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor without its LoRA adapter, and no model of its own."""
        return self.models.lora.rank > 0 and self.models.reference is None


class ConfigError(ValueError):
    """A setting that cannot work; the message names field, value and rule."""


def check(ok: bool, message: str) -> None:
    """Raise ConfigError with the message unless ok."""
    if not ok:
        raise ConfigError(message)


def as_dict(config: Config) -> dict:
    """Return the config as plain nested dictionaries, for config.yaml."""
    return dataclasses.asdict(config)
