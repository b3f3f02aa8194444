"""The rules of the settings that can be checked without a file or a device. Imports no torch."""

import functools
import re
from collections.abc import Iterable

from hybrid_rl.algorithms.specs import ESTIMATORS, POLICY_LOSSES
from hybrid_rl.config import BY_SOURCE, Config, ConfigError, Findings, check
from hybrid_rl.settings.passed_on import refused_keys
from hybrid_rl.settings.paths import broken_paths, expand_home
from hybrid_rl.settings.ranges import MIN_TEMPERATURE, broken_values
from hybrid_rl.settings.sources import broken_sources
from hybrid_rl.settings.types import (
    broken_sections,
    broken_types,
    get_setting,
    section_types,
    setting_types,
    show,
    with_settings,
)

GPU_ATTENTION = ("flash_attention_2", "varlen")
"""Values of models.attention whose kernels compute in 16 bits on a GPU only."""
CHUNKED = "enable_chunked_prefill"
"""Engine argument of vLLM that the trainer sets on a CPU."""
CANNOT_OFFLOAD = "DeepSpeed has no offload for update.zero_stage = 1 in bfloat16"


def group_sizes(config: Config) -> dict[str, int]:
    """Return the number of consecutive ranks of a node that work together, by the setting that gives it."""
    return {
        "rollout.tensor_parallel_size": config.rollout.tensor_parallel_size,
        "update.sequence_parallel_size": config.update.sequence_parallel_size,
        "update.tensor_parallel_size": config.update.tensor_parallel_size,
    }


def check_ranks(config: Config, *, num_ranks: int, ranks_on_nodes: Iterable[int]) -> None:
    """Check that the ranks of a run can form the groups that are set.

    Args:
        num_ranks: number of all ranks.
        ranks_on_nodes: numbers of ranks on the nodes.

    Raises:
        ConfigError: a size does not divide the number of ranks, or the number of ranks of a node.
    """
    ranks_on_nodes = list(ranks_on_nodes)
    for name, size in group_sizes(config).items():
        field = f"{name} = {size}"
        check(num_ranks % size == 0, f"{field}: must divide the number of ranks, {num_ranks}")
        for number in ranks_on_nodes:
            check(number % size == 0, f"{field}: must divide the ranks of every node, and a node has {number}")


def _check_algorithms(config: Config) -> None:
    """The algorithms take the settings that are given."""
    estimator, policy_loss = config.advantage.estimator, config.update.policy_loss
    check(
        not ESTIMATORS[estimator].compares_group or config.rollout.group_size >= 2,
        f"rollout.group_size = {config.rollout.group_size}: advantage.estimator = {estimator} needs 2 or more",
    )
    comparing = " or ".join(name for name, spec in ESTIMATORS.items() if spec.compares_group)
    check(
        config.advantage.credit == "response" or ESTIMATORS[estimator].compares_group,
        f"advantage.credit = {config.advantage.credit}: needs advantage.estimator = {comparing}",
    )
    with_critic = " or ".join(name for name, spec in ESTIMATORS.items() if spec.needs_critic)
    for name in ("critic_lambda", "length_adaptive_alpha"):
        value = getattr(config.advantage, name)
        check(
            value is None or ESTIMATORS[estimator].needs_critic,
            f"advantage.{name} = {value}: needs advantage.estimator = {with_critic}",
        )
    clip_low, dual_clip = config.update.clip_low, config.update.dual_clip
    is_unbounded = clip_low == 1 and POLICY_LOSSES[policy_loss].is_lower_bound_optional
    unbounded = " or ".join(name for name, spec in POLICY_LOSSES.items() if spec.is_lower_bound_optional)
    check(
        clip_low < 1 or is_unbounded,
        f"update.clip_low = {clip_low}: must be below 1 unless update.policy_loss = {unbounded}",
    )
    if dual_clip is not None:
        with_dual_clip = " or ".join(name for name, spec in POLICY_LOSSES.items() if spec.takes_dual_clip)
        check(
            POLICY_LOSSES[policy_loss].takes_dual_clip,
            f"update.dual_clip = {dual_clip}: needs update.policy_loss = {with_dual_clip}, not {policy_loss}",
        )


