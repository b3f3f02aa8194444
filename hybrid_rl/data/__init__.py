"""Data sets, prompts, chat templates and the order in which a run reads them."""
