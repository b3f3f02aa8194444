"""Phases of a step, which tenants reside on the GPU in each, and what the device really holds."""
