"""The names that agent files import from OpenRLHF, for worker processes in which it is not installed."""

import abc
import importlib
import importlib.util
import logging
import sys
from types import ModuleType
from typing import Any

_AGENT = "openrlhf.utils.agent"


class AgentInstanceBase(abc.ABC):
    """Parent of the class of which each conversation has an object."""

    @abc.abstractmethod
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Prepare the object."""

    async def reset(self, states: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the first observation; without another definition, the prompt."""
        return states

    @abc.abstractmethod
    async def step(self, state_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Return the feedback to a turn."""


class AgentExecutorBase(abc.ABC):
    """Parent of the class that runs a conversation."""

    @abc.abstractmethod
    async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Run a conversation, which here the trainer does."""


class MultiTurnAgentExecutor(AgentExecutorBase):
    """Names the class whose objects answer the turns."""

    def __init__(self, agent_instance_cls: type) -> None:
        """Take the class."""
        if not issubclass(agent_instance_cls, AgentInstanceBase):
            raise TypeError(f"{agent_instance_cls.__name__} must inherit from AgentInstanceBase")
        self.agent_instance_cls = agent_instance_cls

    async def execute(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Refuse to run, because the trainer generates."""
        raise NotImplementedError("the trainer generates the turns")


def install() -> None:
    """Make the names importable, unless OpenRLHF is installed or they already are."""
    if "openrlhf" in sys.modules or importlib.util.find_spec("openrlhf") is not None:
        return
    contents: dict[str, dict[str, Any]] = {
        "openrlhf": {},
        "openrlhf.utils": {},
        "openrlhf.utils.logging_utils": {"init_logger": logging.getLogger},
        _AGENT: {kind.__name__: kind for kind in (AgentInstanceBase, AgentExecutorBase, MultiTurnAgentExecutor)},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__dict__.update(content)
        module.__path__ = []  # a package, so that its submodules can be imported
        sys.modules[name] = module
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], last, module)


def multi_turn_executor() -> Any:
    """Return the class MultiTurnAgentExecutor that agent files import."""
    return importlib.import_module(_AGENT).MultiTurnAgentExecutor
