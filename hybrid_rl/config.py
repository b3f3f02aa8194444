"""Every setting of a run, in frozen dataclasses. Imports no torch, so that the command line answers at once."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

from hybrid_rl.algorithms.specs import ESTIMATORS
from hybrid_rl.config_data import DataSource, PromptsConfig, paths_in
from hybrid_rl.config_environment import EnvironmentConfig
from hybrid_rl.config_operation import CheckpointConfig, MemoryConfig, RunConfig, SyncConfig
from hybrid_rl.config_training import AdvantageConfig, OptimizerConfig, PtxConfig, UpdateConfig
from hybrid_rl.printable import printable

__all__ = [
    "AdvantageConfig",
    "CheckpointConfig",
    "Config",
    "ConfigError",
    "DataSource",
    "EnvironmentConfig",
    "Findings",
    "LoraConfig",
    "MemoryConfig",
    "ModelsConfig",
    "OptimizerConfig",
    "PromptsConfig",
    "PtxConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "SyncConfig",
    "UpdateConfig",
    "as_dict",
    "check",
]

T = TypeVar("T")

BY_SOURCE = "by_source"
"""Name among rule functions that stands for the functions of the data set of each row."""


@dataclass(frozen=True, kw_only=True)
class LoraConfig:
    """Low-rank adapters of actor and critic. Only the adapters are trained; the reference is the actor without its
    adapter."""

    rank: int = 0
    """Rank of every adapter; 0 trains all weights instead."""
    alpha: float = 32.0
    """Numerator of the scale alpha / rank of an adapter's product."""
    rslora: bool = False
    """Scale an adapter's product by alpha / sqrt(rank) instead, which keeps large ranks as effective as small ones."""
    target_modules: list[str] | None = None
    """Names of the linear layers with an adapter; null is every linear layer except the head."""
    sync: Literal["auto", "adapters", "merged"] = "auto"
    """What the rollout engine gets. adapters: the adapters alone, beside a base that the engine aliases where
    `sync.mode` allows it, else copies; decoding computes them in every layer. merged: full weights with the adapters
    merged, which decode faster and are copied in every step. auto: adapters where the engine aliases the base, else
    merged."""
    export: Literal["both", "adapter", "merged"] = "both"
    """What an export of the actor holds: the adapter for peft in a folder `..._adapter`, the model with the adapter
    merged, or both."""


