"""Environments of conversations: one small protocol, and worker processes in which the user's environments run."""
