"""Rewards to advantages, policy and value losses, engine-to-trainer correction: pure functions of tensors."""
