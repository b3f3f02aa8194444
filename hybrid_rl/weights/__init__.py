"""Weight sync: layout of the trainer's parameters, their copies or aliases in the rollout engine, verification."""
