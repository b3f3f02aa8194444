"""Trackers of experiments: Weights & Biases, Trackio and MLflow, each in a process of its own that follows the run."""
