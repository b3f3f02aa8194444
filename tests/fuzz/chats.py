"""Fuzz subjects: prompts of text and of chats, held to the tokenizers library and to transformers' own rendering."""

import json
import random
from pathlib import Path
from typing import Any

import jinja2

from hybrid_rl.batch import Prompt
from hybrid_rl.config import PromptsConfig
from hybrid_rl.data.prompts import encode_prompt
from hybrid_rl.data.template import load_template
from hybrid_rl.models.tokenizer import load_tokenizer
from tests.fuzz.cases import Refusal, check_refused, outcome
from tests.fuzz.tokenizers import Drawn, random_messages, random_template, random_text, random_tokenizer


def check_text_prompt(rng: random.Random, folder: Path) -> None:
    """Ids of a text prompt are BOS, if the tokenizer adds one, and the ids of the text: no EOS, no second BOS."""
    drawn = random_tokenizer(rng, has_eos=rng.random() < 0.9)
    marks = (*drawn.special, *drawn.ordinary_marks) if rng.random() < 0.3 else ()
    text, answer = random_text(rng, marks=marks), random_text(rng, is_empty_fine=False)
    tokenizer = drawn.tokenizer
    if rng.random() < 0.1:
        tokenizer.save_pretrained(folder)
        tokenizer = load_tokenizer(str(folder))
    bos = tokenizer.bos_token_id
    expected = drawn.ids(text)
    if drawn.adds_bos:
        expected = [bos, *expected]
    while bos is not None and expected[:2] == [bos, bos]:
        expected = expected[1:]
    row = {"prompt": text, "answer": answer, "level": 3}
    found = outcome(lambda: encode_prompt(tokenizer, row, PromptsConfig(), prompt_id=7), "row 7")
    if isinstance(found, Refusal):
        assert not text or not expected, f"refuses {text!r}: {found}"
        return
    assert expected, f"accepts a prompt without tokens: {text!r}"
    assert found.token_ids == expected, f"{text!r}: {found.token_ids} instead of {expected}"
    assert (found.text, found.answer, found.metadata, found.prefill) == (text, answer, {"level": 3}, "")


def check_chat_prompt(rng: random.Random, folder: Path) -> None:
    """A chat is rendered and tokenized as by transformers, with BOS once; the prefill is what the template adds."""
    drawn = random_tokenizer(rng)
    tokenizer, template = drawn.tokenizer, random_template(rng, has_bos=drawn.tokenizer.bos_token is not None)
    messages = random_messages(rng, marks=drawn.special[-2:] if rng.random() < 0.3 else ())
    odd = _make_odd(rng, messages)
    settings: dict[str, Any] = {}
    expected_messages = messages
    if odd is None and rng.random() < 0.2 and messages[0]["role"] != "system":
        settings["system_message"] = random_text(rng, is_empty_fine=False)
        expected_messages = [{"role": "system", "content": settings["system_message"]}, *messages]
    _give_template(rng, tokenizer, template.source, settings, folder)
    prompt_value: Any = messages
    if odd is None and len(messages) == 1 and rng.random() < 0.3:
        settings["chat"], prompt_value = True, messages[0]["content"]
    config = PromptsConfig(**settings)
    found = outcome(
        lambda: encode_prompt(tokenizer, {"prompt": prompt_value, "answer": "1"}, config, prompt_id=7), "row 7"
    )
    if expected_messages[-1]["role"] == "assistant":
        if isinstance(found, Refusal):
            return
        expected_messages = expected_messages[:-1]  # the gold answer of a data set, which a prompt must not hold
    check_against_transformers(found, expected_messages, drawn, template.source, template.prefill)


def _make_odd(rng: random.Random, messages: list[dict[str, str]]) -> str | None:
    """Change the messages to an unusual order or ending, and return which; None leaves them."""
    kind = rng.choice([None, None, None, "assistant end", "role", "two users", "other end", "only assistant"])
    if kind == "assistant end":
        messages.append({"role": "assistant", "content": "GOLD"})
    elif kind == "role":
        messages[0]["role"] = rng.choice(["tool", "developer", "User", ""])
    elif kind == "two users":
        messages.append({"role": "user", "content": "again"})
    elif kind == "other end":
        messages.append({"role": rng.choice(["system", "developer", "tool"]), "content": "Be brief."})
    elif kind == "only assistant":
        messages[:] = [{"role": "assistant", "content": "GOLD"}]
    return kind


