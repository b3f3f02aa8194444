"""The parts of a run that are read before any model is loaded: tokenizers, prompts, texts and scorers."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import Config, Findings, check
from hybrid_rl.data.prompts import PromptLoader, load_prompts, load_rows
from hybrid_rl.data.template import Template, load_template
from hybrid_rl.data.texts import Text, load_texts, read_texts
from hybrid_rl.distributed import World
from hybrid_rl.models.checks import check_models
from hybrid_rl.models.loading import load_config
from hybrid_rl.models.tokenizer import eos_token_ids, load_other_tokenizer, load_tokenizer
from hybrid_rl.rewards import RemoteScorer, ScorerPool


@dataclass(frozen=True, kw_only=True)
class Data:
    """Tokenizers, prompts, texts and scorers of a run."""

    tokenizer: PreTrainedTokenizerBase
    """The actor's."""
    stop_token_ids: list[int]
    """Sorted ids that end a response."""
    loader: PromptLoader
    """Training prompts of this rank."""
    eval_prompts: list[Prompt]
    """Held-out prompts of this rank; empty without evaluation."""
    scorer: ScorerPool | None
    """Rule functions of training; None if the settings list none."""
    eval_scorer: ScorerPool | None
    """Rule function of evaluation; None without evaluation."""
    remote: RemoteScorer | None
    """HTTP services that score responses; None if the settings list none."""
    reward_tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the reward model; None if it is the actor's, or there is no reward model."""
    ptx_texts: list[Text]
    """Texts of the language-model (ptx) loss; empty without it."""

    def close(self) -> None:
        """End the processes of the rule functions."""
        for scorer in (self.scorer, self.eval_scorer):
            if scorer:
                scorer.close()


def load_data(config: Config, world: World) -> Data:
    """Return the data of a run, after checking the models' folders against the settings.

    Args:
        world: all ranks, over which the prompts are divided.
    Raises:
        ConfigError: everything that check_models, load_tokenizer, load_template, load_prompts, ScorerPool,
            RemoteScorer and load_texts find.
    """
    findings = Findings()
    findings.run(lambda: check_models(config))
    tokenizer = _load_tokenizer(config, findings)
    template = findings.run(lambda: load_template(config.prompts.template_path, tokenizer)) if tokenizer else None
    make = functools.partial(
        ScorerPool,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers,
        memory_limit_bytes=config.reward.memory_limit_bytes,
        environment_variables=config.reward.environment_variables,
    )
    scorer = findings.run(lambda: _make_scorer(config, make))
    is_named = config.run.eval_function is not None or not config.reward.functions
    # Otherwise it is one of the training functions, whose faults are found already.
    eval_scorer = findings.run(lambda: _make_eval_scorer(config, make)) if scorer or is_named else None
    remote = findings.run(lambda: _make_remote(config))
    if tokenizer is None or template is None:
        _check_rows(config, findings)
        findings.raise_any()
    assert tokenizer and template
    if template.chat_template is not None:
        tokenizer.chat_template = template.chat_template  # also for ptx texts and the exported tokenizer
    reward_tokenizer = _load_reward_tokenizer(config, tokenizer, findings)
    check_vocabulary = functools.partial(_check_vocabulary, config, reads_own_ids=reward_tokenizer is not None)
    stop_token_ids = findings.run(lambda: _stop_token_ids(config, tokenizer, template))
    loader = findings.run(lambda: _make_loader(config, tokenizer, world))
    eval_prompts = findings.run(lambda: _load_eval_prompts(config, tokenizer))
    if eval_prompts:
        evaluated = eval_prompts
        findings.run(lambda: check_vocabulary(evaluated, (), "prompts.eval_path"))
    if loader and stop_token_ids:
        train, stops = loader.prompts, stop_token_ids
        findings.run(lambda: check_vocabulary(train, stops, "prompts.path"))
    ptx_texts = findings.run(lambda: load_texts(config.ptx, tokenizer) if config.ptx.path else [])
    if ptx_texts:
        texts = ptx_texts
        findings.run(lambda: _check_ptx_vocabulary(config, texts))
    findings.raise_any()
    assert stop_token_ids and loader and eval_prompts is not None and ptx_texts is not None
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        loader=loader,
        eval_prompts=eval_prompts[world.rank :: world.size],
        scorer=scorer,
        eval_scorer=eval_scorer,
        remote=remote,
        reward_tokenizer=reward_tokenizer,
        ptx_texts=ptx_texts,
    )


def _check_rows(config: Config, findings: Findings) -> None:
    """Check rows and columns of prompts and texts, which need no tokenizer."""
    load = functools.partial(load_rows, config=config.prompts, seed=config.run.seed)
    findings.run(lambda: load(config.prompts.path, num_rows=config.prompts.max_samples))
    held_out = config.prompts.eval_path
    if held_out and _evaluates(config):
        findings.run(lambda: load(held_out, num_rows=config.prompts.max_eval_samples, is_evaluation=True))
    if config.ptx.path:
        findings.run(lambda: read_texts(config.ptx))


