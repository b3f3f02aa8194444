"""Environments that are written for other packages, and what makes them environments of this one."""
