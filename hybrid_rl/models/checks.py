"""Checks of a run's models against the settings, from configs and tokenizers, before any weight is loaded."""

from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from hybrid_rl.config import Config, Findings, check
from hybrid_rl.models.attention import choose_attention
from hybrid_rl.models.exporting import check_export
from hybrid_rl.models.folders import build_on_meta, find_model_class, load_config
from hybrid_rl.models.fused_layers import check_family
from hybrid_rl.models.lengths import max_tokens
from hybrid_rl.models.lora import check_targets
from hybrid_rl.models.sequence_parallel import check_heads
from hybrid_rl.models.tensor_parallel import check_shard_plan
from hybrid_rl.models.tokenizer import load_other_tokenizer, load_tokenizer
from hybrid_rl.models.weight_match import check_weights


def check_models(config: Config) -> None:
    """Check the folders of all models of a run against its settings.

    The length limit of a reward model with its own tokenizer is not checked: the length of the re-encoded text is not
    known before the run.

    Raises:
        ConfigError: a folder holds no model, or other weights than its config.json describes; a sequence would be
            longer than a model allows; critic or reference has another tokenizer than the actor, or the critic would
            start as a reward model that has; the trained model could not be exported; models.attention,
            models.fused_layers, models.lora or a parallel size does not fit a model.
    """
    paths = {name: getattr(config.models, name) for name in ("actor", "critic", "reference", "reward")}
    paths = {f"models.{name}": path for name, path in paths.items() if path is not None}
    findings = Findings()
    configs = {field: findings.run(partial(load_config, path, field=field)) for field, path in paths.items()}
    if configs["models.actor"] is None:  # its folder is named already
        findings.raise_any()
    tokenizer = findings.run(lambda: load_tokenizer(config.models.actor))
    if tokenizer is None:
        findings.raise_any()
    found = {field: model_config for field, model_config in configs.items() if model_config is not None}
    for field, model_config in found.items():
        kind = {"is_policy": field in ("models.actor", "models.reference"), "new_head": field == "models.critic"}
        findings.run(partial(check_weights, paths[field], field=field, **kind))
        findings.run(partial(_check_tokens, config, field, paths[field], model_config, tokenizer))
    source = "models.reward" if config.models.reward else "models.actor"
    if config.has_critic and source in found:
        found.setdefault("models.critic", found[source])
    for field, model_config in found.items():
        findings.run(partial(_check_class, config, field, model_config))
    where = f"models.actor = {config.models.actor}"
    findings.run(lambda: check_export(configs["models.actor"], tokenizer, where=where))
    findings.raise_any()
    if config.has_critic and config.models.critic is None:
        check_weights(paths[source], field="models.critic", is_policy=False, new_head=True)


def _check_tokens(
    config: Config, field: str, path: str, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check the tokenizer and the length limit of a model."""
    if not _has_own_tokenizer(config, field, path, tokenizer):
        _check_length(config, field, path, model_config)


def _has_own_tokenizer(config: Config, field: str, path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a model's tokenizer differs from the actor's, which only a reward model's may."""
    is_other = load_other_tokenizer(path, tokenizer) is not None
    if is_other and field == "models.reward":
        check(
            config.models.critic is not None or not config.has_critic,
            f"models.critic is null and would start as models.reward = {path}, whose tokenizer is not the actor's: "
            "give a critic, such as the actor's folder",
        )
        return True
    check(
        not is_other,
        f"{field} = {path}: its tokenizer is not the actor's, so it would read other tokens than were sampled; "
        "use a model with the actor's tokenizer",
    )
    return False


def _check_length(config: Config, field: str, path: str, model_config: PretrainedConfig) -> None:
    prompt, response = config.prompts.max_prompt_tokens, config.rollout.max_response_tokens
    limit = max_tokens(model_config)
    check(
        limit is None or prompt + response <= limit,
        f"prompts.max_prompt_tokens {prompt} + rollout.max_response_tokens {response} = {prompt + response}: "
        f"{field} = {path} takes at most {limit} tokens; lower one of the two",
    )


def _check_class(config: Config, field: str, model_config: PretrainedConfig) -> None:
    """Check that a model's class supports the attention, kernels, adapters and parallel sizes of the settings."""
    is_policy = field in ("models.actor", "models.reference")
    model_class = find_model_class(model_config, field, is_policy=is_policy)
    choose_attention(
        config.models.attention, torch.device("cpu"), torch.float32, model_class, model_config, field=field
    )
    check_family(config.models.fused_layers, model_config.model_type, field=field)
    if config.update.sequence_parallel_size > 1:
        check_heads(model_config, config.update.sequence_parallel_size, where=field)
    if field not in ("models.actor", "models.critic"):
        return
    lora, size = config.models.lora, config.update.tensor_parallel_size
    if size > 1:
        check_shard_plan(build_on_meta(model_class, model_config, is_policy=is_policy)[0], size)
    if lora.rank and lora.target_modules:
        model, head = build_on_meta(model_class, model_config, is_policy=is_policy)
        check_targets(model, lora, heads=[head])
