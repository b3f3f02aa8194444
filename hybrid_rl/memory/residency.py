"""The phases of a step and the residency table: which tenants are on the GPU in each phase."""

import enum


class Phase(enum.Enum):
    """The phases of a step, in the order of the loop."""

    SYNC = "sync"
    ROLLOUT = "rollout"
    SCORE = "score"
    UPDATE_CRITIC = "update_critic"
    UPDATE_ACTOR = "update_actor"


SYNC, ROLLOUT, SCORE, UPDATE_CRITIC, UPDATE_ACTOR = Phase

RESIDENCY = {
    "engine_weights": frozenset({SYNC, ROLLOUT}),
    "engine_kv_cache": frozenset({ROLLOUT}),
    "reference": frozenset({SCORE}),
    "reward_model": frozenset({SCORE}),
    "critic_parameters": frozenset({SCORE, UPDATE_CRITIC}),
    "critic_optimizer": frozenset({UPDATE_CRITIC}),
    "actor_parameters": frozenset({SYNC, SCORE, UPDATE_ACTOR}),
    "actor_optimizer": frozenset({UPDATE_ACTOR}),
}
