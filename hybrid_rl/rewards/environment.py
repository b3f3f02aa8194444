"""The environment variables of scorer processes: an allow-list, so that no token of the environment reaches them."""

import os
import sys
from collections.abc import Iterable, Mapping

from hybrid_rl.config import Findings, check

ALLOWED_NAMES = frozenset(
    {
        "CONDA_PREFIX",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HF_HUB_OFFLINE",
        "HOME",
        "LANG",
        "LANGUAGE",
        "LD_LIBRARY_PATH",
        "LOGNAME",
        "PATH",
        "SHELL",
        "TMPDIR",
        "TOKENIZERS_PARALLELISM",
        "TZ",
        "USER",
        "VIRTUAL_ENV",
        "XDG_CACHE_HOME",
    }
)
"""Variables that scorer processes get where they are set: paths, language and offline modes."""
ALLOWED_PREFIXES = ("LC_", "MKL_", "OMP_", "OPENBLAS_", "PYTHON")
"""Beginnings of the names of further variables that scorer processes get."""


def scorer_environment(environment: Mapping[str, str], names: Iterable[str]) -> dict[str, str]:
    """Return the environment of a scorer process, which sees no GPU unless CUDA_VISIBLE_DEVICES is named.

    Args:
        environment: of this process.
        names: further variables, reward.environment_variables.
    """
    wanted = ALLOWED_NAMES | set(names)
    found = {name: value for name, value in environment.items() if name in wanted or name.startswith(ALLOWED_PREFIXES)}
    python_path = os.pathsep.join(path or os.getcwd() for path in sys.path)
    return {"CUDA_VISIBLE_DEVICES": "", **found, "PYTHONPATH": python_path}


def check_variables(
    names: Iterable[str], environment: Mapping[str, str], *, field: str = "reward.environment_variables"
) -> None:
    """Check that the variables which a setting names are set.

    Raises:
        ConfigError: one sentence for every variable that is not.
    """
    findings = Findings()
    for name in names:
        sentence = f"{field}: {name!r} is not set in the environment: set it, or remove the name"
        findings.run(lambda ok=name in environment, text=sentence: check(ok, text))  # type: ignore[misc]
    findings.raise_any()
