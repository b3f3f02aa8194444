"""Prompts, tokenizers and scorers: all of a run that is read before a model loads."""

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
    """Prompts and scorers: all that is read before a model loads."""

    tokenizer: PreTrainedTokenizerBase
    stop_token_ids: list[int]
    loader: PromptLoader
    eval_prompts: list[Prompt]
    """This rank's share."""
    scorer: ScorerPool | None
    eval_scorer: ScorerPool | None
    reward_tokenizer: PreTrainedTokenizerBase | None
    """Of a reward model that reads other tokens than the actor's."""
    ptx_texts: list[list[int]]
    """Token ids of the language-model loss; empty when it is off."""


def load_data(config: Config, world: World) -> Data:
    """Read tokenizer, prompts and scorers, and check them against the models' folders.

    Raises:
        ConfigError: one sentence that names field, value and rule.
    """
    check_models(config)
    tokenizer = load_tokenizer(config.models.actor)
    template = load_template(config.prompts.template_path, tokenizer)
    if template.chat_template is not None:
        tokenizer.chat_template = template.chat_template  # texts of ptx and the exported tokenizer follow it too
    prompts = load_prompts(config.prompts.path, tokenizer, config.prompts, seed=config.run.seed)
    eval_prompts: list[Prompt] = []
    if config.prompts.eval_path and config.run.eval_every_steps:
        # A generated task draws its held-out rows from another seed.
        rows, seed = config.prompts.max_eval_samples, config.run.seed + 1_000_003
        eval_prompts = load_prompts(config.prompts.eval_path, tokenizer, config.prompts, seed=seed, num_rows=rows)
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
