"""vLLM's tool parsers, which read the tool calls that a model has written. vLLM is imported when one is loaded."""

import difflib
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from hybrid_rl.config import ConfigError, check

FIELD = "environment.tool_parser"
"""Setting that names the parser, for messages."""


@dataclass(frozen=True, kw_only=True)
class VllmToolParser:
    """A tool parser of vLLM."""

    make: Callable[..., Any]
    """Class of the parser; vLLM makes an object for each text, since it may keep a state."""
    tokenizer: PreTrainedTokenizerBase

    def __call__(self, text: str, tools: list[dict[str, Any]]) -> tuple[str, list[dict[str, Any]]]:
        """Return the text without the tool calls, and the calls in OpenAI's form; none if the parser refuses the text.

        Args:
            text: of a turn, with special tokens.
            tools: OpenAI's schemas of the tools.
        """
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        request = ChatCompletionRequest(model="", messages=[], tools=tools)
        try:
            found = self.make(self.tokenizer, request.tools).extract_tool_calls(text, request)
        except Exception:  # parsers raise errors of all kinds for texts that they do not expect
            return text, []
        if not found.tools_called:
            return text, []
        return found.content or "", [call.model_dump(include={"id", "type", "function"}) for call in found.tool_calls]


def load_tool_parser(name: str, tokenizer: PreTrainedTokenizerBase) -> VllmToolParser:
    """Return a tool parser of vLLM.

    Args:
        name: as in vLLM's option --tool-call-parser.
        tokenizer: the actor's.
    Raises:
        ConfigError: vLLM is not installed or has no such parser, or the parser refuses the tokenizer.
    """
    where = f"{FIELD} = {name}"
    try:
        from vllm.tokenizers.hf import get_cached_tokenizer
        from vllm.tool_parsers import ToolParserManager
    except ImportError as error:
        raise ConfigError(f"{where}: vLLM, which has this parser, cannot be imported: {error}") from error
    # vLLM logs a traceback for each call that it cannot read, which is no error in training.
    for module in ("vllm.tool_parsers", "vllm.parser"):
        logging.getLogger(module).setLevel(logging.CRITICAL)
    names = ToolParserManager.list_registered()
    close = difflib.get_close_matches(name, ["text", *names])
    hint = f"; did you mean {' or '.join(close)}?" if close else f"; there are: text, {', '.join(names)}"
    check(name in names, f"{where}: is unknown{hint}")
    cached = get_cached_tokenizer(tokenizer)  # parsers ask for the vocabulary, which takes long to make
    try:
        make = ToolParserManager.get_tool_parser(name)
        make(cached, [])
    except Exception as error:
        raise ConfigError(f"{where}: the parser cannot be used with this tokenizer: {error}") from error
    return VllmToolParser(make=make, tokenizer=cached)
