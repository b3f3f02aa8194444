"""Rendering of chat prompts by the chat template, and the text that it writes in the model's name."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, PromptsConfig, check
from hybrid_rl.data.files import Message
from hybrid_rl.data.template import Template

SENTINEL = "hybridrlresponse"
"""Content of an assistant's turn that shows where the template puts a response."""
TURN = [{"role": "assistant", "content": SENTINEL}]
NEXT_TURN = {"role": "user", "content": "and then"}
THINK_TAGS = ("<think>", "</think>")
CLOCK = "strftime_now"
"""Function that transformers gives to chat templates, which returns the present date in a format."""
FIXED_DAY = datetime(2000, 1, 1)

Clock = Callable[[str], str]
"""strftime format -> the date in this format."""
Render = Callable[[Sequence[Message], bool], str]
"""(messages, whether the response follows) -> text."""


@dataclass(frozen=True, kw_only=True)
class Chat:
    """A rendered chat."""

    text: str
    """Text up to the start of the response."""
    prefill: str
    """End of the text that the template writes in the model's name, such as `<think>`."""
    undated_text: str | None
    """The same text on a fixed day; None if the template does not ask for the date."""


def chat_template_of(tokenizer: PreTrainedTokenizerBase, template: Template, where: str) -> str:
    """Return the Jinja template of `prompts.template_path`, else the tokenizer's; of several, the one named default.

    Raises:
        ConfigError: there is none.
    """
    found = template.chat_template or tokenizer.chat_template
    if isinstance(found, dict):
        check(
            "default" in found,
            f"{where}: the tokenizer {tokenizer.name_or_path!r} has the chat templates {', '.join(sorted(found))} and "
            "none named default: give one with prompts.template_path",
        )
        found = found["default"]
    check(
        bool(found),
        f"{where} is a chat prompt but the tokenizer {tokenizer.name_or_path!r} has no chat template: "
        "give text prompts with prompts.chat = false, a tokenizer that has one, or prompts.template_path",
    )
    return found


def render_chat(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    config: PromptsConfig,
    template: Template,
    where: str,
    *,
    tools: list[dict[str, Any]] | None = None,
) -> Chat:
    """Return a chat as its template renders it up to the start of the response.

    Args:
        tools: schemas of the tools that the template describes to the model.
    Raises:
        ConfigError: there is no chat template or it refuses the messages; they end with an assistant's turn; there
            are two system messages; or the template does not show where a response begins.
    """
    source = chat_template_of(tokenizer, template, where)
    messages = with_system_message(messages, config, template, where)
    check(
        messages[-1]["role"] != "assistant",
        f"{where}: its messages end with the role 'assistant': put an assistant's answer into prompts.answer_column",
    )

    def render(messages: Sequence[Message], is_prompt: bool, **variables: Clock) -> str:
        try:
            return tokenizer.apply_chat_template(
                list(messages),
                tools=tools,
                chat_template=source,
                tokenize=False,
                add_generation_prompt=is_prompt,
                **variables,
            )
        except Exception as error:  # a template is a program of its own, which can raise anything
            raise ConfigError(f"{where}: the chat template refuses its messages: {error}") from error

    text = render(messages, True)
    prefill = find_prefill(text, messages, render)
    check(
        prefill is not None,
        f"{where}: the chat template writes an assistant's turn in another way than the start of a response, so that "
        "the response cannot be told from the prompt: give another template with prompts.template_path",
    )
    assert prefill is not None
    undated = on_fixed_day(functools.partial(render, messages, True), source)
    return Chat(text=text, prefill=prefill, undated_text=undated)


def on_fixed_day(render: Callable[..., str], source: str) -> str | None:
    """Return what a chat template writes on a fixed day; None if it does not ask for the date.

    Args:
        render: called with functions that replace those of the template.
        source: of the template.
    """
    return render(**{CLOCK: FIXED_DAY.strftime}) if CLOCK in source else None


def find_prefill(text: str, messages: Sequence[Message], render: Render) -> str | None:
    """Return the end of a prompt that the template writes in the model's name; None if that cannot be told.

    The prompt ends with the header of an assistant's turn and the prefill. The header is what the two renderings of the
    chat with and without an assistant's turn share; where the turn changes earlier text, it is the beginning of the
    prompt's end that stands before the response of the chat, or of a short one.
    """
    start = num_shared(text, _render_or_empty(render, messages))  # the messages end here
    end = text[start:]
    if not end:
        return ""
    histories = [[*messages, *TURN, NEXT_TURN], [*messages, *TURN], [NEXT_TURN, *TURN, NEXT_TURN]]
    headers = [found.split(SENTINEL)[0] for h in histories if SENTINEL in (found := _render_or_empty(render, h))]
    for header in headers[:1]:
        shared = num_shared(text, header)
        if shared >= start:
            return _from_think_tag(end, shared - start)
    for header in headers:
        length = next((n for n in range(len(end), 0, -1) if header.endswith(end[:n])), 0)
        if length:
            return _from_think_tag(end, length)
    return None


def num_shared(a: str, b: str) -> int:
    """Return the number of characters that two texts have in common at their start."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def _from_think_tag(end: str, start: int) -> str:
    """Return the text from a place on, or from a think tag before it: past turns may have an empty think block."""
    return end[min([start, *(place for tag in THINK_TAGS if (place := end.find(tag)) >= 0)]) :]


def _render_or_empty(render: Render, messages: Sequence[Message]) -> str:
    try:
        return render(messages, False)
    except ConfigError:  # a template may refuse a chat that does not end as it expects
        return ""


def with_system_message(
    messages: list[Message], config: PromptsConfig, template: Template, where: str
) -> list[Message]:
    """Return the messages after the system message of the settings, without keys whose value is None.

    Parquet gives every message the keys of all messages.
    """
    messages = [{key: value for key, value in message.items() if value is not None} for message in messages]
    check(
        None in (config.system_message, template.system_message),
        f"prompts.system_message is set, and another one in prompts.template_path = {config.template_path}: drop one",
    )
    source = "system_message" if config.system_message is not None else "template_path"
    system_message = config.system_message if config.system_message is not None else template.system_message
    if system_message is None:
        return messages
    check(
        messages[0]["role"] != "system",
        f"prompts.{source} is set but {where} already starts with a system message: drop one of them",
    )
    return [{"role": "system", "content": system_message}, *messages]
