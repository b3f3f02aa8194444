"""Checks of the machine that a run starts on: GPUs, allocator, memory, disk, network and packages."""
