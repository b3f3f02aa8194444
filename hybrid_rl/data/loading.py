"""The parts of a run that are read before any model is loaded: tokenizers, prompts, texts and scorers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import Config, Findings, check
from hybrid_rl.data.order import PromptLoader
from hybrid_rl.data.prompts import PromptSet
from hybrid_rl.data.sets import (
    check_rows,
    describe,
    evaluates,
    load_evaluation_sets,
    load_training_sets,
    make_mixture,
    number_prompts,
)
from hybrid_rl.data.source_functions import choose_functions
from hybrid_rl.data.template import Template, load_template
from hybrid_rl.data.texts import TextSet, load_text_sets, read_texts
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
    eval_sets: Mapping[str, list[Prompt]]
    """Name -> held-out prompts of this rank; the name is empty where there is one set, and none without evaluation."""
    scorer: ScorerPool | None
    """Rule functions of training; None if the settings list none."""
    eval_scorer: ScorerPool | None
    """Rule function of evaluation; None without evaluation, or where the environment judges."""
    remote: RemoteScorer | None
    """HTTP services that score responses; None if the settings list none."""
    reward_tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the reward model; None if it is the actor's, or there is no reward model."""
    text_sets: list[TextSet]
    """Texts of the language-model (ptx) loss, by data set; empty without it."""
    lines: list[str]
    """A line for each data set, which a run shows when it starts."""

    @property
    def eval_prompts(self) -> list[Prompt]:
        """Held-out prompts of this rank, of all sets."""
        return [prompt for prompts in self.eval_sets.values() for prompt in prompts]

    def close(self) -> None:
        """End the processes of the rule functions."""
        for scorer in (self.scorer, self.eval_scorer):
            if scorer:
                scorer.close()


@dataclass(frozen=True, kw_only=True)
class _Read:
    """The data sets of a run; what cannot be read is None, which is a finding."""

    training: list[PromptSet] | None
    evaluation: dict[str, PromptSet] | None
    texts: list[TextSet] | None


def load_data(config: Config, world: World) -> Data:
    """Return the data of a run, after checking the models' folders against the settings.

    Args:
        world: all ranks, over which the prompts are divided.
    Raises:
        ConfigError: everything that check_models, load_tokenizer, load_template, load_prompts, ScorerPool,
            RemoteScorer and load_text_sets find.
    """
    findings, of_rows = Findings(), Findings()
    findings.run(lambda: check_models(config, world.device))
    tokenizer = _load_tokenizer(config, findings)
    template = of_rows.run(lambda: load_template(config.prompts.template_path, tokenizer)) if tokenizer else None
    if tokenizer is not None and template is not None and template.chat_template is not None:
        tokenizer.chat_template = template.chat_template  # also for ptx texts and the exported tokenizer
    read = _read(config, tokenizer if template else None, of_rows)
    scorer, eval_scorer = _make_scorers(config, read, findings)
    remote = findings.run(lambda: _make_remote(config))
    findings.messages += of_rows.messages
    if tokenizer is None or template is None:
        findings.raise_any()
    assert tokenizer and template
    reward_tokenizer = _load_reward_tokenizer(config, tokenizer, findings)
    stop_token_ids = findings.run(lambda: _stop_token_ids(config, tokenizer, template))
    _check_vocabularies(config, read, stop_token_ids or [], findings, reads_own_ids=reward_tokenizer is not None)
    training = read.training
    loader = findings.run(lambda: _make_loader(config, training, world)) if training else None
    findings.raise_any()
    assert stop_token_ids and loader and read.training and read.evaluation is not None and read.texts is not None
    held_out = dict(zip(read.evaluation, number_prompts(read.evaluation.values()), strict=True))
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=stop_token_ids,
        loader=loader,
        eval_sets={name: prompts[world.rank :: world.size] for name, prompts in held_out.items()},
        scorer=scorer,
        eval_scorer=eval_scorer,
        remote=remote,
        reward_tokenizer=reward_tokenizer,
        text_sets=read.texts,
        lines=[*describe(config, read.training, read.evaluation), *(each.line for each in read.texts)],
    )


def _read(config: Config, tokenizer: PreTrainedTokenizerBase | None, findings: Findings) -> _Read:
    """Return the data sets of a run; without a tokenizer only their rows are checked."""
    if tokenizer is None:
        check_rows(config, findings)
        if config.ptx.path:
            findings.run(lambda: read_texts(config.ptx))
        return _Read(training=None, evaluation=None, texts=None)
    return _Read(
        training=findings.run(lambda: load_training_sets(config, tokenizer)),
        evaluation=findings.run(lambda: load_evaluation_sets(config, tokenizer)),
        texts=findings.run(lambda: load_text_sets(config.ptx, tokenizer)),
    )


def _load_tokenizer(config: Config, findings: Findings) -> PreTrainedTokenizerBase | None:
    """Return the actor's tokenizer; None if its folder holds none, which check_models may have found already."""
    later = Findings()
    tokenizer = later.run(
        lambda: load_tokenizer(config.models.actor, trust_remote_code=config.models.trust_remote_code)
    )
    if not findings.messages:
        findings.messages += later.messages
    return tokenizer


