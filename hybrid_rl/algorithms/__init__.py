"""Advantage estimators, losses, KL and importance correction: pure functions of tensors, declared in `specs.py`."""
