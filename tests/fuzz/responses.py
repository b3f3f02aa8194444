"""Fuzz subjects: rule functions on responses that are right or wrong by construction, and the text that they judge."""

import random
from fractions import Fraction
from pathlib import Path
from typing import Any

from hybrid_rl.batch import Prompt, Rollout
from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Generation
from hybrid_rl.rewards.reencode import reencode
from hybrid_rl.rewards.rules import FUNCTIONS
from hybrid_rl.steps.rollout import collect_rollouts
from tests.fuzz.tokenizers import Drawn, random_text, random_tokenizer

WORDS = [
    "so",
    "we get",
    "the total is",
    "therefore",
    "=",
    "apples",
    "each day",
    "\n",
    "**",
    "\u2026",
    "\u00e9",
    "\u05d0",
]
ENDS = ["", ".", " apples", "!", "\n", " \u20ac", "**", "\u202e", " \U0001f600", ")", "%", " dollars."]


def random_number(rng: random.Random) -> Fraction:
    """Return a number such as answers have: an integer, a decimal, or a fraction."""
    whole = rng.choice([rng.randint(0, 20), rng.randint(0, 10**4), rng.randint(10**6, 10**9), 10**18 + 1])
    kind = rng.random()
    value = Fraction(whole)
    if kind < 0.25:
        value = Fraction(whole % 10**6, 10 ** rng.randint(1, 3))
    elif kind < 0.4:
        value = Fraction(whole % 1000 + 1, rng.randint(2, 12))
    return -value if rng.random() < 0.2 else value


def written(rng: random.Random, value: Fraction) -> str:
    """Return one of the ways to write a number."""
    size, sign = abs(value), rng.choice(["-", "\u2212"]) if value < 0 else ""
    if size.denominator == 1:
        digits = rng.choice(
            [f"{size.numerator}", f"{size.numerator:,}", f"{size.numerator}.0", f"{size.numerator:,}.00"]
        )
        return sign + digits
    scaled = size * 1000
    if scaled.denominator == 1 and rng.random() < 0.7:
        whole, rest = divmod(scaled.numerator, 1000)
        places = f"{rest:03d}".rstrip("0") + rng.choice(["", "0"])
        return sign + rng.choice([f"{whole}", f"{whole:,}", *([""] if whole == 0 else [])]) + "." + places
    factor = rng.choice([1, 1, 2, 10])
    return f"{sign}{size.numerator * factor}/{size.denominator * factor}"


def _before(rng: random.Random) -> str:
    """Return text that may precede a result: words and other numbers, ending in white space."""
    parts = [rng.choice([*WORDS, written(rng, random_number(rng))]) for _ in range(rng.randint(0, 6))]
    return " ".join(parts) + rng.choice([" ", "\n", ": ", " = "])


def check_numbers(rng: random.Random, folder: Path) -> None:
    """last_number and gsm8k give 1 to the answer in every notation, and 0 to every other number."""
    gold, other = random_number(rng), random_number(rng)
    answer = written(rng, gold).replace("\u2212", "-")
    answer = rng.choice([answer, f"{answer}%", f"some work #### {answer}", f" {answer} "])
    prompt = Prompt(prompt_id=0, text="", token_ids=[1], answer=answer)
    for value in (gold, other):
        last = f"{rng.choice(['', '$', '**', '('])}{written(rng, value)}{rng.choice(ENDS)}"
        if last[0] == "$" and value < 0:
            last = last[1:]
        expected = float(value == gold)
        response = _before(rng) + last
        found = FUNCTIONS["last_number"](prompt, response)
        assert found == expected, f"last_number gives {found} to {response!r} for {answer!r}"
        boxed = rng.choice(
            [r"\boxed{%s}", r"\boxed{ %s }", r"\boxed {%s}", "<answer>%s</answer>", "<answer> x = %s\n</answer>"]
        )
        response = _before(rng) + boxed % written(rng, value) + rng.choice([".", "", f" not {written(rng, gold)}"])
        found = FUNCTIONS["gsm8k"](prompt, response)
        assert found == expected, f"gsm8k gives {found} to {response!r} for {answer!r}"