@dataclass(frozen=True, kw_only=True)
class ModelsConfig:
    """The models of a run. A model is a folder in Hugging Face format, or a name on the hub where the network allows
    it."""

    actor: str = ""
    """The policy to train, a causal language model that vLLM can serve."""
    critic: str | None = None
    """Initial critic; null takes the reward model or, without one, the actor with a value head of zeros."""
    reference: str | None = None
    """Policy of the KL penalty; null takes the actor's initial weights. Not loaded if `advantage.kl_coef` is 0."""
    reference_sync_steps: int = 0
    """Steps between updates of the reference, reference = (1 - alpha) * reference + alpha * actor; 0 keeps it
    frozen."""
    reference_mixup_alpha: float = 0.6
    """Weight alpha of the actor in such an update, in (0, 1]."""
    ema_decay: float | None = None
    """Decay of an exponential moving average of the actor's weights, in (0, 1), kept on the host and exported; null is
    off."""
    reward: str | None = None
    """Frozen sequence classifier with one label; null takes rewards from `reward.functions` and remote services
    alone."""
    trust_remote_code: bool = False
    """Run the Python code that lies in the folders of models and tokenizers, in the trainer and in the engine; read it
    first. false refuses a folder that needs such code."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Data type of parameters and activations; auto is bfloat16 on a GPU and float32 on a CPU."""
    attention: Literal["auto", "flash_attention_2", "varlen", "sdpa", "eager"] = "auto"
    """Attention kernel; auto is flash-attn where it is installed, else torch's varlen kernel on a GPU, else SDPA, else
    eager."""
    fused_layers: Literal["auto", "liger", "off"] = "auto"
    """Liger's layers; auto takes them in bfloat16 on a GPU if Liger is installed and the model family is verified with
    it."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass, which saves memory and costs about a third more compute."""
    shard_frozen: Literal["auto", "true", "false"] = "auto"
    """Shard the weights of the reference and the reward model over all ranks, each of which gathers one layer at a time
    when it computes. auto does so where the plan with whole models does not fit."""
    lora: LoraConfig = field(default_factory=LoraConfig)


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How responses are generated."""

    engine: Literal["vllm", "hf"] = "vllm"
    """Engine that generates: vLLM, or transformers in the trainer's process, which is slow and meant for tests."""
    tensor_parallel_size: int = 1
    """GPUs per vLLM engine: this many consecutive ranks of one node, which generate together."""
    rollout_batch_size: int = 128
    """Prompts per step, over all ranks."""
    group_size: int = 1
    """Responses per prompt."""
    max_response_tokens: int = 256
    """Maximum length of a response in tokens; a response that reaches it is truncated."""
    temperature: float = 1.0
    """Divisor of the logits, in the engine and in the trainer; vLLM takes none below 0.01."""
    stop_token_ids: list[int] = field(default_factory=list)
    """Token ids that end a response, in addition to the EOS ids of tokenizer, generation config and config.json."""
    stop_strings: list[str] = field(default_factory=list)
    """Texts that end a response as soon as it contains one of them; the text stays in the response."""
    dynamic_filtering_reward_range: tuple[float, float] | None = None
    """DAPO's dynamic filtering: keep groups whose mean score lies strictly between the two bounds; null keeps all
    groups."""
    dynamic_filtering_max_retries: int = 8
    """Maximum number of further batches of prompts that a step draws to replace filtered groups."""
    seed_per_request: bool = True
    """Give every request its own seed, so that samples do not depend on batching; false uses one generator per
    engine."""
    kv_cache_memory_bytes: int | None = None
    """Size in bytes of an engine's KV cache on each of its GPUs; null takes what the plan leaves, at most what one
    batch needs. On a CPU null takes what one batch needs, and at least 1 GiB."""
    gpu_memory_utilization: float = 0.5
    """Fraction of the GPU's memory that must be free when vLLM starts; it does not set the size of the KV cache."""
    enforce_eager: bool = False
    """Start vLLM without CUDA graphs and compilation, which starts faster and decodes more slowly."""
    max_num_seqs: int = 256
    """Maximum number of sequences that an engine decodes at once."""
    prefix_caching: bool = True
    """Reuse the KV cache of equal prompt prefixes, such as those within a group."""
    routing_replay: bool = False
    """Train a mixture of experts with the experts that the engine chose for each token, so that rounding does not make
    engine and trainer choose others. The reference chooses its own."""
    max_logprob_gap: float | None = None
    """Mean |engine - trainer| log-prob of sampled tokens above which the run exits; null is 1e-3 in float32, else
    0.1."""
    restarts: int = 0
    """Number of times that a run starts its engine again after a process of it was killed, has failed or made no
    progress for `run.stall_timeout_s`. Weights are synchronised again, and the step generates again, with the same
    seeds. 0 ends the run with exit code 3."""
    vllm: dict = field(default_factory=dict)
    """Further engine arguments of vLLM by their names there, such as {max_num_batched_tokens: 16384}; an argument that
    a setting decides is refused."""


