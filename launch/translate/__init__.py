"""Command lines of other systems, read as settings of ours: a table per system, and what all tables share."""
