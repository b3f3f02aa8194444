"""Agent files of OpenRLHF, as environments.

An agent file has a class AgentExecutor, made from a class with `reset(states)` and `step(states)` that lives for one
conversation. It writes the text between two turns itself, with the marks of the chat template in it.

Read at version 0.11.0, openrlhf/utils/agent.py and examples/python/agent_func*.py.
"""

import ast
import functools
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.adapters import openrlhf_modules
from hybrid_rl.environments.adapters.user_code import user_code
from hybrid_rl.environments.loading import load_object, split_name
from hybrid_rl.environments.protocol import ConversationError, Reset, Step
from hybrid_rl.rewards.loading import describe

FIELD = "environment.arguments.path"
"""Setting that names the agent file, for messages."""
OWN_LOOP = (
    "has an AgentExecutor that generates by itself (execute or run_agent), and here only the trainer generates: write "
    "the agent as a function of an OpenAI client and name it with environment.name = chat_agent"
)


@dataclass(frozen=True, kw_only=True)
class AgentFile:
    """An agent file that is ready in this process."""

    path: Path
    instance: type
    """Class of which each conversation has an object."""


class OpenRLHFAgent:
    """The environment of one conversation with an agent of OpenRLHF."""

    def __init__(self, path: str, label: str = "answer") -> None:
        """Make the agent's object.

        Args:
            path: agent file.
            label: column of the rows that the agent gets as the label.
        """
        self._file = load_agent_file(path)
        self._label_column = label
        with user_code("the agent", self._file.path):
            self._agent = self._file.instance()

    @classmethod
    def prepare(cls, path: str, label: str = "answer") -> None:
        """Import the agent file and make one object of its class.

        Raises:
            ConfigError: it cannot be used here.
        """
        try:
            cls(path, label)
        except ConversationError as error:
            raise ConfigError(f"{FIELD} = {path}: {error}") from error

    async def reset(self, row: dict[str, Any]) -> Reset:
        """Return the agent's first observation; the prompt of the row, if the agent leaves it as it is."""
        if self._label_column not in row:
            raise ConversationError(f"environment.arguments.label = {self._label_column}: no column of the row")
        prompt, self._label = row["prompt_text"], row[self._label_column]
        with user_code("the agent's reset", self._file.path):
            found = await self._agent.reset({"observation": prompt, "label": self._label})
        self._text = _text(found, "observation", "reset")
        return Reset() if self._text == prompt else Reset(observation=self._text, is_verbatim=True)

    async def step(self, response: str) -> Step:
        """Return the agent's feedback to a turn, which follows the turn as it is."""
        states = {
            "observation_text": self._text,
            "action_text": response,
            "label": self._label,
            "sampling_params": None,
        }
        with user_code("the agent's step", self._file.path):
            found = await self._agent.step(states)
        feedback = _text(found, "environment_feedback", "step")
        for key, reason in REFUSED.items():
            if found.get(key):
                raise ConversationError(f"the agent's step returned {key}: {reason}")
        self._text += response + feedback
        reward = read_number(found.get("rewards"), "rewards")
        return Step(
            observation=feedback, reward=reward, done=bool(found.get("done")), info=read_info(found), is_verbatim=True
        )

    def close(self) -> Any:
        """Close the agent's object, if it can be closed; the result may be awaitable."""
        close = getattr(self._agent, "close", None)
        return close() if callable(close) else None


REFUSED = {
    "environment_images": "models read text only",
    "sampling_params": "turns are sampled with rollout.temperature and the other settings of rollout",
}
"""What a step may not return -> the reason."""


@functools.cache
def load_agent_file(path: str) -> AgentFile:
    """Import an agent file, without OpenRLHF if it is not installed.

    Raises:
        ConfigError: it cannot be imported, or generates by itself.
    """
    file, _ = split_name(f"{path}:AgentExecutor", field=FIELD)
    check(not _generates_by_itself(file), f"{FIELD} = {path}: {file} {OWN_LOOP}")
    openrlhf_modules.install()
    made, _, _ = load_object(f"{path}:AgentExecutor", field=FIELD)
    try:
        executor = made()
    except Exception as error:
        reason = f"AgentExecutor() raises {describe(error, file)}"
        raise ConfigError(f"{FIELD} = {path}: {reason}; it takes no arguments since OpenRLHF 0.9") from error
    instance = getattr(executor, "agent_instance_cls", None)
    is_own = getattr(made, "execute", None) is not openrlhf_modules.multi_turn_executor().execute
    check(isinstance(instance, type) and not is_own, f"{FIELD} = {path}: {file} {OWN_LOOP}")
    assert isinstance(instance, type)
    for method in ("reset", "step"):
        is_async = inspect.iscoroutinefunction(getattr(instance, method, None))
        check(is_async, f"{FIELD} = {path}: {instance.__name__} has no asynchronous method {method}")
    return AgentFile(path=file, instance=instance)


def _generates_by_itself(file: Path) -> bool:
    """Return whether the source shows it, so that modules for generation need not be imported."""
    try:
        body = ast.parse(file.read_bytes()).body
    except (SyntaxError, ValueError):
        return False  # importing the file tells
    executors = [node for node in body if isinstance(node, ast.ClassDef) and node.name == "AgentExecutor"]
    methods = {n.name for e in executors for n in e.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return bool(methods & {"execute", "run_agent"})


def _text(found: object, key: str, method: str) -> str:
    if not isinstance(found, Mapping) or not isinstance(found.get(key), str):
        raise ConversationError(f"the agent's {method} returned no text as {key}")
    return found[key]


def read_number(value: Any, name: str) -> float:
    """Return a number or a tensor of one element as a float."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConversationError(f"the agent's step returned no number as {name}") from None


def read_info(found: Mapping[str, Any]) -> dict[str, float]:
    """Return the scores and the further values of a step."""
    values = {**(found.get("extra_logs") or {})}
    if found.get("scores") is not None:
        values["scores"] = found["scores"]
    return {str(name): read_number(value, str(name)) for name, value in values.items()}
