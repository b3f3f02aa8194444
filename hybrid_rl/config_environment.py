"""The settings of conversations: which environment answers the model, and the limits of a conversation."""

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class EnvironmentConfig:
    """Environment that answers every turn of the model; without a name or tools, a response is one turn."""

    name: str | None = None
    """Environment: `path.py:ClassName` of a class with `reset` and `step`, or one of the built-in names on the page on
    conversations, such as `gymnasium`. null has no environment, unless there are `tools`."""
    arguments: dict = field(default_factory=dict)
    """Keyword arguments of every environment."""
    tools: list[str] = field(default_factory=list)
    """Tools that the model may call: Python functions as `path.py:function`, and URLs of MCP servers on loopback, such
    as http://127.0.0.1:8000/mcp."""
    tool_parser: str | None = None
    """Format of the model's tool calls: the name of a tool parser of vLLM, such as hermes, or `text`, a protocol for
    chat templates without tools. null chooses by the chat template."""
    max_turns: int = 8
    """Maximum number of the model's turns in a conversation."""
    max_turn_tokens: int | None = None
    """Maximum number of tokens of a turn; null is limited by `rollout.max_response_tokens` alone, which counts all
    turns and observations of a conversation."""
    max_concurrent: int | None = None
    """Maximum number of conversations at the same time, on each rank; null takes all of a batch."""
    num_workers: int = 2
    """Environment processes per rank."""
    timeout_s: float = 30.0
    """Seconds that a call of an environment may take; a process that exceeds them is killed."""
    memory_limit_bytes: int | None = None
    """Resident memory in bytes of an environment process and all processes that it starts, above which they are killed;
    null sets no limit."""
    max_restarts: int = 2
    """Number of times that a conversation starts again after it has lost its process through no fault of its own."""
    on_error: Literal["raise", "zero"] = "raise"
    """Handling of an environment that fails, exceeds its time or loses its process too often: exit with an error, or
    end the conversation where it is, count the failure and give no further reward."""
    rewritten_history: Literal["raise", "keep"] = "raise"
    """Handling of a chat template that writes earlier turns of the model in another way than the model did, for example
    without their thinking: exit with an error, or keep the turns in the conversation as they were sampled."""
    environment_variables: list[str] = field(default_factory=list)
    """Environment variables that environment processes get besides paths, language and numbers of threads."""

    @property
    def is_used(self) -> bool:
        """Whether the model has conversations with an environment or tools."""
        return self.name is not None or bool(self.tools)
