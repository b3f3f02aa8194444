"""Which settings may change when a run continues from a checkpoint, one rule for every setting. Imports no torch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from hybrid_rl.algorithms.specs import ESTIMATORS

EVALUATION = (
    "run.eval_function",
    "run.eval_samples",
    "run.eval_temperature",
    "run.eval_top_p",
    "run.eval_max_response_tokens",
    "run.eval_target",
    "prompts.eval_path",
    "prompts.eval_split",
    "prompts.max_eval_samples",
)
"""Settings without which two accuracies do not compare."""
MAY_CHANGE: Final = "may change"
WARNS: Final = "warns"
REFUSED: Final = "refused"
BY_CONTENT: Final = "by content"
Kind = Literal["may change", "warns", "refused", "by content"]
MEANINGS: Mapping[Kind, str] = MappingProxyType(
    {
        MAY_CHANGE: "The new value holds from the next step on.",
        WARNS: "As before, with a warning, because rewards, losses or evaluations before and after do not compare.",
        REFUSED: "The run exits with code 2: what the checkpoint holds does not fit another value.",
        BY_CONTENT: "A path may change, and the run exits with code 2 if what is found there is not what the run had.",
    }
)
"""Kind of rule -> what happens to a setting whose value is not the checkpoint's."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """What happens where a setting is not as in the checkpoint."""

    kind: Kind
    reason: str
    """Why, as a clause in the present tense."""
    trait: Callable[[Any], Any] | None = None
    """With refused: the part of the value that must stay, such as whether it is set; other changes warn."""
    needs: str | None = None
    """Setting without which this one has no effect, so that its change is not mentioned."""


def _may_change(reason: str, *names: str) -> dict[str, Rule]:
    return {name: Rule(kind=MAY_CHANGE, reason=reason) for name in names}


def _warns(reason: str, *names: str, needs: str | None = None) -> dict[str, Rule]:
    return {name: Rule(kind=WARNS, reason=reason, needs=needs) for name in names}


def _refused(
    reason: str, *names: str, trait: Callable[[Any], Any] | None = None, needs: str | None = None
) -> dict[str, Rule]:
    return {name: Rule(kind=REFUSED, reason=reason, trait=trait, needs=needs) for name in names}


def _by_content(reason: str, *names: str) -> dict[str, Rule]:
    return {name: Rule(kind=BY_CONTENT, reason=reason) for name in names}


def _optimizer(name: str) -> dict[str, Rule]:
    section = f"update.{name}"
    return {
        **_may_change("the checkpoint holds no learning rate, only the number of steps taken", f"{section}.lr"),
        **_may_change("both implementations keep the same state", f"{section}.kind"),
        **_may_change("the limit holds for each step", f"{section}.max_grad_norm"),
        **_warns("the moments were averaged with other factors", f"{section}.betas", f"{section}.eps"),
        **_warns("the loss is another one", f"{section}.weight_decay"),
        **_warns(
            "the learning rate of the next step may jump",
            f"{section}.warmup_steps",
            f"{section}.schedule",
            f"{section}.min_lr_ratio",
        ),
    }


def needs_critic(estimator: str) -> bool:
    """Return whether an advantage estimator trains a critic; False for an unknown one."""
    return estimator in ESTIMATORS and ESTIMATORS[estimator].needs_critic


def _as_set(names: list[str] | None) -> list[str] | None:
    return None if names is None else sorted(set(names))