def _check_sources(config: Config) -> None:
    """There is a model to train, there are prompts, and there is a source of scores."""
    reward, profiled = config.reward, config.run.profile_steps
    check(
        profiled is None or profiled[0] <= profiled[1],
        f"run.profile_steps = {list(profiled or [])}: must be a first and a last step, which is not before it",
    )
    check(
        config.models.reward is not None
        or bool(reward.functions)
        or bool(reward.remote_urls)
        or config.environment.name is not None,
        "models.reward is null, reward.functions and reward.remote_urls are empty: one must score the responses, or "
        "environment.name",
    )
    check(
        reward.weights is None or len(reward.weights) == len(reward.functions),
        f"reward.weights has {len(reward.weights or [])} values, reward.functions {len(reward.functions)}: one each",
    )
    unknown = [gate for gate in reward.gates if gate not in reward.functions or gate == "by_source"]
    check(not unknown, f"reward.gates = {reward.gates}: {unknown[:1]} must be a function of reward.functions")


def _check_sizes(config: Config) -> None:
    """Batches divide, and sequences fit."""
    rollout, update = config.rollout, config.update
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
    check(
        config.reward.overlong_buffer <= rollout.max_response_tokens,
        f"reward.overlong_buffer = {config.reward.overlong_buffer}: must not exceed rollout.max_response_tokens "
        f"= {rollout.max_response_tokens}",
    )
    check(
        config.ptx.path is None or config.ptx.max_tokens <= update.micro_batch_tokens,
        f"ptx.max_tokens = {config.ptx.max_tokens}: must not exceed update.micro_batch_tokens "
        f"= {update.micro_batch_tokens}",
    )


def _check_advantage(config: Config) -> None:
    """The settings of the KL penalty fit together."""
    advantage = config.advantage
    check(
        not advantage.kl_unbiased or advantage.kl_in == "loss",
        "advantage.kl_unbiased = true: needs advantage.kl_in = loss; a KL in the reward has no gradient of its own",
    )
    check(
        advantage.kl_target is None or config.responses_per_step < 5 * advantage.kl_horizon,
        f"advantage.kl_horizon = {advantage.kl_horizon}: must be above a fifth of the {config.responses_per_step} "
        "responses of a step, or one step could take kl_coef to 0",
    )
    check(
        advantage.kl_target is None or advantage.kl_coef > 0,
        f"advantage.kl_target = {advantage.kl_target}: needs advantage.kl_coef > 0 to start from",
    )


def _check_reference(config: Config) -> None:
    """A reference that moves is a model of its own."""
    models = config.models
    if models.reference_sync_steps:
        check(
            config.has_reference and not config.reference_is_actor,
            f"models.reference_sync_steps = {models.reference_sync_steps}: needs a reference of its own; set "
            "advantage.kl_coef above 0 and, with models.lora, models.reference",
        )


def _check_rollout(config: Config) -> None:
    """Responses can be generated, and groups filtered."""
    size, engine = config.rollout.tensor_parallel_size, config.rollout.engine
    check(
        size == 1 or engine == "vllm",
        f"rollout.tensor_parallel_size = {size}: needs rollout.engine = vllm, not {engine}",
    )
    slices, environment = config.update.sequence_parallel_size, config.environment.name
    if config.rollout.routing_replay:
        check(
            environment is None,
            "rollout.routing_replay = true: the experts of single responses alone are replayed, and environment.name = "
            f"{environment} has several turns; set one of them otherwise",
        )
    for field, value in {
        "rollout.routing_replay": config.rollout.routing_replay,
        "update.router_aux_loss_coef": config.update.router_aux_loss_coef,
    }.items():
        check(
            not value or slices == 1,
            f"{field} = {str(value).lower()}: needs update.sequence_parallel_size = 1, not {slices}, with which no "
            "rank routes whole sequences",
        )
    bounds, group_size = config.rollout.dynamic_filtering_reward_range, config.rollout.group_size
    if bounds is not None:
        field = "rollout.dynamic_filtering_reward_range"
        check(bounds[0] < bounds[1], f"{field} = {list(bounds)}: the first must be below the second")
        check(group_size >= 2, f"rollout.group_size = {group_size}: {field} needs 2 or more")