def _load_tokenizer(config: Config, findings: Findings) -> PreTrainedTokenizerBase | None:
    """Return the actor's tokenizer; None if its folder holds none, which check_models may have found already."""
    later = Findings()
    tokenizer = later.run(lambda: load_tokenizer(config.models.actor))
    if not findings.messages:
        findings.messages += later.messages
    return tokenizer


def _make_scorer(config: Config, make: Callable[..., ScorerPool]) -> ScorerPool | None:
    """Return the rule functions of training; None if the settings list none."""
    reward = config.reward
    return make(reward.functions, reward.weights, on_error=reward.on_error) if reward.functions else None


def _make_eval_scorer(config: Config, make: Callable[..., ScorerPool]) -> ScorerPool | None:
    """Return the rule function of evaluation; None if the run does not evaluate."""
    if not _evaluates(config):
        return None
    return make([config.eval_function], on_error=config.reward.on_error, field="run.eval_function")


def _make_remote(config: Config) -> RemoteScorer | None:
    """Return the HTTP services that score responses; None if the settings list none."""
    reward = config.reward
    if not reward.remote_urls:
        return None
    return RemoteScorer(
        reward.remote_urls,
        timeout_s=reward.remote_timeout_s,
        retries=reward.remote_retries,
        stall_timeout_s=config.run.stall_timeout_s,
        headers=reward.remote_headers,
    )


def _stop_token_ids(config: Config, tokenizer: PreTrainedTokenizerBase, template: Template) -> list[int]:
    """Return the sorted ids that end a response: of tokenizer, generation config, settings and template."""
    eos = eos_token_ids(config.models.actor, tokenizer)
    return sorted({*eos, *config.rollout.stop_token_ids, *template.stop_token_ids})


def _check_vocabulary(
    config: Config, prompts: Sequence[Prompt], stop_token_ids: Sequence[int], field: str, *, reads_own_ids: bool
) -> None:
    """Check that every model that reads the actor's ids has the ids of the prompts, and the actor the stop ids.

    Args:
        reads_own_ids: whether the reward model has another tokenizer than the actor.
    """
    models = config.models
    paths = {"actor": models.actor, "critic": models.critic, "reference": models.reference, "reward": models.reward}
    for name, path in paths.items():
        if path is None or (name == "reward" and reads_own_ids):
            continue
        model_config = load_config(path, field=f"models.{name}")
        size = getattr(model_config.get_text_config(), "vocab_size", None)
        where = f"is not in the vocabulary of models.{name} = {path}, which has {size} ids"
        if size is None:
            continue
        for prompt in prompts:
            check(max(prompt.token_ids) < size, f"{field}: row {prompt.prompt_id}: id {max(prompt.token_ids)} {where}")
        if name == "actor":
            wrong = [i for i in stop_token_ids if not 0 <= i < size]
            check(not wrong, f"rollout.stop_token_ids, EOS ids and stop_ids: id {wrong[:1]} {where}")


def _check_ptx_vocabulary(config: Config, texts: list[Text]) -> None:
    """Check that the actor, the only model that reads the ptx texts, has their ids."""
    path = config.models.actor
    size = getattr(load_config(path, field="models.actor").get_text_config(), "vocab_size", None)
    if size is None:
        return
    for number, text in enumerate(texts):
        highest = max(text.token_ids)
        check(
            highest < size,
            f"ptx.path: row {number}: id {highest} is not in the vocabulary of models.actor = {path}, which has {size} "
            "ids",
        )


def _load_reward_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase, findings: Findings
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the reward model; None if it is the actor's, or there is no reward model to load."""
    path, start = config.models.reward, f"models.reward = {config.models.reward}:"
    if not path or any(message.startswith(start) for message in findings.messages):
        return None
    return findings.run(lambda: load_other_tokenizer(path, tokenizer))


def _make_loader(config: Config, tokenizer: PreTrainedTokenizerBase, world: World) -> PromptLoader:
    """Return the loader of this rank's training prompts."""
    prompts, seed = config.prompts, config.run.seed
    return PromptLoader(
        load_prompts(prompts.path, tokenizer, prompts, seed=seed, num_rows=prompts.max_samples),
        batch_size=config.rollout.rollout_batch_size,
        seed=seed,
        shuffle=prompts.shuffle,
        rank=world.rank,
        world_size=world.size,
    )


def _evaluates(config: Config) -> bool:
    """Return whether the run evaluates on held-out prompts."""
    return bool(config.prompts.eval_path and config.run.eval_every_steps)


def _load_eval_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the held-out prompts of all ranks; none if the run does not evaluate."""
    if not _evaluates(config):
        return []
    assert config.prompts.eval_path
    return load_prompts(
        config.prompts.eval_path,
        tokenizer,
        config.prompts,
        seed=config.run.seed + 1_000_003,  # a generated task then gives other rows than for training
        num_rows=config.prompts.max_eval_samples,
        is_evaluation=True,
    )
