"""Transcripts of the examples, by which their policies learn the form of a turn, and to be right now and then.

Most players of the guessing game and of the grid world move at random; the others write the word `think` before each
move. Most questions about products are answered with a random number, and a few with the calculator.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from transformers import PreTrainedTokenizerFast

from hybrid_rl.demo import EOS, make_tokenizer
from hybrid_rl.environments.function_tools import make_tool
from hybrid_rl.examples.calculator import multiply
from hybrid_rl.examples.guessing import Guessing

Transcript = tuple[list[int], list[bool]]
"""Token ids of a conversation, and whether each one is of the policy."""
Row = dict[str, str]
"""A row of the data, with a prompt and an answer."""

SKILLED_GAMES = 0.1
"""Fraction of the guessing games whose player thinks before each guess, and halves the numbers that are possible."""
NUMBERS = range(1, 25)
"""Secret numbers of the guessing game."""
NUM_GUESSES = 5
SKILLED_EPISODES = 0.1
"""Fraction of the episodes in the grid world whose player thinks before each move, and walks to the goal."""
NUM_MOVES = 10
FACTORS = range(11, 100)
"""Factors of the products."""
CALLED = 0.15
"""Fraction of the transcripts of products that call the calculator."""

CALL = ('<tool_call>{"name": "multiply", "arguments": {"a": ', ', "b": ', "}}</tool_call>")
"""Texts of a call around its two arguments, each of which is a token."""
CHAT_TEMPLATE = """\
{%- for tool in tools or [] %}{{ '<tool>' + tool.function.name }}{% endfor -%}
{%- for message in messages -%}
{{- '<' + message.role + '>' -}}
{%- if message.role == 'assistant' -%}
{%- generation -%}
{{- message.content -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson
    + '}</tool_call>' -}}
{%- endfor -%}
{{- '<eos>' -}}
{%- endgeneration -%}
{%- else -%}
{{- message.content -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant>' }}{% endif -%}
"""


def encode(tokenizer: PreTrainedTokenizerFast, prompt: str, turns: Sequence[tuple[str, str]]) -> Transcript:
    """Return the transcript of a text prompt and turns, each with the observation after it."""
    ids = list(tokenizer(prompt)["input_ids"])
    is_sampled = [False] * len(ids)
    for turn, observation in turns:
        said, answered = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in (turn, observation))
        ids += [*said, EOS, *answered]
        is_sampled += [True] * (len(said) + 1) + [False] * len(answered)
    return ids, is_sampled


def play_guessing(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Row, Transcript]:
    """Return a row of the guessing game, and a game."""
    row = {"prompt": "guess :", "answer": str(rng.choice(NUMBERS))}
    is_skilled = rng.random() < SKILLED_GAMES
    game, turns, is_over, possible = Guessing(), list[tuple[str, str]](), False, list(NUMBERS)
    game.reset(row)
    while not is_over and len(turns) < NUM_GUESSES:
        guess = possible[len(possible) // 2] if is_skilled else rng.choice(possible)
        turn = f"think {guess}" if is_skilled else str(guess)
        observation, _, is_over, _ = game.step(turn)
        turns.append((turn, observation))
        if is_skilled:
            possible = [n for n in possible if (n > guess if observation == "higher" else n < guess)]
    return row, encode(tokenizer, row["prompt"], turns)


def play_gridworld(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Row, Transcript]:
    """Return a row of the grid world, and an episode."""
    from hybrid_rl.examples.gridworld import MOVES, GridWorld  # Imports Gymnasium, which need not be installed.

    is_skilled = rng.random() < SKILLED_EPISODES
    world, turns, is_over = GridWorld(), list[tuple[str, str]](), False
    start, _ = world.reset(seed=rng.getrandbits(31))
    while not is_over and len(turns) < NUM_MOVES:
        towards = [move for move, change in MOVES.items() if change @ world.way > 0]
        move = towards[0] if is_skilled else rng.choice(list(MOVES))
        turn = f"think {move}" if is_skilled else move
        observation, _, is_over, _, _ = world.step(turn)
        turns.append((turn, observation))
    return {"prompt": "walk"}, encode(tokenizer, start, turns)


def play_calculator(tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> tuple[Row, Transcript]:
    """Return a product, and a conversation that seldom calls the calculator and else answers with a random number."""
    a, b = rng.choice(FACTORS), rng.choice(FACTORS)
    answer = str(multiply(a, b))
    row = {"prompt": f"{a}*{b}", "answer": answer}
    messages: list[dict[str, Any]] = [{"role": "user", "content": row["prompt"]}]
    if rng.random() < CALLED:
        call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
        messages += [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": answer},
            {"role": "assistant", "content": answer},
        ]
    else:
        wrong = str(multiply(rng.choice(FACTORS), rng.choice(FACTORS)))
        messages.append({"role": "assistant", "content": wrong})
    encoded = tokenizer.apply_chat_template(
        messages,
        tools=[make_tool(multiply, "multiply").schema],
        return_dict=True,
        return_assistant_tokens_mask=True,
    )
    return row, (encoded["input_ids"], [bool(x) for x in encoded["assistant_masks"]])


def make_chat_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of digits and the texts of a call, with a chat template that has tools."""
    special = ["<pad>", "<bos>", "<eos>", "<unk>"]
    texts = [*CALL, "<tool>multiply", "<user>", "<assistant>", "<tool>"]
    vocabulary = {token: i for i, token in enumerate([*special, *"0123456789*", *texts])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    backend.decoder = decoders.Fuse()
    backend.add_tokens(texts)
    names = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=CHAT_TEMPLATE, **names)


@dataclass(frozen=True, kw_only=True)
class Example:
    """An example, and what its policy is built from."""

    class_name: str
    """Class in the example's file."""
    make_tokenizer: Callable[[], PreTrainedTokenizerFast]
    make_transcript: Callable[[PreTrainedTokenizerFast, random.Random], tuple[Row, Transcript]]
    """(tokenizer, source of random numbers) -> a row of the data, and the transcript of a conversation."""
    batch_size: int
    """Transcripts of a step of training on them."""
    num_steps: int


EXAMPLES = {
    "guessing": Example(
        class_name="Guessing",
        make_tokenizer=partial(
            make_tokenizer, ["guess", ":", "think", "higher", "lower", "right", "number", "?", *map(str, NUMBERS)]
        ),
        make_transcript=play_guessing,
        batch_size=128,
        num_steps=400,
    ),
    "calculator": Example(
        class_name="Calculator",
        make_tokenizer=make_chat_tokenizer,
        make_transcript=play_calculator,
        batch_size=96,
        num_steps=400,
    ),
    "gridworld": Example(
        class_name="GridWorld",
        make_tokenizer=partial(make_tokenizer, ["walk", "goal", "think", *"12345678", "up", "down", "left", "right"]),
        make_transcript=play_gridworld,
        batch_size=64,
        num_steps=400,
    ),
}
"""Name of an example, also of its file and its settings -> what its policy is built from."""
