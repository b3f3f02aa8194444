"""Environments of SkyRL's package skyrl-gym, and classes of the user that inherit from its BaseTextEnv."""

import copy
import inspect
from collections.abc import Mapping
from typing import Any

import skyrl_gym
from omegaconf import OmegaConf

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.adapters.user_code import file_of, finite_numbers, user_code
from hybrid_rl.environments.loading import load_object
from hybrid_rl.environments.protocol import Observation, Step

FIELD = "environment.arguments"
"""Setting of the arguments, for messages."""


class SkyRLGymEnvironment:
    """The environment of one conversation."""

    def __init__(self, id: str, *, env_config: Mapping[str, Any] | None = None, max_turns: int | None = None) -> None:
        """Take the name and the settings of the environment, which `reset` makes from its row.

        Args:
            id: registered name, such as gsm8k, or `path.py:ClassName`.
            env_config: settings of the environment, which its class gets as an OmegaConf object.
            max_turns: of an environment that ends by the number of turns; None leaves it to the row.
        """
        self._id, self._max_turns = id, max_turns
        self._config = OmegaConf.create(dict(env_config or {}))
        self._file = file_of(id)
        self._env: Any = None

    @classmethod
    def prepare(cls, id: str, **arguments: Any) -> None:
        """Import the class of the environment.

        Raises:
            ConfigError: there is none of this name.
        """
        if file_of(id) is not None:
            found, path, _ = load_object(id, field=f"{FIELD}.id")
            check(inspect.isclass(found), f"{FIELD}.id = {id}: {path} defines no class of this name")
            return
        try:
            entry = skyrl_gym.spec(id).entry_point
            if isinstance(entry, str):
                skyrl_gym.envs.registration.load_env_creator(entry)
        except (ImportError, skyrl_gym.error.Error) as error:
            known = ", ".join(sorted(skyrl_gym.registry))
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{FIELD}.id = {id}: {reason}; give path.py:ClassName, or one of {known}") from error

    def reset(self, row: dict[str, Any]) -> Observation:
        """Make the environment with the row's columns, and return its first messages."""
        extras = copy.deepcopy(row) if self._max_turns is None else {**copy.deepcopy(row), "max_turns": self._max_turns}
        with user_code(f"making the environment {self._id}", self._file):
            self._env = _made(self._id, self._config, extras)
        with user_code("init of the environment", self._file):
            messages, _ = self._env.init(row["prompt_messages"])
        return messages

    def step(self, response: str) -> Step:
        """Return the messages, the reward and the numbers of the metadata that follow a turn."""
        with user_code("step of the environment", self._file):
            found = self._env.step(response)
        return Step(
            observation=list(found["observations"]),
            reward=float(found["reward"]),
            done=bool(found["done"]),
            info=finite_numbers(found.get("metadata") or {}),
        )

    def close(self) -> None:
        """Close the environment."""
        if self._env is not None:
            self._env.close()


def _made(id: str, config: Any, extras: Mapping[str, Any]) -> Any:
    if file_of(id) is None:
        return skyrl_gym.make(id, env_config=config, extras=extras)
    return load_object(id, field=f"{FIELD}.id")[0](env_config=config, extras=extras)
