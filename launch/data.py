"""Prints `colocated.py data`: prompts as the engine gets them, their lengths, and how the rule functions score them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.config import Config
from hybrid_rl.data.formats import SOURCE
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.data.prompts import answers_of
from hybrid_rl.distributed import World
from hybrid_rl.printable import printable
from hybrid_rl.rewards import ScorerPool

from .settings import prepare

WIDTH = 120
NUM_SHOWN = 3
NUM_SCORED = 32
"""Prompts of each data set whose answers the rule functions score."""
NUM_BARS, BAR_WIDTH = 8, 40
SHOWN_CHARACTERS, SHOWN_IDS = 400, 24
RIGHT_SCORE = 1.0
"""Score from which an evaluation counts a response as right."""
FORMS: Mapping[str, str] = {
    "the answer alone": "{}",
    "\\boxed{...}": "\\boxed{{{}}}",
    "<answer>...</answer>": "<answer>{}</answer>",
    "<think>...</think><answer>...</answer>": "<think> </think>\n<answer>{}</answer>",
}
"""Forms in which a response may give the answer -> template of the text."""


def show_data(config: Config, console: Console | None = None) -> bool:
    """Print the data of a run, and return whether every rule function tells the answers from an empty response.

    Raises:
        ConfigError: everything that load_data finds.
    """
    config = prepare(config)
    config = replace(config, reward=replace(config.reward, on_error="zero"))
    console = console or Console(width=WIDTH, highlight=False)
    data = load_data(config, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    try:
        _show_prompts(data, console)
        _show_lengths([len(prompt.token_ids) for prompt in data.loader.prompts], "prompts.path", console)
        for name, held_out in data.eval_sets.items():
            title = f"prompts.eval_path, {name}" if name else "prompts.eval_path"
            _show_lengths([len(prompt.token_ids) for prompt in held_out], title, console)
        results = [
            _show_scores(pool, prompts, name, console, data.tokenizer)
            for name, pool, prompts in (
                ("reward.functions", data.scorer, _answered(data.loader.prompts)),
                ("evaluation", data.eval_scorer, _answered(data.eval_prompts)),
            )
            if pool and prompts
        ]
        if not results:
            console.print("no prompt has an answer, with which the rule functions could be tried")
        return all(results)
    finally:
        data.close()


def _show_prompts(data: Data, console: Console) -> None:
    """Print the data sets and the first prompts: text, ids, answer."""
    console.print("\n".join(map(printable, data.lines)), markup=False, soft_wrap=True)
    for prompt in data.loader.prompts[:NUM_SHOWN]:
        ids = ", ".join(map(str, prompt.token_ids[:SHOWN_IDS])) + ", ..." * (len(prompt.token_ids) > SHOWN_IDS)
        text = prompt.text[:SHOWN_CHARACTERS] + "..." * (len(prompt.text) > SHOWN_CHARACTERS)
        lines = [
            f"row {prompt.prompt_id}: {len(prompt.token_ids)} tokens",
            f"  text: {text!r}",
            f"  ids: {ids}",
            f"  {'answers' if isinstance(prompt.answer, list) else 'answer'}: {prompt.answer!r}",
            f"  metadata: {', '.join(prompt.metadata) or 'none'}",
        ]
        if prompt.prefill:
            lines.append(f"  start of every response, written by the chat template: {prompt.prefill!r}")
        console.print("\n".join(map(printable, lines)), markup=False, soft_wrap=True)


def histogram(lengths: Sequence[int]) -> list[tuple[int, int, int]]:
    """Return first length, last length and number of the prompts of at most NUM_BARS ranges of equal width."""
    low, high = min(lengths), max(lengths)
    width = -(-(high - low + 1) // NUM_BARS)
    ranges = [(first, min(first + width - 1, high)) for first in range(low, high + 1, width)]
    return [(first, last, sum(first <= length <= last for length in lengths)) for first, last in ranges]


def _show_lengths(lengths: Sequence[int], name: str, console: Console) -> None:
    table = Table("tokens", "prompts", "", title=f"{name}: {len(lengths)} prompts", title_justify="left")
    bars = histogram(lengths)
    most = max(number for _, _, number in bars)
    for first, last, number in bars:
        table.add_row(f"{first} to {last}", str(number), "#" * -(-number * BAR_WIDTH // most))
    console.print(table)


def _answered(prompts: Sequence[Prompt]) -> list[Prompt]:
    """Return the first prompts with an answer, NUM_SCORED of each data set that the rows name."""
    found: dict[object, list[Prompt]] = {}
    for prompt in prompts:
        if prompt.answer is not None:
            found.setdefault(prompt.metadata.get(SOURCE), []).append(prompt)
    return [prompt for group in found.values() for prompt in group[:NUM_SCORED]]


def _show_scores(
    pool: ScorerPool, prompts: Sequence[Prompt], name: str, console: Console, tokenizer: PreTrainedTokenizerBase
) -> bool:
    """Print how often each rule function finds the answer right, in its best form, and an empty response.

    A prompt with several right answers counts where the function finds each of them right.

    Returns:
        whether every function finds some answer right, and no empty response.
    """
    right = {form: _right(pool, prompts, text, tokenizer) for form, text in FORMS.items()}
    empty = _right(pool, prompts, "", tokenizer)
    table = Table(name, "right on the answer", "as", "right on an empty response", title_justify="left")
    is_told_apart = True
    for function in empty:
        form = max(FORMS, key=lambda form: sum(right[form][function]))
        found = sum(right[form][function])
        is_told_apart &= found > 0 and not any(empty[function])
        number = f"{found} of {len(right[form][function])}"
        table.add_row(function, number, form if found else "", str(sum(empty[function])))
    console.print(table)
    return is_told_apart


def _right(
    pool: ScorerPool, prompts: Sequence[Prompt], text: str, tokenizer: PreTrainedTokenizerBase
) -> dict[str, list[bool]]:
    """Return for each rule function whether it finds the responses to each prompt that it scores right.

    Args:
        text: template of the responses, with a place for the answer; there is one response for each right answer.
    """
    responses = [
        Rollout(
            prompt=prompt,
            sequence_id=number,
            response_ids=list(tokenizer(text.format(answer), add_special_tokens=False)["input_ids"]),
            rollout_logprobs=[],
            is_truncated=False,
            text=text.format(answer),
        )
        for number, prompt in enumerate(prompts)
        for answer in answers_of(prompt.answer)
    ]
    found: dict[str, list[bool]] = {}
    for function, scores in pool.score(responses).per_function.items():
        by_prompt: dict[int, bool] = {}
        for response, score in zip(responses, scores, strict=True):
            if not math.isnan(score):  # the function scores this prompt
                before = by_prompt.get(response.sequence_id, True)
                by_prompt[response.sequence_id] = before and score >= RIGHT_SCORE
        found[function] = list(by_prompt.values())
    return found
