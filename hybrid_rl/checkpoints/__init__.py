"""Saving, resuming and exporting a run."""
