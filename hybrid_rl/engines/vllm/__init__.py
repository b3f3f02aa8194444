"""vLLM as the rollout engine, and the code that runs inside its processes."""