def check_math(rng: random.Random, folder: Path) -> None:
    """The rule math gives 1 to an equal number in the last box, and 0 to another."""
    gold = random_number(rng)
    other = gold + rng.choice([1, Fraction(1, 2), -3, 10])

    def latex(value: Fraction) -> str:
        if value.denominator == 1:
            return str(value.numerator)
        sign = "-" if value < 0 else ""
        return rng.choice([r"\frac{%d}{%d}", r"\dfrac{%d}{%d}", "%d/%d"]).replace("%d", sign + "%d", 1) % (
            abs(value.numerator),
            value.denominator,
        )

    answer = rng.choice(["%s", "$%s$", r"\boxed{%s}", "#### %s"]) % latex(gold)
    prompt = Prompt(prompt_id=0, text="", token_ids=[1], answer=answer)
    for value in (gold, other):
        box = rng.choice([r"\boxed{%s}", r"\boxed{ %s }", r"\boxed {%s}", r"$\boxed{%s}$"]) % latex(value)
        response = rng.choice(["", r"First \boxed{0}, then ", "so "]) + box + rng.choice(["", ".", " done"])
        found = FUNCTIONS["math"](prompt, response)
        assert found == float(value == gold), f"math gives {found} to {response!r} for {answer!r}"


TAGS = ("<think>", "</think>", "<answer>", "</answer>")


def check_format(rng: random.Random, folder: Path) -> None:
    """think_format gives 1 to a think block and an answer block alone, and 0 to any other order or number of tags."""

    def body() -> str:
        text = random_text(rng)
        for tag in TAGS:
            text = text.replace(tag, "")
        return text.replace("<think", "").replace("</s", "")

    space = [rng.choice(["", "\n", "  ", "\n\n"]) for _ in range(3)]
    parts = ["<think>", body(), "</think>", space[0], "<answer>", body(), "</answer>"]
    wrong = rng.choice([None, None, "double", "missing", "swap", "before", "after", "between"])
    place = rng.choice([0, 2, 4, 6])
    if wrong == "double":
        parts[place] *= 2
    elif wrong == "missing":
        parts[place] = ""
    elif wrong == "swap":
        other = (place + 2) % 8
        parts[place], parts[other] = parts[other], parts[place]
    elif wrong == "before":
        parts.insert(0, "x")
    elif wrong == "after":
        parts.append("x")
    elif wrong == "between":
        parts.insert(4, "x")
    response = space[1] + "".join(parts) + space[2]
    prompt = Prompt(prompt_id=0, text="", token_ids=[1], answer="1")
    found = FUNCTIONS["think_format"](prompt, response)
    assert found == float(wrong is None), f"think_format gives {found} to {response!r} ({wrong})"


def check_any_response(rng: random.Random, folder: Path) -> None:
    """Every rule gives 0 or 1 to any text, exact_match 1 to the answer alone."""
    answer = written(rng, random_number(rng)).replace("\u2212", "-")
    prompt = Prompt(prompt_id=0, text="", token_ids=[1], answer=answer)
    response = rng.choice(
        [
            random_text(rng, longest=40, marks=TAGS),
            "9" * rng.choice([999, 1001, 5000]),
            f"\\boxed{{{'{' * rng.randint(0, 50)}",
            "1/" + "0" * rng.randint(1, 5),
            "\ud83d" + random_text(rng),
            f"{rng.choice(['', ' ', chr(10)])}{answer}{rng.choice(['', ' ', chr(9)])}",
            "1" + ",000" * 400,
            rng.randbytes(60).decode(errors="surrogateescape"),
        ]
    )
    for name in ("exact_match", "last_number", "gsm8k", "think_format"):
        found = FUNCTIONS[name](prompt, response)
        assert found in (0.0, 1.0) and isinstance(found, float), f"{name} gives {found!r} to {response!r}"
    expected = float(response.strip() == answer.strip())
    assert FUNCTIONS["exact_match"](prompt, response) == expected, f"exact_match of {response!r} and {answer!r}"


# The text that is judged