def _give_template(rng: random.Random, tokenizer: Any, source: str, settings: dict[str, Any], folder: Path) -> None:
    """Put a chat template where users have it: the tokenizer, one of its named templates, or template_path."""
    place = rng.choice(["tokenizer", "tokenizer", "named", "file"])
    if place == "tokenizer":
        tokenizer.chat_template = source
    elif place == "named":
        tokenizer.chat_template = {"default": source, "tool_use": "{{ 'TOOLS' }}"}
    else:
        path = folder / "template.json"
        path.write_text(json.dumps({"chat_template": source, "stop_ids": []}))
        settings["template_path"] = str(path)


def check_against_transformers(
    found: Prompt | Refusal, messages: list[dict[str, str]], drawn: Drawn, source: str, prefill: str
) -> None:
    """Check text, ids and prefill of a prompt against transformers' rendering of the messages."""
    tokenizer, bos = drawn.tokenizer, drawn.tokenizer.bos_token_id
    arguments = {"chat_template": source, "add_generation_prompt": True}
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **arguments)
        ids = list(tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False, **arguments))
    except jinja2.TemplateError as error:
        check_refused(found, f"messages that the template refuses: {error}")
        return
    except (IndexError, ValueError):
        ids = []  # no message is left
    if not ids:
        check_refused(found, "messages that give no tokens")
        return
    if messages[-1]["role"] == "assistant":
        check_refused(found, "messages that end with an assistant's turn")
        return
    assert isinstance(found, Prompt), f"refuses {messages}: {found}"
    if drawn.adds_bos and ids[0] != bos:
        ids = [bos, *ids]
    while bos is not None and ids[:2] == [bos, bos]:
        ids = ids[1:]
    assert found.text == text, f"text {found.text!r} instead of {text!r}"
    assert found.token_ids == ids, f"{text!r}: {found.token_ids} instead of {ids}"
    assert "GOLD" not in found.text, f"the gold answer is in the prompt: {found.text!r}"
    assert found.prefill == prefill, f"prefill {found.prefill!r} instead of {prefill!r} of {text!r}"


def check_template_file(rng: random.Random, folder: Path) -> None:
    """A conversation template that is damaged or wrong is refused in a sentence that names its file."""
    drawn = random_tokenizer(rng)
    size = len(drawn.tokenizer)
    good: dict[str, Any] = {
        "chat_template": random_template(rng, has_bos=False).source,
        "system_message": rng.choice([None, "", "Be brief."]),
        "stop_ids": rng.choice([[], [0], [size - 1, 1]]),
        "end_of_assistant": rng.choice([None, drawn.special[-1]]),
    }
    path, data = folder / "template.json", json.dumps(good).encode()
    kind = rng.choice(["good", "content", "content", "content", "cut", "bytes", "missing"])
    if kind == "content":
        data = json.dumps(_wrong_content(rng, good, size)).encode()
    elif kind == "cut":
        data = data[: rng.randint(0, len(data) - 1)]
    elif kind == "bytes":
        data = rng.randbytes(rng.randint(1, 60)) + rng.choice([b"\xff", b"\x00"])
    if kind != "missing":
        path.write_bytes(data)
    found = outcome(lambda: load_template(str(path), drawn.tokenizer), "template.json")
    if kind != "good":
        check_refused(found, f"a template file that is wrong ({kind}): {data[:200]!r}")
        return
    assert not isinstance(found, Refusal), f"refuses a good template: {found}"
    assert (found.chat_template, list(found.stop_token_ids)) == (good["chat_template"], good["stop_ids"])
    assert found.system_message == (good["system_message"] or None)


def _wrong_content(rng: random.Random, good: dict[str, Any], size: int) -> Any:
    """Return a conversation template with one thing wrong, for a tokenizer of `size` tokens."""
    tags: list[Any] = [{"think_start": 1}, {"a": {}}, "x", {"think_start": {"text": "", "num_occur": 1}}]
    changes: list[tuple[str, list[Any]]] = [
        (rng.choice(["chat_template", "system_message", "end_of_assistant"]), [5, ["a"], {}, True]),
        ("chat_templates", ["x"]),
        ("stop_ids", [[size], [-1], [1.5], "1", 3, [True], [None], [2**70]]),
        ("response_format_tags", tags),
    ]
    if rng.random() < 0.1:
        return [good]
    name, values = rng.choice(changes)
    return {**good, name: rng.choice(values)}
