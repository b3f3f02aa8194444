"""The settings of training: advantages, losses and optimizers. Import them from `hybrid_rl.config`."""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from hybrid_rl.algorithms.specs import CORRECTIONS, ESTIMATORS, KL_ESTIMATORS, POLICY_LOSSES
from hybrid_rl.config_data import DataSource, sources_of

if TYPE_CHECKING:
    Estimator = str
    PolicyLoss = str
    KlEstimator = str
    Correction = str
else:  # the choices that the parser accepts and --help shows
    Estimator = Literal[tuple(ESTIMATORS)]
    PolicyLoss = Literal[tuple(POLICY_LOSSES)]
    KlEstimator = Literal[KL_ESTIMATORS]
    Correction = Literal[CORRECTIONS]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    """How advantages follow from rewards."""

    estimator: Estimator = "gae"
    """Advantage estimator. gae trains a critic; reinforce_pp and remax take any group size; the others compare a
    group's rewards."""
    gamma: float = 1.0
    """Discount per sampled token, in [0, 1]."""
    turn_gamma: float = 1.0
    """Discount from a turn of a conversation to the next one, in [0, 1], in addition to `gamma`."""
    credit: Literal["response", "turn"] = "response"
    """What group estimators compare: the reward of the whole response, or for each turn of a conversation the rewards
    from that turn on, with the same turn of the group's other responses."""
    gae_lambda: float = 0.95
    """Lambda of GAE, in [0, 1]; a lower value trades variance for bias."""
    critic_lambda: float | None = None
    """Lambda of the critic's targets, in [0, 1] (VAPO: 1); null is the actor's, which may depend on the length."""
    length_adaptive_alpha: float | None = None
    """Alpha of the actor's length-adaptive lambda, 1 - 1 / (alpha * response length) (VAPO: 0.05); null uses
    `gae_lambda`."""
    kl_coef: float = 0.0
    """Factor of the KL estimate to the reference; 0 loads no reference."""
    kl_in: Literal["reward", "loss"] = "reward"
    """Where the KL acts: subtracted from the reward of every token, or added to the actor's loss."""
    kl_estimator: KlEstimator = "k1"
    """Estimator of the KL per token; docs/algorithms.md has the formulas."""
    kl_unbiased: bool = False
    """Weight the KL in the loss by the ratio to the sampling policy, which makes its gradient an unbiased one of the
    KL."""
    kl_target: float | None = None
    """KL per response, in nats, that `kl_coef` is adapted to; null keeps `kl_coef` constant."""
    kl_horizon: int = 10_000
    """Number of responses over which `kl_coef` adapts."""
    whiten: bool = True
    """Give advantages mean 0 and variance 1 over all ranks' responses of a step (gae, reinforce_pp,
    reinforce_pp_baseline)."""
    bootstrap_truncated: bool = False
    """Take the critic's value of the last state as the return after a truncated response, instead of 0."""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW and its schedule, in optimizer steps."""

    kind: Literal["adamw", "cpu_adam"] = "adamw"
    """Implementation: AdamW on the GPU, or DeepSpeed's CPUAdam (ZeRO-Offload), which is slower and keeps its state on
    the host."""
    lr: float = 1e-6
    """Peak learning rate, which follows the warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay rates of the first and the second moment."""
    eps: float = 1e-8
    """Term added to the square root of the second moment."""
    weight_decay: float = 0.0
    """Weight decay of matrices; biases and norms have none."""
    max_grad_norm: float = 1.0
    """Maximum global norm of the gradient, which is scaled down to it; 0 is off."""
    warmup_steps: int = 0
    """Optimizer steps of linear warm-up; 0 is none."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate over the optimizer steps that follow the warm-up."""
    min_lr_ratio: float = 0.0
    """Final learning rate of linear and cosine, as a fraction of `lr`."""


@dataclass(frozen=True, kw_only=True)
class UpdateConfig:
    """How actor and critic are trained on the rollouts of a step."""

    num_epochs: int = 1
    """Passes over the responses of a step."""
    mini_batch_size: int = 128
    """Responses per optimizer step, over all ranks; must divide the responses of a step."""
    micro_batch_tokens: int = 8192
    """Tokens that are packed into one forward and backward pass of a rank, or of a model-parallel group; no result
    depends on it. SCORE packs four times as many on a GPU whose attention kernel takes sequence boundaries."""
    sequence_parallel_size: int = 1
    """Ranks over which the tokens of a micro-batch are split, for long responses; consecutive ranks of one node."""
    tensor_parallel_size: int = 1
    """Ranks over which the matrices of the trained models are split; consecutive ranks of one node."""
    policy_loss: PolicyLoss = "clip"
    """Policy loss: PPO's clipped ratio, GSPO's sequence ratio, CISPO's clipped weight, or the plain policy gradient."""
    clip_low: float = 0.2
    """Lower clip range: the ratio is clipped at 1 - clip_low. 1 means no lower bound and needs cispo."""
    clip_high: float = 0.2
    """Upper clip range: the ratio is clipped at 1 + clip_high."""
    dual_clip: float | None = None
    """Maximum ratio that counts where the advantage is negative, above 1 (usually 3); null is off."""
    correction: Correction = "none"
    """Importance weight of trainer to engine log-probs: truncated (tis), masked outside the bounds (icepop), or masked
    by sequence."""
    correction_low: float = 0.5
    """Lower bound of that weight."""
    correction_high: float = 2.0
    """Upper bound of that weight."""
    old_logprobs: Literal["trainer", "rollout"] = "trainer"
    """Log-probs of the old policy. rollout takes the engine's, which saves a forward pass over all but 8 probe
    responses; it needs `correction: none`."""
    mask_truncated: bool = False
    """Exclude truncated responses from the losses; they still count in group baselines."""
    value_clip: float | None = 0.5
    """Maximum distance of a value from the rollout's; null does not clip."""
    router_aux_loss_coef: float = 0.0
    """Factor of the load-balancing loss of a mixture of experts, which is 1 where all experts get as many tokens; 0 is
    off."""
    entropy_coef: float = 0.0
    """Factor of the entropy bonus; 0 is off."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum_constant"] = "token_mean"
    """How token losses become one number, over all ranks and micro-batches of an optimizer step."""
    critic_warmup_steps: int = 0
    """First steps of the run in which only the critic is trained."""
    zero_stage: Literal[0, 1, 2, 3] = 2
    """DeepSpeed ZeRO stage of actor and critic; 0 needs float32, because DeepSpeed keeps no float32 copy of bfloat16
    weights at that stage."""
    deepspeed: dict = field(default_factory=dict)
    """Further configuration of DeepSpeed for actor and critic by its names there, such as
    {zero_optimization: {overlap_comm: false}}; a key that a setting decides is refused."""
    actor: OptimizerConfig = field(default_factory=OptimizerConfig)
    critic: OptimizerConfig = field(default_factory=lambda: OptimizerConfig(lr=9e-6))


@dataclass(frozen=True, kw_only=True)
class PtxConfig:
    """A language-model loss on further texts, mixed into the actor's loss: (1 - coef) * policy + coef * ptx."""

    path: str | list | None = None
    """Data set of texts, or a list of several, as in `prompts.path`; null is off."""
    column: str = "text"
    """Column of the text, or of a list of chat messages."""
    coef: float = 0.1
    """Weight of the language-model loss, in (0, 1)."""
    batch_size: int = 32
    """Texts per optimizer step, over all ranks."""
    max_tokens: int = 512
    """Maximum length of a text in tokens; longer texts are truncated."""

    @property
    def sources(self) -> list[DataSource]:
        """The data sets of `path`."""
        return sources_of(self.path)