class ScriptedEngine:
    """A rollout engine whose responses are given."""

    def __init__(self, generations: list[Generation]) -> None:
        self._generations = generations
        self.prompts: list[list[int]] = []

    def generate(self, prompts: list[list[int]], sampling: Any, seeds: Any) -> list[Generation]:
        """Return the given responses."""
        self.prompts = [list(ids) for ids in prompts]
        return self._generations


def random_rollouts(rng: random.Random, drawn: Drawn) -> tuple[list[Rollout], list[str]]:
    """Return responses as the loop makes them of sampled tokens, and the text of each as it must be judged."""
    group_size, prompts, generations, texts = rng.randint(1, 3), [], [], []
    visible = (*drawn.ordinary_marks, *(mark for mark in TAGS if mark in drawn.special))
    eos = drawn.tokenizer.eos_token_id
    for number in range(rng.randint(1, 3)):
        prefill = rng.choice(["", "", "<think>\n"])
        text = random_text(rng, is_empty_fine=False) + prefill
        prompts.append(
            Prompt(prompt_id=number, text=text, token_ids=drawn.ids(text) or [1], prefill=prefill, answer="4")
        )
        for _ in range(group_size):
            ids = drawn.ids(random_text(rng, marks=visible))
            is_truncated = rng.random() < 0.3
            texts.append(prefill + drawn.core.decode(ids, skip_special_tokens=False))
            ids = ids if is_truncated else [*ids, rng.choice([eos, drawn.id("<|im_end|>")])]
            generations.append(Generation(token_ids=ids, logprobs=[-0.5] * len(ids), is_truncated=is_truncated))
    engine: Any = ScriptedEngine(generations)
    stops = [eos, drawn.id("<|im_end|>")]
    rollouts = collect_rollouts(
        prompts,
        engine,
        drawn.tokenizer,
        RolloutConfig(group_size=group_size),
        stop_token_ids=stops,
        run_seed=rng.randrange(9),
        step=1,
    )
    assert engine.prompts == [p.token_ids for p in prompts for _ in range(group_size)], (
        "other prompts were generated from"
    )
    assert [r.sequence_id for r in rollouts] == list(range(len(generations))), "sequence ids are not consecutive"
    assert [r.response_ids for r in rollouts] == [g.token_ids for g in generations], "other tokens than were sampled"
    return rollouts, texts


def check_judged_text(rng: random.Random, folder: Path) -> None:
    """Rule functions see the prefill and all that was sampled before the end, tags that are special tokens too."""
    drawn = random_tokenizer(rng)
    rollouts, texts = random_rollouts(rng, drawn)
    for rollout, text in zip(rollouts, texts, strict=True):
        assert rollout.text == text, f"{rollout.text!r} is judged instead of {text!r}"
        sampled = text[len(rollout.prompt.prefill) :]
        assert rollout.full_text == rollout.prompt.text + sampled, f"full text {rollout.full_text!r}"


def check_reencoding(rng: random.Random, folder: Path) -> None:
    """A reward model reads BOS as its tokenizer adds it, the whole text once, and EOS of a response that has ended."""
    drawn, other = random_tokenizer(rng), random_tokenizer(rng)
    rollouts, texts = random_rollouts(rng, drawn)
    found = reencode(rollouts, other.tokenizer, actor_tokenizer=drawn.tokenizer)
    bos, eos = other.tokenizer.bos_token_id, other.tokenizer.eos_token_id
    for rollout, text, encoded in zip(rollouts, texts, found, strict=True):
        prompt_text = rollout.prompt.text
        if drawn.tokenizer.bos_token and prompt_text.startswith(drawn.tokenizer.bos_token):
            prompt_text = prompt_text[len(drawn.tokenizer.bos_token) :]
        ids = other.ids(prompt_text + text[len(rollout.prompt.prefill) :])
        if other.adds_bos and ids[:1] != [bos]:
            ids = [bos, *ids]
        if not rollout.is_truncated:
            ids = [*ids, eos]
        together = encoded.prompt.token_ids + encoded.response_ids
        assert together == ids, f"the reward model reads {together} instead of {ids} for {prompt_text!r} + {text!r}"
        assert encoded.prompt.token_ids, "no token before the response"
        assert encoded.sequence_id == rollout.sequence_id and encoded.prompt.answer == rollout.prompt.answer