def _check_losses(config: Config) -> None:
    """Importance weights have a ratio."""
    update = config.update
    check(
        update.old_logprobs == "trainer" or update.correction == "none",
        f"update.correction = {update.correction}: update.old_logprobs = rollout leaves no ratio between the engines",
    )


def _check_training_state(config: Config) -> None:
    """DeepSpeed can hold the optimizer where the settings want it, and the phase log ends."""
    update = config.update
    check(
        config.memory.swap != "deepspeed" or update.zero_stage > 0,
        "memory.swap = deepspeed: DeepSpeed cannot offload update.zero_stage = 0; use 1 to 3, or swap = vmm or off",
    )
    for name in ("actor", "critic"):
        check(
            getattr(update, name).kind == "adamw" or update.zero_stage > 0,
            f"update.{name}.kind = cpu_adam: needs update.zero_stage 1 to 3",
        )
    check(
        config.checkpoint.every_steps > 0 or not config.checkpoint.phase_log,
        "checkpoint.phase_log = true: needs checkpoint.every_steps > 0, or the log would grow without end",
    )
    with_critic = " or ".join(name for name, spec in ESTIMATORS.items() if spec.needs_critic)
    check(
        config.has_critic or not config.checkpoint.export_critic,
        f"checkpoint.export_critic = true: needs advantage.estimator = {with_critic}, which trains a critic",
    )


def _check_passed_on(config: Config) -> None:
    """What is passed on to vLLM and DeepSpeed contradicts no setting."""
    sentences = list(refused_keys(config))
    if sentences:
        raise ConfigError(*sentences)


def _check_tensor_parallel(config: Config) -> None:
    """Tensor parallelism excludes ZeRO-3, adapters and sequence parallelism."""
    update, rank = config.update, config.models.lora.rank
    if update.tensor_parallel_size == 1:
        return
    field, size = f"update.tensor_parallel_size = {update.tensor_parallel_size}", update.sequence_parallel_size
    check(update.zero_stage < 3, f"{field}: needs update.zero_stage 0 to 2, not {update.zero_stage}")
    check(rank == 0, f"{field}: needs models.lora.rank = 0, not {rank}; DeepSpeed shards no layer with adapters")
    check(size == 1, f"{field}: needs update.sequence_parallel_size = 1, not {size}")


def _check_evaluation(config: Config) -> None:
    """An evaluation can sample as it is set, and its metrics exist."""
    run, settings = config.run, config.evaluation_rollout
    temperature = settings.temperature
    origin = "run.eval_temperature" if run.eval_temperature is not None else "run.eval_temperature = null"
    check(
        temperature == 0 or temperature >= MIN_TEMPERATURE,
        f"run.eval_temperature = {temperature}: must be 0, which is greedy, or at least {MIN_TEMPERATURE}",
    )
    check(
        temperature > 0 or run.eval_samples == 1,
        f"run.eval_samples = {run.eval_samples}: run.eval_temperature = 0 gives equal responses to a prompt; set one "
        "of them otherwise",
    )
    check(
        temperature > 0 or run.eval_top_p == 1,
        f"run.eval_top_p = {run.eval_top_p}: has no effect on greedy decoding ({origin}); set run.eval_temperature",
    )
    too_many = [k for k in run.eval_pass_at or () if k > run.eval_samples]
    check(
        not too_many,
        f"run.eval_pass_at = {run.eval_pass_at}: pass@{too_many[:1]} needs as many responses per prompt, and "
        f"run.eval_samples = {run.eval_samples}",
    )
    sets = list(config.prompts.evaluation_sources)
    check(
        run.eval_target is None or run.eval_target in filter(None, sets),
        f"run.eval_target = {run.eval_target}: must be a name in prompts.eval_path, which has "
        f"{', '.join(filter(None, sets)) or 'no names'}",
    )


def _check_by_source(config: Config) -> None:
    """Every data set in reward.by_source has rule functions, and something chooses them."""
    for source, value in config.reward.by_source.items():
        names = value if isinstance(value, list) else [value]
        check(
            bool(names) and all(isinstance(name, str) and name.strip() for name in names),
            f"reward.by_source: {source} = {value}: must be a rule function, or a list of them",
        )
    check(
        not config.reward.by_source or BY_SOURCE in (*config.reward.functions, config.run.eval_function),
        f"reward.by_source has no effect: add {BY_SOURCE} to reward.functions, or remove it",
    )


