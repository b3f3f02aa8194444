"""Conversation templates: JSON files in ColossalChat's format for the text of a chat and the end of an answer."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, check
from hybrid_rl.rewards.rules import TAG_NAMES

KEYS = ("chat_template", "system_message", "stop_ids", "end_of_assistant", "response_format_tags")


@dataclass(frozen=True, kw_only=True)
class Template:
    """The content of a conversation template; keys that the file leaves out have the defaults below."""

    chat_template: str | None = None
    """Jinja template; None uses the tokenizer's."""
    system_message: str | None = None
    """Message before every chat prompt; None, or an empty string in the file, adds none."""
    stop_token_ids: tuple[int, ...] = ()
    """Ids that end a response in addition to EOS; without `stop_ids` in the file, the token of `end_of_assistant`."""
    end_of_assistant: str | None = None
    """Text that the chat template puts after an answer."""
    response_format_tags: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{name: {text, num_occur}}, copied into the metadata of prompts for `rewards.rules.think_format`."""


def load_template(path: str | None, tokenizer: PreTrainedTokenizerBase) -> Template:
    """Return the conversation template of a file; for None, one that changes nothing.

    Args:
        path: prompts.template_path.
        tokenizer: the actor's.
    Raises:
        ConfigError: the file is missing or broken, has an unknown key or a value of another type; the tokenizer has no
            such stop id; or end_of_assistant is not a single token and there are no stop_ids.
    """
    if path is None:
        return Template()
    where = f"prompts.template_path = {path}"
    keys = _read(Path(path), where)
    for name in ("chat_template", "system_message", "end_of_assistant"):
        check(isinstance(keys.get(name), str | None), f"{where}: {name} must be text or null, got {keys.get(name)!r}")
    end = keys.get("end_of_assistant")
    return Template(
        chat_template=keys.get("chat_template"),
        system_message=keys.get("system_message") or None,
        stop_token_ids=_stop_token_ids(keys.get("stop_ids"), end, tokenizer, where),
        end_of_assistant=end,
        response_format_tags=_format_tags(keys.get("response_format_tags"), where),
    )


def _read(path: Path, where: str) -> dict[str, Any]:
    check(path.is_file(), f"{where}: there is no such file")
    try:
        keys = json.loads(path.read_text(encoding="utf-8-sig"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}: is not JSON: {error}") from error
    check(isinstance(keys, dict), f"{where}: must be a JSON object with some of: {', '.join(KEYS)}")
    unknown = sorted(set(keys) - set(KEYS))
    check(not unknown, f"{where}: unknown key '{unknown[0] if unknown else ''}'; there are: {', '.join(KEYS)}")
    return keys


def _stop_token_ids(
    stop_ids: Any, end_of_assistant: str | None, tokenizer: PreTrainedTokenizerBase, where: str
) -> tuple[int, ...]:
    if stop_ids is None and end_of_assistant:
        # The space or line break that the chat template puts after it does not belong to the end.
        found = tokenizer(end_of_assistant.strip(), add_special_tokens=False)["input_ids"]
        check(
            len(found) == 1,
            f"{where}: end_of_assistant {end_of_assistant!r} is {len(found)} tokens, so it cannot be a stop token: "
            "give stop_ids ([] for EOS only), and rollout.stop_strings to end a response at the text",
        )
        return tuple(found)
    check(
        stop_ids is None or (isinstance(stop_ids, list) and all(type(i) is int for i in stop_ids)),
        f"{where}: stop_ids must be a list of token ids, got {stop_ids!r}",
    )
    for i in stop_ids or ():
        check(
            0 <= i < len(tokenizer),
            f"{where}: stop_ids: the tokenizer has no token {i}, only 0 to {len(tokenizer) - 1}",
        )
    return tuple(stop_ids or ())


def _format_tags(tags: Any, where: str) -> dict[str, dict[str, Any]]:
    if tags is None or tags == {}:
        return {}
    where = f"{where}: response_format_tags"
    check(
        isinstance(tags, dict) and set(tags) == set(TAG_NAMES),
        f"{where} must have exactly the tags {', '.join(TAG_NAMES)}; got {str(tags)[:80]}",
    )
    for name, tag in tags.items():
        check(
            isinstance(tag, dict) and set(tag) == {"text", "num_occur"},
            f"{where}.{name} must be {{text, num_occur}}, got {tag!r}",
        )
        check(isinstance(tag["text"], str) and bool(tag["text"]), f"{where}.{name}.text must be text that is not empty")
        check(
            type(tag["num_occur"]) is int and tag["num_occur"] in (0, 1),
            f"{where}.{name}.num_occur = {tag['num_occur']!r}: must be 0 or 1",
        )
    return tags
