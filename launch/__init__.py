"""The commands: settings from command lines and files, one process per rank, plans, checks, translations.

A wheel has this folder as hybrid_rl.launch, so its modules import each other relatively.
"""
