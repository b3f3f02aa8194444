"""Checkpoints, the phase log and exports of a run."""
