"""Prints `colocated.py data`: prompts as the engine gets them, their lengths, and how the rule functions score them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.config import Config
from hybrid_rl.data.loading import Data, load_data
from hybrid_rl.distributed import World
from hybrid_rl.printable import printable
from hybrid_rl.rewards import ScorerPool

from .settings import prepare

WIDTH = 120
NUM_SHOWN = 3
NUM_SCORED = 32
"""Prompts whose answers the rule functions score."""
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
        prompts = {"prompts.path": data.loader.prompts, "prompts.eval_path": data.eval_prompts}
        for name, found in prompts.items():
            if found:
                _show_lengths([len(prompt.token_ids) for prompt in found], name, console)
        pools = {"reward.functions": data.scorer, "evaluation": data.eval_scorer}
        answered = [prompt for prompt in data.loader.prompts if prompt.answer is not None][:NUM_SCORED]
        results = [_show_scores(pool, answered, name, console) for name, pool in pools.items() if pool and answered]
        if not answered:
            console.print("no prompt has an answer, with which the rule functions could be tried")
        return all(results)
    finally:
        data.close()


def _show_prompts(data: Data, console: Console) -> None:
    """Print the first prompts: text, ids, answer."""
    for prompt in data.loader.prompts[:NUM_SHOWN]:
        ids = ", ".join(map(str, prompt.token_ids[:SHOWN_IDS])) + ", ..." * (len(prompt.token_ids) > SHOWN_IDS)
        text = prompt.text[:SHOWN_CHARACTERS] + "..." * (len(prompt.text) > SHOWN_CHARACTERS)
        lines = [
            f"row {prompt.prompt_id}: {len(prompt.token_ids)} tokens",
            f"  text: {text!r}",
            f"  ids: {ids}",
            f"  answer: {prompt.answer!r}",
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


def _show_scores(pool: ScorerPool, prompts: Sequence[Prompt], name: str, console: Console) -> bool:
    """Print how often each rule function finds the answer right, in its best form, and an empty response.

    Returns:
        whether every function finds some answer right, and no empty response.
    """
    right = {form: _right(pool, prompts, text) for form, text in FORMS.items()}
    empty = _right(pool, prompts, "")
    table = Table(name, "right on the answer", "as", "right on an empty response", title_justify="left")
    is_told_apart = True
    for function in empty:
        form = max(FORMS, key=lambda form: right[form][function])
        found = right[form][function]
        is_told_apart &= found > 0 and not empty[function]
        table.add_row(function, f"{found} of {len(prompts)}", form if found else "", str(empty[function]))
    console.print(table)
    return is_told_apart


def _right(pool: ScorerPool, prompts: Sequence[Prompt], text: str) -> dict[str, int]:
    """Return for each rule function the number of prompts for which it finds a response right.

    Args:
        text: template of the response, with a place for the answer.
    """
    responses = [
        Rollout(
            prompt=prompt,
            sequence_id=number,
            response_ids=[],
            rollout_logprobs=[],
            is_truncated=False,
            text=text.format(prompt.answer),
        )
        for number, prompt in enumerate(prompts)
    ]
    scores = pool.score(responses).per_function
    return {function: sum(score >= RIGHT_SCORE for score in found) for function, found in scores.items()}
