"""The phases of a step and the residency table: which tenant occupies GPU memory in which phase."""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal


class Phase(enum.Enum):
    """The phases of a step, in the order of the loop."""

    SYNC = "sync"
    ROLLOUT = "rollout"
    SCORE = "score"
    UPDATE_CRITIC = "update_critic"
    UPDATE_ACTOR = "update_actor"


SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase

ALL_PHASES = frozenset(Phase)


@dataclass(frozen=True, kw_only=True)
class TenantSpec:
    """What a tenant of the GPU holds, what a release does with it, and the phases in which it is resident."""

    model: Literal["engine", "actor", "critic", "reference", "reward_model"]
    """Owner of the memory; `engine` is the rollout engine."""
    content: Literal["parameters", "optimizer", "kv_cache"]
    """Kind of tensors; `optimizer` includes the gradient buffers."""
    on_release: Literal["copy", "copy_once", "drop"]
    """`copy`: every release copies the contents to the host. `copy_once`: only the first release does, and one after a
    change, because training does not write to the contents. `drop`: the contents are lost."""
    phases: frozenset[Phase]
    """Phases in which the tenant occupies GPU memory."""

    @property
    def is_trained(self) -> bool:
        """Whether optimizer steps change the contents."""
        return self.on_release == "copy"

    @property
    def is_always_resident(self) -> bool:
        """Whether no phase releases the tenant."""
        return self.phases == ALL_PHASES

    def in_every_phase(self) -> "TenantSpec":
        """Return the spec of the same tenant when no phase releases it."""
        return replace(self, phases=ALL_PHASES)


RESIDENCY = {
    "engine_weights": TenantSpec(
        model="engine", content="parameters", on_release="drop", phases=frozenset({SYNC, ROLLOUT})
    ),
    "engine_kv_cache": TenantSpec(model="engine", content="kv_cache", on_release="drop", phases=frozenset({ROLLOUT})),
    "reference": TenantSpec(model="reference", content="parameters", on_release="copy_once", phases=frozenset({SCORE})),
    "reward_model": TenantSpec(
        model="reward_model", content="parameters", on_release="copy_once", phases=frozenset({SCORE})
    ),
    "critic_parameters": TenantSpec(
        model="critic", content="parameters", on_release="copy", phases=frozenset({SCORE, UPDATE_CRITIC})
    ),
    "critic_optimizer": TenantSpec(
        model="critic", content="optimizer", on_release="copy", phases=frozenset({UPDATE_CRITIC})
    ),
    "actor_parameters": TenantSpec(
        model="actor", content="parameters", on_release="copy", phases=frozenset({SYNC, SCORE, UPDATE_ACTOR})
    ),
    "actor_optimizer": TenantSpec(
        model="actor", content="optimizer", on_release="copy", phases=frozenset({UPDATE_ACTOR})
    ),
}
"""Name of every tenant -> its spec. MemoryManager enforces the table, planning sizes it."""


def always_resident(residency: Mapping[str, TenantSpec]) -> frozenset[str]:
    """Return the names of the tenants that no phase releases."""
    return frozenset(name for name, spec in residency.items() if spec.is_always_resident)
