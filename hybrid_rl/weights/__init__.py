"""Weight sync: the trainer's parameters, their layout, their way into the rollout engine, and its verification."""
