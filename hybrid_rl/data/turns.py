"""Token ids of conversations: their prompts, and what stands between two turns of the model.

What the engine has sampled stays as it is, and what an environment adds is tokenized once. The text that the chat
template writes between two turns, such as the end of a message and the header of the next one, belongs to the
environment's observation.
"""

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.batch import Prompt
from hybrid_rl.config import ConfigError, PromptsConfig, check
from hybrid_rl.data.chat import NEXT_TURN, SENTINEL, chat_template_of, find_prefill, render_chat, with_system_message
from hybrid_rl.data.files import Message
from hybrid_rl.data.template import Template
from hybrid_rl.data.tool_calls import ToolFormat
from hybrid_rl.models.tokenizer import decode_response, encode

CONTEXT = 8
"""Tokens before a turn with which it is decoded, because its first space depends on them."""
THOUGHT = f"<think>\n{SENTINEL}\n</think>\n\n{SENTINEL}"
"""A turn with thinking, which some chat templates remove from earlier turns."""


def as_messages(observation: str | list[Message]) -> list[Message]:
    """Return an observation as messages; text is a message of the user."""
    return observation if isinstance(observation, list) else [{"role": "user", "content": observation}]


def messages_of(prompt: Prompt) -> list[Message]:
    """Return the messages of the prompt of a row; text is a message of the user."""
    text = prompt.text if prompt.user_text is None else prompt.user_text
    return as_messages(text) if prompt.messages is None else prompt.messages


@dataclass(frozen=True, kw_only=True)
class Glue:
    """Tokens between two sampled turns."""

    token_ids: list[int]
    text: str
    prefill: str
    """End of the text that the chat template writes in the model's name."""


