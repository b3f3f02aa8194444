"""The settings of a run: their types, ranges and paths, and the YAML that holds them."""
