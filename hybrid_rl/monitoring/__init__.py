"""Timeline, metrics, progress display and the record of a run."""