class TurnEncoder:
    """Prompts and observations of conversations as token ids."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        config: PromptsConfig,
        template: Template,
        *,
        make_tool_format: Callable[[], ToolFormat],
    ) -> None:
        """Take the actor's tokenizer, the settings of prompts and the content of prompts.template_path.

        Args:
            make_tool_format: called for the first conversation with tools.
        """
        self._make_tool_format = make_tool_format
        self._tokenizer = tokenizer
        self._config = config
        self._template = template
        self._prefills: dict[tuple[str, ...], str] = {}  # roles of an observation -> prefill of the next turn

    @functools.cached_property
    def tool_format(self) -> ToolFormat:
        """How tools are written.

        Raises:
            ConfigError: the calls of the chat template cannot be read.
        """
        return self._make_tool_format()

    def prompt(
        self,
        prompt: Prompt,
        observation: str | list[Message] | None,
        tools: list[dict[str, Any]] | None,
        *,
        is_verbatim: bool = False,
    ) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            prompt: of the row.
            observation: of the environment's reset; None takes the prompt of the row.
            tools: schemas of the environment's tools.
            is_verbatim: whether the observation is the whole text, which no chat template changes.
        Raises:
            ConfigError: the prompt cannot be rendered, or is longer than prompts.max_prompt_tokens.
        """
        where = f"row {prompt.prompt_id}"
        if observation is None and not tools:
            return prompt
        if is_verbatim or not self._is_chat(prompt):
            check(
                isinstance(observation, str) and not tools,
                f"{where}: the environment gives messages or tools, but the prompts are text: set prompts.chat = true",
            )
            assert isinstance(observation, str)
            changed = replace(prompt, text=observation, token_ids=encode(self._tokenizer, observation), prefill="")
        else:
            messages = messages_of(prompt) if observation is None else as_messages(observation)
            messages = with_system_message(messages, self._config, self._template, where)
            if tools:
                messages, tools = self.tool_format.prompt(messages, tools)
            config, template = replace(self._config, system_message=None), replace(self._template, system_message=None)
            chat = render_chat(self._tokenizer, messages, config, template, where, tools=tools)
            ids = encode(self._tokenizer, chat.text)
            changed = replace(prompt, text=chat.text, token_ids=ids, prefill=chat.prefill, messages=messages)
        limit = self._config.max_prompt_tokens
        check(bool(changed.token_ids), f"{where}: the environment's first observation gives no tokens")
        check(
            len(changed.token_ids) <= limit,
            f"{where}: its prompt with the environment's observation has {len(changed.token_ids)} tokens: raise "
            f"prompts.max_prompt_tokens = {limit}",
        )
        return changed

    def _is_chat(self, prompt: Prompt) -> bool:
        return prompt.messages is not None or prompt.user_text is not None

    def glue(
        self,
        prompt: Prompt,
        observation: str | list[Message],
        *,
        stop_token: int | None,
        has_tools: bool = False,
        is_verbatim: bool = False,
    ) -> Glue:
        """Return what follows a sampled turn up to the start of the next one.

        Args:
            prompt: of the conversation.
            observation: of the environment.
            stop_token: the last token of the turn, if it is a stop token; None for a turn that was cut, whose end
                the template writes instead of the model.
            has_tools: whether the conversation has tools.
            is_verbatim: whether the observation is all the text between the turns, which no chat template changes.
        Raises:
            ConfigError: the chat template refuses the observation.
        """
        if is_verbatim or not self._is_chat(prompt):
            check(
                isinstance(observation, str),
                f"row {prompt.prompt_id}: the environment gives messages, but the prompts are text: set prompts.chat = "
                "true",
            )
            assert isinstance(observation, str)
            text, prefill = observation, ""
        else:
            messages = as_messages(observation)
            text, prefill = self._after_turn(self.tool_format.observation(messages) if has_tools else messages)
        ids = self._plain(text)
        if stop_token is not None and ids[:1] == [stop_token]:
            ids = ids[1:]
        return Glue(token_ids=ids, text=text, prefill=prefill)

    def _plain(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def _after_turn(self, messages: list[Message]) -> tuple[str, str]:
        """Return the text that the chat template writes after a turn with these messages, and its prefill."""
        history = [NEXT_TURN, {"role": "assistant", "content": SENTINEL}, *messages]
        text = self._render(history, True)
        check(
            text.count(SENTINEL) == 1,
            "the chat template does not write a turn of the model as it is, so that the text after it cannot be told: "
            "give another template with prompts.template_path",
        )
        roles = tuple(message["role"] for message in messages)
        if roles not in self._prefills:  # the template is rendered several times to find it
            self._prefills[roles] = find_prefill(text, history, self._render) or ""
        return text.split(SENTINEL)[1], self._prefills[roles]

    def _render(self, messages: Sequence[Message], is_prompt: bool) -> str:
        source = chat_template_of(self._tokenizer, self._template, "environment")
        try:
            return self._tokenizer.apply_chat_template(
                list(messages), chat_template=source, tokenize=False, add_generation_prompt=is_prompt
            )
        except Exception as error:  # a template is a program of its own, which can raise anything
            roles = ", ".join(dict.fromkeys(message["role"] for message in messages))
            raise ConfigError(
                f"environment: the chat template refuses messages with the roles {roles}: {error}; give other "
                "messages, another template with prompts.template_path, or environment.tool_parser = text"
            ) from error

    def rewrites_history(self) -> bool:
        """Return whether the chat template writes earlier turns of the model in another way than the model did."""
        for turn in (SENTINEL, THOUGHT):
            before = self._render([NEXT_TURN], True)
            history = [NEXT_TURN, {"role": "assistant", "content": turn}]
            written = self._render([*history, NEXT_TURN], True)
            if not written.startswith(before + turn):
                return True
        return False

    def turn_text(self, before: Sequence[int], token_ids: Sequence[int], *, stop_token_ids: Collection[int]) -> str:
        """Return the text of sampled tokens, special tokens included, without the stop token that ended the turn.

        Args:
            before: tokens before the turn, of which the last CONTEXT are read.
            token_ids: tokens of the turn.
            stop_token_ids: none for a turn that was cut.
        """
        return decode_response(self._tokenizer, before[-CONTEXT:], token_ids, stop_token_ids=stop_token_ids)
