"""The data sets of a run: training prompts, which may be a mixture, held-out prompts, and what is shown of them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import Config, DataSource, Findings, check
from hybrid_rl.data.mixing import Mixture
from hybrid_rl.data.prompts import PromptSet, load_prompts, load_rows
from hybrid_rl.data.texts import TextSet

EVALUATION_SEED = 1_000_003
"""Added to the seed of generated tasks, which then give other rows than for training."""
SEED_STEP = 7_919
"""Distance of the seeds of generated tasks of one setting."""


def evaluates(config: Config) -> bool:
    """Return whether the run evaluates on held-out prompts."""
    return bool(config.prompts.eval_path and config.run.eval_every_steps)


def check_rows(config: Config, findings: Findings) -> None:
    """Check rows and columns of all prompts, which need no tokenizer."""
    for place, source in enumerate(config.prompts.training_sources):
        findings.run(partial(load_rows, **_training(config, source, place)))
    for place, source in enumerate(_evaluated(config).values()):
        findings.run(partial(load_rows, **_evaluation(config, source, place)))


def load_training_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[PromptSet]:
    """Return the training prompts of all ranks, by data set.

    Raises:
        ConfigError: one or more data sets cannot be read, see load_prompts.
    """
    sources = config.prompts.training_sources
    return _load_all({place: _training(config, source, place) for place, source in enumerate(sources)}, tokenizer)


def load_evaluation_sets(config: Config, tokenizer: PreTrainedTokenizerBase) -> dict[str, PromptSet]:
    """Return name -> held-out prompts of all ranks; none if the run does not evaluate.

    Raises:
        ConfigError: one or more data sets cannot be read, see load_prompts.
    """
    sources = _evaluated(config)
    arguments = {name: _evaluation(config, source, place) for place, (name, source) in enumerate(sources.items())}
    return dict(zip(sources, _load_all(arguments, tokenizer), strict=True))


def number_prompts(sets: Iterable[PromptSet]) -> list[list[Prompt]]:
    """Return the prompts of each data set, whose ids count the rows of the data sets before it."""
    first, found = 0, []
    for each in sets:
        found.append([replace(p, prompt_id=first + p.prompt_id) if first else p for p in each.prompts])
        first += each.num_rows
    return found


def make_mixture(config: Config, sets: Sequence[PromptSet]) -> Mixture | None:
    """Return the order of training data sets with weights; None where there is one, or they have no weights.

    Raises:
        ConfigError: a data set has fewer prompts than its weight asks for in a step, in which none may occur twice.
    """
    sources = config.prompts.training_sources
    weights = [source.weight for source in sources if source.weight is not None]
    if len(sources) == 1 or not weights:
        return None
    sizes, batch_size = [len(each.prompts) for each in sets], config.rollout.rollout_batch_size
    mixture = Mixture(sizes, weights, seed=config.run.seed, shuffle=config.prompts.shuffle)
    for each, weight, size, most in zip(sets, weights, sizes, mixture.most_in(batch_size), strict=True):
        check(
            most <= size,
            f"{each.source}: weight = {weight:g} takes up to {most} of the {batch_size} prompts of a step from it "
            f"(rollout.rollout_batch_size), and it has {size}: lower one of the two",
        )
    return mixture


def make_text_mixture(config: Config, sets: Sequence[TextSet]) -> Mixture | None:
    """Return the order of texts with weights; None where there is one data set, or they have no weights."""
    weights = [each.weight for each in sets if each.weight is not None]
    if len(sets) < 2 or not weights:
        return None
    return Mixture([len(each.texts) for each in sets], weights, seed=config.run.seed)


def describe(config: Config, training: Sequence[PromptSet], evaluation: Mapping[str, PromptSet]) -> Iterator[str]:
    """Yield a line for each data set: its name, the number of its prompts, their format and their share."""
    weights = [source.weight for source in config.prompts.training_sources]
    total = sum(weight or 0.0 for weight in weights)
    for each, weight in zip(training, weights, strict=True):
        yield _line(each) + (f", {weight / total:.1%} of the mixture" if weight and len(training) > 1 else "")
    for name, each in evaluation.items():
        yield _line(each) + (f", evaluation {name}" if name else "")


def _line(each: PromptSet) -> str:
    dropped = each.num_rows - len(each.prompts)
    kind = "generated" if each.format == "task" else f"in the format {each.format}"
    return f"{each.source}: {len(each.prompts)} prompts {kind}" + (
        f", {dropped} longer ones dropped" if dropped else ""
    )


def _load_all(arguments: Mapping[Any, dict[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[PromptSet]:
    """Return the prompts of data sets, by the arguments of load_prompts; the findings of all are raised together."""
    findings = Findings()
    found = [findings.run(partial(load_prompts, tokenizer=tokenizer, **each)) for each in arguments.values()]
    findings.raise_any()
    return [each for each in found if each is not None]


def _evaluated(config: Config) -> dict[str, DataSource]:
    """Return name -> data set of an evaluation; none if the run does not evaluate."""
    return config.prompts.evaluation_sources if evaluates(config) else {}


def _training(config: Config, source: DataSource, place: int) -> dict[str, Any]:
    """Return the arguments of load_rows for a training data set."""
    limit = source.max_samples or config.prompts.max_samples
    return _arguments(config, source, seed=config.run.seed + place * SEED_STEP, num_rows=limit, is_evaluation=False)


def _evaluation(config: Config, source: DataSource, place: int) -> dict[str, Any]:
    """Return the arguments of load_rows for a held-out data set."""
    seed, limit = EVALUATION_SEED + place * SEED_STEP, source.max_samples or config.prompts.max_eval_samples
    return _arguments(config, source, seed=config.run.seed + seed, num_rows=limit, is_evaluation=True)


def _arguments(config: Config, source: DataSource, **more: Any) -> dict[str, Any]:
    own = config.prompts.of_source(source)
    return {"path": source.path, "config": own, "data_source": source.data_source, **more}