COMBINATIONS = (
    _check_sources,
    _check_by_source,
    _check_evaluation,
    _check_sizes,
    _check_algorithms,
    _check_advantage,
    _check_reference,
    _check_rollout,
    _check_losses,
    _check_training_state,
    _check_tensor_parallel,
    _check_passed_on,
)
"""Rules of several settings together; a sentence names every setting that it depends on."""


def dtype_name(config: Config, *, is_cpu: bool) -> str:
    """Return the data type of parameters on a kind of device; see models.dtype."""
    chosen = config.models.dtype
    return chosen if chosen != "auto" else "float32" if is_cpu else "bfloat16"


def check_device(config: Config, *, is_cpu: bool) -> None:
    """Check the settings that depend on whether the run has GPUs, and on the data type that follows from it.

    Raises:
        ConfigError: one sentence for every setting that cannot work there.
    """
    models, update, profiled = config.models, config.update, config.run.profile_steps
    dtype = dtype_name(config, is_cpu=is_cpu)
    is_half_on_gpu = dtype == "bfloat16" and not is_cpu
    where = f"this run has {'no GPU' if is_cpu else 'GPUs'} and {dtype} weights"
    findings = Findings()
    for ok, message in (
        (
            profiled is None or not is_cpu,
            f"run.profile_steps = {list(profiled or [])}: there is no GPU to profile; set null",
        ),
        (
            update.zero_stage > 0 or dtype == "float32",
            f"update.zero_stage = 0: DeepSpeed keeps no float32 copy of {dtype} weights at this stage, so that small "
            "steps of the optimizer would be lost; set 1, which gives the result of stage 0 with less memory, or "
            "models.dtype: float32",
        ),
        (
            models.attention not in GPU_ATTENTION or is_half_on_gpu,
            f"models.attention = {models.attention}: needs GPUs and bfloat16 weights, and {where}; set auto",
        ),
        (
            models.fused_layers != "liger" or is_half_on_gpu,
            f"models.fused_layers = liger: needs GPUs and bfloat16 weights, and {where}; set auto",
        ),
        (
            not is_cpu or CHUNKED not in config.rollout.vllm,
            f"rollout.vllm.{CHUNKED} = {show(config.rollout.vllm.get(CHUNKED))}: cannot be given on a CPU, where vLLM "
            "cannot undo what a seeded request draws at the end of a part of its prompt; remove it",
        ),
        (
            config.memory.swap != "deepspeed" or is_cpu or can_offload(config, dtype),
            f"memory.swap = deepspeed: {CANNOT_OFFLOAD}; use 2 or 3, or memory.swap = vmm or off",
        ),
    ):
        findings.run(functools.partial(check, ok, message))
    findings.raise_any()


def can_offload(config: Config, dtype: str) -> bool:
    """Return whether DeepSpeed's offload can move the optimizers that are on the GPU, see memory.swap."""
    trained = [config.update.actor, *([config.update.critic] if config.has_critic else [])]
    is_needed = any(optimizer.kind == "adamw" for optimizer in trained)
    return not is_needed or config.update.zero_stage >= 2 or (config.update.zero_stage == 1 and dtype == "float32")


def validate(config: Config) -> Config:
    """Return the config, with `~` in paths replaced by the home folder, if it breaks none of the rules.

    Raises:
        ConfigError: one sentence for every setting that cannot work, which names the field, its value and the rule.
    """
    check(isinstance(config, Config), f"the settings are of type {type(config).__name__}: must be a Config")
    broken: dict[str, str] = {}
    for find in (broken_sections, broken_types, broken_sources, broken_paths, broken_values):
        config = expand_home(config) if find is broken_paths else config
        broken = dict(find(config)) | broken
        config = with_settings(config, {name: get_setting(Config(), name) for name in broken})
    findings = Findings()
    for rule in COMBINATIONS:
        findings.run(functools.partial(rule, config))
    combined = [message for message in findings.messages if not broken.keys() & set(re.findall(r"[\w.]+", message))]
    order = [*section_types(), *setting_types()]
    sentences = [broken[name] for name in sorted(broken, key=order.index)] + combined
    if sentences:
        raise ConfigError(*sentences)
    return config
