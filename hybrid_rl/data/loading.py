"""The parts of a run that are read before any model is loaded: tokenizers, prompts, texts and scorers."""

import functools
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import Config
from hybrid_rl.data.prompts import PromptLoader, load_prompts
from hybrid_rl.data.template import load_template
from hybrid_rl.data.texts import load_texts
from hybrid_rl.distributed import World
from hybrid_rl.models.checks import check_models
from hybrid_rl.models.tokenizer import eos_token_ids, load_other_tokenizer, load_tokenizer
from hybrid_rl.rewards import ScorerPool


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
    reward_tokenizer: PreTrainedTokenizerBase | None
    """Tokenizer of the reward model; None if it is the actor's, or there is no reward model."""
    ptx_texts: list[list[int]]
    """Token ids of the texts of the language-model (ptx) loss; empty without it."""


def load_data(config: Config, world: World) -> Data:
    """Return the data of a run, after checking the models' folders against the settings.

    Args:
        world: all ranks, over which the prompts are divided.
    Raises:
        ConfigError: see check_models, load_template, load_prompts, ScorerPool and load_texts.
    """
    check_models(config)
    tokenizer = load_tokenizer(config.models.actor)
    template = load_template(config.prompts.template_path, tokenizer)
    if template.chat_template is not None:
        tokenizer.chat_template = template.chat_template  # also for ptx texts and the exported tokenizer
    prompts = load_prompts(config.prompts.path, tokenizer, config.prompts, seed=config.run.seed)
    eval_prompts = _load_eval_prompts(config, tokenizer)
    reward = config.reward
    make_scorer = functools.partial(ScorerPool, timeout_s=reward.timeout_s, num_workers=reward.num_workers)
    return Data(
        tokenizer=tokenizer,
        stop_token_ids=sorted(
            {*eos_token_ids(config.models.actor, tokenizer), *config.rollout.stop_token_ids, *template.stop_token_ids}
        ),
        loader=PromptLoader(
            prompts,
            batch_size=config.rollout.rollout_batch_size,
            seed=config.run.seed,
            shuffle=config.prompts.shuffle,
            rank=world.rank,
            world_size=world.size,
        ),
        eval_prompts=eval_prompts[world.rank :: world.size],
        scorer=make_scorer(reward.functions, reward.weights, on_error=reward.on_error) if reward.functions else None,
        eval_scorer=make_scorer([config.run.eval_function], on_error="zero") if eval_prompts else None,
        reward_tokenizer=load_other_tokenizer(config.models.reward, tokenizer) if config.models.reward else None,
        ptx_texts=load_texts(config.ptx, tokenizer) if config.ptx.path else [],
    )


def _load_eval_prompts(config: Config, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Return the held-out prompts of all ranks; none if the run does not evaluate."""
    if not config.prompts.eval_path or not config.run.eval_every_steps:
        return []
    return load_prompts(
        config.prompts.eval_path,
        tokenizer,
        config.prompts,
        seed=config.run.seed + 1_000_003,  # a generated task then gives other rows than for training
        num_rows=config.prompts.max_eval_samples,
    )
