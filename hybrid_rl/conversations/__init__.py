"""Generation of conversations of several turns, between the rollout engine and environments."""