def _make_scorers(config: Config, read: _Read, findings: Findings) -> tuple[ScorerPool | None, ScorerPool | None]:
    """Return the rule functions of training and the rule function of evaluation; None for what the run does not use."""
    reward = config.reward
    make = functools.partial(
        ScorerPool,
        timeout_s=reward.timeout_s,
        num_workers=reward.num_workers,
        memory_limit_bytes=reward.memory_limit_bytes,
        environment_variables=reward.environment_variables,
        on_error=reward.on_error,
        prompts_per_call=reward.prompts_per_call,
        answer_column=config.prompts.answer_column,
    )
    scorer = findings.run(lambda: _make_scorer(config, read.training or [], make))
    if scorer:
        prompts = [prompt for each in read.training or [] for prompt in each.prompts]
        findings.run(lambda: scorer.check_columns(prompts))
    is_named = config.run.eval_function is not None or not reward.functions
    # Otherwise it is one of the training functions, whose faults are found already.
    evaluated = list((read.evaluation or {}).values())
    eval_scorer = findings.run(lambda: _make_eval_scorer(config, evaluated, make)) if scorer or is_named else None
    return scorer, eval_scorer


def _make_scorer(config: Config, sets: Sequence[PromptSet], make: Callable[..., ScorerPool]) -> ScorerPool | None:
    """Return the rule functions of training; None if the settings list none."""
    reward = config.reward
    if not reward.functions:
        return None
    choice = choose_functions(reward.functions, reward.weights, reward.by_source, sets, setting="reward.functions")
    return make(choice.names, choice.weights, applies=choice.applies) if choice.names else None


def _make_eval_scorer(config: Config, sets: Sequence[PromptSet], make: Callable[..., ScorerPool]) -> ScorerPool | None:
    """Return the rule function of evaluation; None if the run does not evaluate."""
    if not evaluates(config) or config.is_judged_by_environment:
        return None
    setting = "run.eval_function"
    choice = choose_functions(
        [config.eval_function], None, config.reward.by_source, sets, setting=setting, is_judge=True
    )
    return make(choice.names, applies=choice.applies, field=setting) if choice.names else None


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


def _check_vocabularies(
    config: Config, read: _Read, stop_token_ids: Sequence[int], findings: Findings, *, reads_own_ids: bool
) -> None:
    """Check that every model that reads the actor's ids has the ids of prompts, texts and stop tokens.

    Args:
        reads_own_ids: whether the reward model has another tokenizer than the actor.
    """
    for each in [*(read.evaluation or {}).values(), *(read.training or [])]:
        findings.run(functools.partial(_check_vocabulary, config, each, reads_own_ids=reads_own_ids))
    findings.run(lambda: _check_stop_ids(config, stop_token_ids))
    for texts in read.texts or []:
        findings.run(functools.partial(_check_ptx_vocabulary, config, texts))


def _check_vocabulary(config: Config, prompts: PromptSet, *, reads_own_ids: bool) -> None:
    models = config.models
    paths = {"actor": models.actor, "critic": models.critic, "reference": models.reference, "reward": models.reward}
    for name, path in paths.items():
        if path is None or (name == "reward" and reads_own_ids):
            continue
        size = _vocabulary_size(config, path, f"models.{name}")
        if size is None:
            continue
        for prompt in prompts.prompts:
            highest = max(prompt.token_ids)
            where = f"is not in the vocabulary of models.{name} = {path}, which has {size} ids"
            check(highest < size, f"{prompts.source}: row {prompt.prompt_id}: id {highest} {where}")


def _check_stop_ids(config: Config, stop_token_ids: Sequence[int]) -> None:
    path = config.models.actor
    size = _vocabulary_size(config, path, "models.actor")
    wrong = [i for i in stop_token_ids if size is not None and not 0 <= i < size]
    check(
        not wrong,
        f"rollout.stop_token_ids, EOS ids and stop_ids: id {wrong[:1]} is not in the vocabulary of models.actor = "
        f"{path}, which has {size} ids",
    )


def _check_ptx_vocabulary(config: Config, texts: TextSet) -> None:
    """Check that the actor, the only model that reads the ptx texts, has their ids."""
    path = config.models.actor
    size = _vocabulary_size(config, path, "models.actor")
    if size is None:
        return
    for number, text in enumerate(texts.texts):
        highest = max(text.token_ids)
        check(
            highest < size,
            f"{texts.source}: row {number}: id {highest} is not in the vocabulary of models.actor = {path}, which has "
            f"{size} ids",
        )


def _vocabulary_size(config: Config, path: str, field: str) -> int | None:
    """Return the number of token ids of a model; None if its config does not have it."""
    model_config = load_config(path, field=field, trust_remote_code=config.models.trust_remote_code)
    return getattr(model_config.get_text_config(), "vocab_size", None)


def _load_reward_tokenizer(
    config: Config, tokenizer: PreTrainedTokenizerBase, findings: Findings
) -> PreTrainedTokenizerBase | None:
    """Return the tokenizer of the reward model; None if it is the actor's, or there is no reward model to load."""
    path, start = config.models.reward, f"models.reward = {config.models.reward}:"
    if not path or any(message.startswith(start) for message in findings.messages):
        return None
    trust = config.models.trust_remote_code
    return findings.run(lambda: load_other_tokenizer(path, tokenizer, trust_remote_code=trust))


def _make_loader(config: Config, sets: Sequence[PromptSet], world: World) -> PromptLoader:
    """Return the loader of this rank's training prompts."""
    return PromptLoader(
        [prompt for prompts in number_prompts(sets) for prompt in prompts],
        batch_size=config.rollout.rollout_batch_size,
        seed=config.run.seed,
        shuffle=config.prompts.shuffle,
        rank=world.rank,
        world_size=world.size,
        mixture=make_mixture(config, sets),
    )
