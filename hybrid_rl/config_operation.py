"""The settings of operation: the run, its memory, weight sync and checkpoints. Import them from `hybrid_rl.config`."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    """Length, name, evaluation and seed of a run."""

    name: str = "demo"
    """Name of the run's folder in `dir`, without a slash."""
    dir: str = "runs"
    """Parent folder of all runs."""
    num_steps: int = 100
    """Number of steps; a step generates, scores, updates and synchronises the weights once."""
    seed: int = 0
    """Seed of weight initialisation, prompt order and sampling, below 2**32; every rank and every request derives its
    own."""
    deterministic: bool = False
    """Use only GPU kernels that repeat their results bit for bit, so that two runs with one seed and as many ranks give
    the same metrics and rollouts; slower. A CPU needs no such kernels. Conversations with an environment wait for each
    other in every turn, on a CPU too."""
    resume: Literal["never", "auto", "must"] = "auto"
    """Continue from the latest checkpoint: never, if there is one (auto), or exit with an error if there is none
    (must)."""
    eval_every_steps: int = 10
    """Steps between evaluations on `prompts.eval_path`, which also precede step 1 and follow the last step; 0 disables
    them."""
    eval_function: str | None = None
    """Rule function of an evaluation, named as in `reward.functions`; a response with a score of at least 1 is correct.
    by_source judges each row by the first function of its data set. null takes the function of `reward.functions` with
    the largest weight, think_format only if it is alone, else exact_match."""
    eval_samples: int = 1
    """Responses per held-out prompt; several also give pass@k."""
    eval_temperature: float | None = None
    """Divisor of the logits in an evaluation, 0 for greedy decoding; null is 0 with one response per prompt, else
    `rollout.temperature`."""
    eval_top_p: float = 1.0
    """In an evaluation, tokens are sampled from the likeliest ones whose probabilities add up to this; training samples
    from all tokens."""
    eval_max_response_tokens: int | None = None
    """Maximum length of a response in an evaluation, in tokens; null is `rollout.max_response_tokens`."""
    eval_pass_at: list[int] | None = None
    """Values of k for pass@k, at most `eval_samples`; null is `eval_samples`."""
    eval_target: str | None = None
    """Name in `prompts.eval_path` of the set whose accuracy is the run's `accuracy`, which decides `best/` and
    `stop_at_accuracy`; null takes the mean over the sets."""
    stall_timeout_s: float = 300.0
    """Seconds without progress after which the run ends and names the process that it waits for: the rollout engine,
    another rank, a scorer or a reward service."""
    keep_rollouts: int | None = None
    """Number of steps whose rollouts stay in `rollouts/`; null keeps all."""
    prometheus_port: int | None = None
    """Port of 127.0.0.1 at which `/metrics` has the metrics of the last step for Prometheus; null opens none."""
    trackers: list[Literal["tensorboard", "wandb", "trackio", "mlflow"]] = field(
        default_factory=lambda: ["tensorboard"]
    )
    """Trackers that get settings, metrics, histograms, sampled responses and evaluations; all but tensorboard need an
    extra of the package, such as `hybrid_rl[wandb]`. A tracker that fails does not end the run."""
    project: str | None = None
    """Project in Weights & Biases and Trackio, experiment in MLflow; null takes WANDB_PROJECT or
    MLFLOW_EXPERIMENT_NAME, else hybrid_rl."""
    tracked_samples: int = 8
    """Responses in a tracker's table of samples, spread evenly over a step; 0 writes no tables, and shows no
    conversation on the display."""
    tracked_samples_every_steps: int = 10
    """Steps between tables of samples, and between conversations on the display; the first after step 1."""
    profile_steps: tuple[int, int] | None = None
    """First and last step that Nsight Systems records, see profiling/nsys.sh; null records none."""
    stop_at_accuracy: float | None = None
    """Accuracy of an evaluation, in (0, 1], that ends the run with a checkpoint; null runs all steps."""


@dataclass(frozen=True, kw_only=True)
class MemoryConfig:
    """What is released from the GPU between phases, and how the use of the GPU is compared with its plan."""

    swap: Literal["auto", "vmm", "deepspeed", "off"] = "auto"
    """vmm: the engine sleeps; optimizer state, weights and frozen models move to the host by the native pool.
    deepspeed: the engine sleeps; optimizer state moves by DeepSpeed's offload, and frozen models move; weights stay.
    off: nothing moves, as on a CPU. auto: only what would not fit moves, by vmm where it is built, else by
    deepspeed."""
    enforce: Literal["off", "warn", "stop"] = "warn"
    """What happens where a phase takes more of the GPU than its plan and the margin: nothing, a warning per phase, or
    the end of the run after the phase with exit code 1. Checkpoints stay, so that the run can resume."""
    enforce_margin: float = 0.1
    """Part of the plan by which a phase may exceed it."""


@dataclass(frozen=True, kw_only=True)
class SyncConfig:
    """How new weights reach the rollout engine, and how the transfer is verified."""

    mode: Literal["auto", "alias", "copy"] = "auto"
    """alias: the engine's parameters are views of the trainer's, so that nothing is copied. copy: weights pass through
    a bucket. auto: alias where ZeRO stage and architecture allow it, else copy; the run logs the reason. With
    adapters, what is aliased or copied is the base; see `models.lora.sync`."""
    bucket_bytes: int = 1 << 30
    """Size in bytes of the bucket, at most the model's; it grows to hold any one tensor in half of it."""
    num_verified: int = 8
    """Number of tensors whose checksums are compared after each sync, in rotation; the first sync compares all."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """What is saved, and how often."""

    every_steps: int = 50
    """Steps between checkpoints, with one after the last step; 0 saves none."""
    on_sigterm: bool = False
    """Write a checkpoint of the last finished step at SIGTERM, then exit with code 75. In SYNC, ROLLOUT and scoring the
    step is given up at the end of the phase, later it is finished."""
    grace_s: float = 30.0
    """Seconds from SIGTERM until the checkpoint must be complete; the run then ends, in the worst case without it."""
    async_save: bool = True
    """Write while the next step runs; false waits. Both first copy the trained state to the host, 12 bytes per
    parameter."""
    phase_log: bool = False
    """Keep rollouts and rewards of the steps after the last checkpoint on disk, so that a restart does not generate
    them again."""
    keep_last: int = 2
    """Number of checkpoints to keep; older ones are deleted when a newer one is complete."""
    keep_best: bool = False
    """Export the actor to `best/` after every evaluation whose accuracy exceeds all earlier ones."""
    export: bool = True
    """Write the final actor and its tokenizer as a Hugging Face folder, `export/`; its EMA and its adapter get a folder
    each."""
    export_every_steps: int = 0
    """Steps between such exports in `exports/step_<number>`, besides the final one; 0 writes none."""
    export_keep_last: int = 2
    """Number of steps whose exports stay in `exports/`; older ones are deleted when a newer one is complete."""
    export_critic: bool = False
    """Write the critic wherever the actor is exported, to `export_critic/` and `exports/step_<number>_critic`."""