@dataclass(frozen=True, kw_only=True)
class RewardConfig:
    """The reward of a response: the sum of reward model, rule functions and remote services, less penalties."""

    functions: list[str] = field(default_factory=list)
    """Rule functions: exact_match, last_number, math, gsm8k, think_format, reasoning_gym (the task's own), by_source
    (chosen by each row's data set) or `path.py:function`, in the signature of this project, OpenRLHF, TRL or verl."""
    weights: list[float] | None = None
    """Factor of each rule function; null is 1 for each."""
    gates: list[str] = field(default_factory=list)
    """Functions of `functions`, such as think_format, whose scores multiply the sum of all other sources: with a score
    of 0 of a gate, nothing else counts. A gate's own weight may be 0."""
    prompts_per_call: int = 1
    """Prompts whose responses a batched or asynchronous function gets at once; `timeout_s` counts for each response."""
    by_source: dict = field(default_factory=dict)
    """Data set -> rule function, or list of them, that `by_source` in `functions` stands for in the rows whose column
    `data_source` names it, in addition to known data sets such as openai/gsm8k; see the page on data."""
    model_weight: float = 1.0
    """Factor of the reward model's score."""
    remote_urls: list[str] = field(default_factory=list)
    """URLs of HTTP reward services. A batch is spread over them; a part that fails goes to the next service."""
    remote_weight: float = 1.0
    """Factor of the remote score."""
    remote_headers: dict = field(default_factory=dict)
    """Headers of the requests, such as {Authorization: Bearer $REWARD_TOKEN}; every value names environment variables,
    whose values are neither written nor shown."""
    remote_timeout_s: float = 60.0
    """Seconds that a request may take, to the last byte of its answer, which may have 16 MiB."""
    remote_retries: int = 3
    """Further attempts of a failed request, each at the next service, after pauses that grow. A request that a service
    refuses (status 4xx except 408, 425 and 429) or redirects is not sent again. All attempts together may take
    `run.stall_timeout_s`."""
    timeout_s: float = 10.0
    """Seconds that all rule functions together may take for a response; a scorer process that exceeds them is
    killed."""
    on_error: Literal["raise", "zero"] = "raise"
    """Handling of a rule function that fails or exceeds its time or memory, in training and evaluation: exit with an
    error, or count the failure and give score 0, which counts like any other score, also in the mean of its group."""
    num_workers: int = 1
    """Scorer processes per rank."""
    memory_limit_bytes: int | None = None
    """Resident memory in bytes of a scorer process and all processes that it starts, above which they are killed; a
    page that several of them share counts for each. null sets no limit."""
    environment_variables: list[str] = field(default_factory=list)
    """Environment variables that scorer processes get besides paths, language and numbers of threads; they see GPUs
    only with CUDA_VISIBLE_DEVICES here."""
    truncation_penalty: float = 0.0
    """Amount subtracted from the reward of a truncated response."""
    overlong_buffer: int = 0
    """DAPO's soft limit, in tokens before `max_response_tokens`, over which a penalty grows linearly; 0 is off."""
    overlong_penalty: float = 1.0
    """Penalty at the end of that buffer."""
    clip: float | None = None
    """Bound c of rewards, which are clipped to [-c, c] after penalties and normalisation; null does not clip."""
    normalize: bool = False
    """Subtract the running mean of all rewards, penalties included, and divide by their standard deviation."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run."""

    run: RunConfig = field(default_factory=RunConfig)
    models: ModelsConfig = field(default_factory=ModelsConfig)
    prompts: PromptsConfig = field(default_factory=PromptsConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    environment: EnvironmentConfig = field(default_factory=EnvironmentConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    advantage: AdvantageConfig = field(default_factory=AdvantageConfig)
    update: UpdateConfig = field(default_factory=UpdateConfig)
    ptx: PtxConfig = field(default_factory=PtxConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    sync: SyncConfig = field(default_factory=SyncConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    @property
    def run_dir(self) -> Path:
        """Folder of all files that the run writes."""
        return Path(self.run.dir) / self.run.name

    @property
    def responses_per_step(self) -> int:
        """Number of responses that a step generates, over all ranks."""
        return self.rollout.rollout_batch_size * self.rollout.group_size

    @property
    def has_critic(self) -> bool:
        """Whether the advantage estimator trains a critic."""
        return ESTIMATORS[self.advantage.estimator].needs_critic

    @property
    def eval_function(self) -> str:
        """The rule function of an evaluation; see run.eval_function."""
        names = self.reward.functions
        if self.run.eval_function is not None or not names:
            return self.run.eval_function or "exact_match"
        weights = dict(zip(names, self.reward.weights or [1.0] * len(names), strict=False))
        judges = [name for name in names if name != "think_format"] or names
        return max(judges, key=lambda name: weights.get(name, 0.0))

    @property
    def is_judged_by_environment(self) -> bool:
        """Whether the rewards of the environment are the score of an evaluation, because no rule function is named."""
        return self.environment.is_used and self.run.eval_function is None and not self.reward.functions

    @property
    def rule_functions(self) -> list[str]:
        """Every rule function that the settings name, in training and evaluation."""
        names = [*self.reward.functions, *paths_in(self.reward.by_source), self.run.eval_function]
        return [name for name in dict.fromkeys(names) if name and name != BY_SOURCE]

    @property
    def evaluation_rollout(self) -> RolloutConfig:
        """How an evaluation generates, besides run.eval_top_p; temperature 0 is greedy decoding."""
        run, rollout = self.run, self.rollout
        default = rollout.temperature if run.eval_samples > 1 else 0.0
        return dataclasses.replace(
            rollout,
            group_size=run.eval_samples,
            temperature=default if run.eval_temperature is None else run.eval_temperature,
            max_response_tokens=run.eval_max_response_tokens or rollout.max_response_tokens,
        )

    @property
    def max_engine_tokens(self) -> int:
        """Maximum tokens of prompt and response in the rollout engine, in training and evaluation."""
        longest = max(self.rollout.max_response_tokens, self.evaluation_rollout.max_response_tokens)
        return self.prompts.max_prompt_tokens + longest

    @property
    def num_exports(self) -> tuple[int, int]:
        """Numbers of whole actors and of critics that exports hold at once, while one is written and none deleted."""
        checkpoint = self.checkpoint
        steps = checkpoint.export_keep_last + 1 if checkpoint.export_every_steps else 0
        times = steps + checkpoint.export
        num_critics = times * (checkpoint.export_critic and self.has_critic)
        return times * (1 + (self.models.ema_decay is not None)) + checkpoint.keep_best, num_critics

    @property
    def needs_greedy(self) -> bool:
        """Whether the advantage estimator compares responses with the greedy response to their prompt."""
        return ESTIMATORS[self.advantage.estimator].needs_greedy

    @property
    def has_reference(self) -> bool:
        """Whether a KL penalty needs the reference's log-probs."""
        return self.advantage.kl_coef != 0

    @property
    def reference_is_actor(self) -> bool:
        """Whether the reference is the actor without its LoRA adapter instead of another model."""
        return self.models.lora.rank > 0 and self.models.reference is None


class ConfigError(ValueError):
    """A setting, or several, that cannot work; every message names field, value, rule and remedy."""

    def __init__(self, *messages: str) -> None:
        """Take one sentence per finding; a name or a value in it cannot write control characters or further lines."""
        super().__init__(*messages)
        self.messages = tuple(printable(message).replace("\n", "\\n") for message in messages)

    def __str__(self) -> str:
        return "\n".join(self.messages)


class Findings:
    """Collects what several checks find wrong, so that all of it is reported at once."""

    def __init__(self) -> None:
        self.messages: list[str] = []
        """One sentence per finding."""

    def run(self, checked: Callable[[], T]) -> T | None:
        """Return what a check returns; None if it raises a ConfigError, whose messages are kept."""
        try:
            return checked()
        except ConfigError as error:
            self.messages += error.messages
            return None

    def raise_any(self) -> None:
        """Raise everything that was found.

        Raises:
            ConfigError: a check has found something.
        """
        if self.messages:
            raise ConfigError(*dict.fromkeys(self.messages))


def check(ok: bool, message: str) -> None:
    """Raise ConfigError with `message` if `ok` is false."""
    if not ok:
        raise ConfigError(message)


def as_dict(config: Config) -> dict:
    """Return the config as nested dictionaries of plain values, the content of config.yaml."""
    return dataclasses.asdict(config)
