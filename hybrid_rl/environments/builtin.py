"""The environments that a name alone stands for. Their classes are imported in worker processes."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class BuiltIn:
    """An environment of this package."""

    module: str
    class_name: str
    package: str | None = None
    """Module of another package that the environment cannot do without; None needs none."""
    extra: str = ""
    """Extra of this package that installs it."""


_ADAPTERS = "hybrid_rl.environments.adapters"

BUILT_IN = {
    "tools": BuiltIn(module="hybrid_rl.environments.tools", class_name="ToolEnvironment"),
    "chat_agent": BuiltIn(module=f"{_ADAPTERS}.chat_agent", class_name="ChatAgent"),
    "openrlhf": BuiltIn(module=f"{_ADAPTERS}.openrlhf", class_name="OpenRLHFAgent"),
    "gymnasium": BuiltIn(
        module=f"{_ADAPTERS}.gymnasium", class_name="GymnasiumEnvironment", package="gymnasium", extra="gymnasium"
    ),
    "skyrl_gym": BuiltIn(
        module=f"{_ADAPTERS}.skyrl_gym", class_name="SkyRLGymEnvironment", package="skyrl_gym", extra="skyrl-gym"
    ),
    "verifiers": BuiltIn(
        module=f"{_ADAPTERS}.verifiers", class_name="VerifiersEnvironment", package="verifiers", extra="verifiers"
    ),
}
"""Name of an environment -> where its class is."""
