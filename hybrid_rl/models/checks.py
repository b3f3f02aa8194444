"""Checks of a run's models against the settings, from configs and tokenizers, before any weight is loaded."""

from collections.abc import Mapping
from functools import partial

import torch
from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from hybrid_rl.config import Config, Findings, check
from hybrid_rl.models.choices import choose_model
from hybrid_rl.models.exporting import check_export
from hybrid_rl.models.folders import load_config
from hybrid_rl.models.lengths import max_tokens
from hybrid_rl.models.lora import add_adapters
from hybrid_rl.models.routing import find_routers
from hybrid_rl.models.sequence_parallel import check_heads, check_slices
from hybrid_rl.models.tensor_parallel import check_shard_plan
from hybrid_rl.models.tokenizer import load_other_tokenizer, load_tokenizer
from hybrid_rl.models.weight_match import check_weights


def check_models(config: Config, device: torch.device) -> None:
    """Check the folders of all models of a run against its settings.

    The length limit of a reward model with its own tokenizer is not checked: the length of the re-encoded text is not
    known before the run.

    Args:
        config: settings of the run.
        device: device of a rank, which need not be on this machine.
    Raises:
        ConfigError: a folder holds no model, or other weights than its config.json describes; a sequence would be
            longer than a model allows; critic or reference has another tokenizer than the actor, or the critic would
            start as a reward model that has; the trained model could not be exported; models.attention,
            models.fused_layers, models.lora or a parallel size does not fit a model.
    """
    trust = config.models.trust_remote_code
    paths = {name: getattr(config.models, name) for name in ("actor", "critic", "reference", "reward")}
    paths = {f"models.{name}": path for name, path in paths.items() if path is not None}
    findings = Findings()
    configs = {
        field: findings.run(partial(load_config, path, field=field, trust_remote_code=trust))
        for field, path in paths.items()
    }
    if configs["models.actor"] is None:  # its folder is named already
        findings.raise_any()
    tokenizer = findings.run(lambda: load_tokenizer(config.models.actor, trust_remote_code=trust))
    if tokenizer is None:
        findings.raise_any()
    found = {field: model_config for field, model_config in configs.items() if model_config is not None}
    for field, model_config in found.items():
        kind = {"is_policy": field in ("models.actor", "models.reference"), "new_head": field == "models.critic"}
        findings.run(partial(check_weights, paths[field], field=field, trust_remote_code=trust, **kind))
        findings.run(partial(_check_tokens, config, field, paths[field], model_config, tokenizer))
    source = "models.reward" if config.models.reward else "models.actor"
    _check_classes(config, found, device, findings)
    where = f"models.actor = {config.models.actor}"
    findings.run(lambda: check_export(configs["models.actor"], tokenizer, where=where))
    findings.raise_any()
    if config.has_critic and config.models.critic is None:
        check_weights(paths[source], field="models.critic", is_policy=False, new_head=True, trust_remote_code=trust)


def check_classes(config: Config, device: torch.device) -> None:
    """Check the classes of a run's models against its settings, from their configs alone.

    Args:
        config: settings of the run.
        device: device of a rank, which need not be on this machine.
    Raises:
        ConfigError: a folder has no config.json of a model; models.attention, models.fused_layers, models.lora or a
            parallel size does not fit a class.
    """
    models, findings = config.models, Findings()
    paths = {f"models.{name}": getattr(models, name) for name in ("actor", "critic", "reference", "reward")}
    trust = models.trust_remote_code
    configs = {
        field: findings.run(partial(load_config, path, field=field, trust_remote_code=trust))
        for field, path in paths.items()
        if path is not None
    }
    found = {field: model_config for field, model_config in configs.items() if model_config is not None}
    _check_classes(config, found, device, findings)
    findings.raise_any()


def _check_classes(
    config: Config, configs: Mapping[str, PretrainedConfig], device: torch.device, findings: Findings
) -> None:
    """Check the class of every model; the critic that models.critic = null means has the config of another model."""
    source = "models.reward" if config.models.reward else "models.actor"
    own = {"models.critic": configs[source]} if config.has_critic and source in configs else {}
    for field, model_config in (own | dict(configs)).items():
        findings.run(partial(_check_class, config, field, model_config, device))


def _check_tokens(
    config: Config, field: str, path: str, model_config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> None:
    """Check the tokenizer and the length limit of a model."""
    if not _has_own_tokenizer(config, field, path, tokenizer):
        _check_length(config, field, path, model_config)


def _has_own_tokenizer(config: Config, field: str, path: str, tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a model's tokenizer differs from the actor's, which only a reward model's may."""
    trust = config.models.trust_remote_code
    is_other = load_other_tokenizer(path, tokenizer, trust_remote_code=trust) is not None
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
    response = config.run.eval_max_response_tokens or 0
    check(
        limit is None or field != "models.actor" or prompt + response <= limit,
        f"prompts.max_prompt_tokens {prompt} + run.eval_max_response_tokens {response} = {prompt + response}: "
        f"{field} = {path} takes at most {limit} tokens; lower one of the two",
    )


def _check_class(config: Config, field: str, model_config: PretrainedConfig, device: torch.device) -> None:
    """Check that a model's class supports the attention, kernels, adapters and parallel sizes of the settings."""
    is_policy = field in ("models.actor", "models.reference")
    choice = choose_model(config.models, model_config, device, field=field, is_policy=is_policy)
    num_slices, num_shards = config.update.sequence_parallel_size, config.update.tensor_parallel_size
    if num_slices > 1:
        check_heads(model_config, num_slices, where=field)
        where = f"update.sequence_parallel_size = {num_slices}: {field}: {type(choice.model).__name__}"
        check_slices(model_config, choice.attention, is_padded=choice.is_padded, where=where)
    if field == "models.actor":
        _check_routing(config, choice.model)
    if field not in ("models.actor", "models.critic"):
        return
    if num_shards > 1:
        check_shard_plan(choice.model, num_shards)
    if config.models.lora.rank:
        add_adapters(choice.model, config.models.lora, heads=[choice.head])


def _check_routing(config: Config, model: PreTrainedModel) -> None:
    """Check that an actor whose experts are to be replayed or balanced is a mixture of experts."""
    is_mixture, name = bool(find_routers(model)), type(model).__name__
    for field, value, off in (
        ("rollout.routing_replay", config.rollout.routing_replay, "false"),
        ("update.router_aux_loss_coef", config.update.router_aux_loss_coef, "0"),
    ):
        check(
            not value or is_mixture,
            f"{field} = {str(value).lower()}: models.actor = {config.models.actor}: {name} has no routers of experts "
            f"that are known here; set {off}",
        )
