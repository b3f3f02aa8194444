"""Checks of the settings of PyTorch's allocator, which stand in two environment variables. Imports no torch."""

import re
from collections.abc import Mapping

from hybrid_rl.config import Findings, check

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables with settings of PyTorch's allocator, under the old name and the new one."""
SWITCHED = "expandable_segments"
"""The key that a run turns on and off by itself, so that its value in a variable does not matter."""


def check_allocator(environment: Mapping[str, str]) -> None:
    """Check the allocator's settings, before PyTorch reads them.

    Raises:
        ConfigError: a part is not key:value, the backend cannot share memory, or the two variables disagree.
    """
    findings = Findings()
    given = {name: environment[name] for name in ALLOCATOR_VARIABLES if environment.get(name, "").strip()}
    contents = [findings.run(lambda name=name, value=value: _parse(name, value)) for name, value in given.items()]  # type: ignore[misc]
    findings.raise_any()
    check(
        len(contents) < 2 or contents[0] == contents[1],
        f"{' and '.join(f'{name} = {value}' for name, value in given.items())} disagree, and PyTorch reads one of them "
        "only: set one",
    )


def _parse(name: str, value: str) -> dict[str, str]:
    """Return key -> value of an allocator's settings, such as `max_split_size_mb:128`, without SWITCHED."""
    content = {}
    for part in re.split(r",(?![^\[]*\])", value):
        if not part.strip():
            continue
        key, _, setting = (word.strip() for word in part.partition(":"))
        check(
            bool(key and setting),
            f"{name} = {value}: {part.strip()!r} is not key:value; write for example max_split_size_mb:128",
        )
        content[key] = setting
    backend = content.pop("backend", "native")
    check(
        backend == "native",
        f"{name} = {value}: the engine's process cannot open memory of the backend {backend}, and memory.swap does not "
        "work with it; remove the backend",
    )
    content.pop(SWITCHED, None)
    return content
