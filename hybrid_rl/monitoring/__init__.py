"""Timeline, metrics, progress display and the files a run writes."""