RULES: Mapping[str, Rule] = MappingProxyType(
    {
        **_may_change("the folder may be renamed or moved", "run.name", "run.dir"),
        **_may_change("linear and cosine schedules are laid over the new number of steps", "run.num_steps"),
        **_refused("the checkpoint's place in the prompts and the samples follow from it", "run.seed"),
        **_may_change("it says what to continue from", "run.resume"),
        **_may_change(
            "no result depends on it",
            "run.deterministic",
            "run.eval_every_steps",
            "run.profile_steps",
            "run.stop_at_accuracy",
            "run.eval_pass_at",
            "run.stall_timeout_s",
            "run.keep_rollouts",
            "run.prometheus_port",
            "run.trackers",
            "run.project",
            "run.tracked_samples",
            "run.tracked_samples_every_steps",
        ),
        **_warns(
            "accuracies before and after do not compare, and best/ starts again",
            *EVALUATION,
        ),
        # Models
        **_by_content(
            "the hash of weights, config and tokenizer must be the run's",
            "models.actor",
            "models.critic",
            "models.reference",
            "models.reward",
        ),
        **_refused(
            "the checkpoint holds the moving reference's weights, or has none",
            "models.reference_sync_steps",
            trait=bool,
        ),
        **_warns(
            "the reference moves at another pace", "models.reference_mixup_alpha", needs="models.reference_sync_steps"
        ),
        **_refused("the checkpoint holds the averaged weights, or has none", "models.ema_decay", trait=bool),
        **_warns("model weights are rounded otherwise", "models.dtype"),
        **_may_change("the hash of the models includes their code", "models.trust_remote_code"),
        **_may_change(
            "no result depends on it",
            "models.attention",
            "models.fused_layers",
            "models.gradient_checkpointing",
            "models.shard_frozen",
        ),
        **_refused("the checkpoint holds adapters of one shape, or whole weights", "models.lora.rank"),
        **_refused(
            "the checkpoint's adapters have this scale",
            "models.lora.alpha",
            "models.lora.rslora",
            needs="models.lora.rank",
        ),
        **_may_change("the checkpoint holds the adapters as they are", "models.lora.sync", "models.lora.export"),
        **_refused(
            "the checkpoint holds the adapters of these layers",
            "models.lora.target_modules",
            trait=_as_set,
            needs="models.lora.rank",
        ),
        # Data
        **_by_content(
            "the hash of the prompts must be the run's",
            "prompts.path",
            "prompts.split",
            "prompts.max_samples",
            "prompts.num_generated",
            "prompts.task_options",
            "prompts.max_prompt_tokens",
            "prompts.overlong_prompts",
        ),
        **_warns(
            "prompts read otherwise; the hash of the prompts must be the run's",
            "prompts.format",
            "prompts.prompt_column",
            "prompts.answer_column",
            "prompts.system_message",
            "prompts.template_path",
            "prompts.chat",
        ),
        **_refused("the checkpoint holds a place in one order of the prompts", "prompts.shuffle"),
        **_refused("the checkpoint holds a place in the texts, or has none", "ptx.path", trait=bool),
        **_by_content("the hash of the texts must be the run's", "ptx.column", "ptx.max_tokens"),
        **_warns("the loss is another one", "ptx.coef", "ptx.batch_size", needs="ptx.path"),
        # Rollouts and rewards
        **_may_change(
            "no distribution depends on it",
            "rollout.engine",
            "rollout.tensor_parallel_size",
            "rollout.kv_cache_memory_bytes",
            "rollout.gpu_memory_utilization",
            "rollout.enforce_eager",
            "rollout.max_num_seqs",
            "rollout.prefix_caching",
            "rollout.max_logprob_gap",
            "rollout.restarts",
        ),
        **_warns(
            "responses are sampled otherwise",
            "rollout.rollout_batch_size",
            "rollout.group_size",
            "rollout.max_response_tokens",
            "rollout.temperature",
            "rollout.stop_token_ids",
            "rollout.stop_strings",
            "rollout.seed_per_request",
            "rollout.dynamic_filtering_reward_range",
        ),
        **_warns("the trainer computes with other experts", "rollout.routing_replay"),
        **_warns("the engine may compute and sample otherwise", "rollout.vllm"),
        **_warns(
            "responses are filtered otherwise",
            "rollout.dynamic_filtering_max_retries",
            needs="rollout.dynamic_filtering_reward_range",
        ),
        **_warns(
            "conversations go on otherwise",
            "environment.name",
            "environment.arguments",
            "environment.tools",
            "environment.tool_parser",
            "environment.max_turns",
            "environment.max_turn_tokens",
            "environment.rewritten_history",
        ),
        **_may_change(
            "it says how environments run, and what happens to failures",
            "environment.max_concurrent",
            "environment.num_workers",
            "environment.timeout_s",
            "environment.memory_limit_bytes",
            "environment.max_restarts",
            "environment.on_error",
            "environment.environment_variables",
        ),
        **_warns(
            "rewards have another meaning",
            "reward.functions",
            "reward.weights",
            "reward.by_source",
            "reward.gates",
            "reward.model_weight",
            "reward.remote_weight",
            "reward.truncation_penalty",
            "reward.overlong_buffer",
            "reward.clip",
        ),
        **_warns("rewards have another meaning", "reward.overlong_penalty", needs="reward.overlong_buffer"),
        **_warns("rewards may have another meaning", "reward.remote_urls"),
        **_may_change(
            "it says what happens to failures",
            "reward.remote_timeout_s",
            "reward.remote_retries",
            "reward.timeout_s",
            "reward.on_error",
            "reward.num_workers",
            "reward.prompts_per_call",
            "reward.memory_limit_bytes",
        ),
        **_may_change(
            "it says what services and scorer processes are given",
            "reward.remote_headers",
            "reward.environment_variables",
        ),
        **_refused("the checkpoint holds the running mean of rewards, or has none", "reward.normalize"),
        # Training
        **_refused("the checkpoint holds a critic, or has none", "advantage.estimator", trait=needs_critic),
        **_warns(
            "the loss is another one",
            "advantage.gamma",
            "advantage.turn_gamma",
            "advantage.credit",
            "advantage.gae_lambda",
            "advantage.critic_lambda",
            "advantage.length_adaptive_alpha",
            "advantage.kl_in",
            "advantage.kl_estimator",
            "advantage.kl_unbiased",
            "advantage.whiten",
            "advantage.bootstrap_truncated",
            "update.num_epochs",
            "update.mini_batch_size",
            "update.policy_loss",
            "update.clip_low",
            "update.clip_high",
            "update.dual_clip",
            "update.correction",
            "update.correction_low",
            "update.correction_high",
            "update.old_logprobs",
            "update.mask_truncated",
            "update.value_clip",
            "update.entropy_coef",
            "update.router_aux_loss_coef",
            "update.aggregation",
        ),
        **_warns("with kl_target the checkpoint's adapted coefficient goes on instead", "advantage.kl_coef"),
        **_warns("the coefficient adapts otherwise", "advantage.kl_target"),
        **_warns("the coefficient adapts otherwise", "advantage.kl_horizon", needs="advantage.kl_target"),
        **_warns("steps that were taken stay taken", "update.critic_warmup_steps"),
        **_may_change(
            "no result depends on it, and a checkpoint loads on any number of ranks",
            "update.micro_batch_tokens",
            "update.sequence_parallel_size",
            "update.tensor_parallel_size",
            "update.zero_stage",
        ),
        **_warns("gradients may be summed in another order or precision", "update.deepspeed"),
        **_optimizer("actor"),
        **_optimizer("critic"),
        # Where things lie, and what is written
        **_may_change(
            "no result depends on it",
            "memory.swap",
            "memory.enforce",
            "memory.enforce_margin",
            "sync.mode",
            "sync.bucket_bytes",
            "sync.num_verified",
        ),
        **_may_change(
            "it holds for the checkpoints and exports to come",
            "checkpoint.every_steps",
            "checkpoint.on_sigterm",
            "checkpoint.grace_s",
            "checkpoint.async_save",
            "checkpoint.phase_log",
            "checkpoint.keep_last",
            "checkpoint.keep_best",
            "checkpoint.export",
            "checkpoint.export_every_steps",
            "checkpoint.export_keep_last",
            "checkpoint.export_critic",
        ),
    }
)
"""Dotted name of every setting -> its rule."""
