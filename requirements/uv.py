"""Run uv with the package sources that pip is configured with: `python requirements/uv.py pip install ...`.

uv reads neither pip's configuration files nor the PIP_* variables, so their values are passed on in uv's own variables.
A variable of uv that is already set wins.
"""

import ast
import os
import subprocess
import sys
from pathlib import Path

VARIABLES = {
    "index-url": "UV_DEFAULT_INDEX",
    "extra-index-url": "UV_INDEX",
    "find-links": "UV_FIND_LINKS",
    "no-index": "UV_NO_INDEX",
    "constraint": "UV_CONSTRAINT",
    "trusted-host": "UV_INSECURE_HOST",
    "cert": "SSL_CERT_FILE",
    "proxy": "ALL_PROXY",
    "timeout": "UV_HTTP_TIMEOUT",
    "default-timeout": "UV_HTTP_TIMEOUT",
}
"""The variable of uv for each option of pip."""

LIST_SEPARATORS = {"UV_INDEX": " ", "UV_FIND_LINKS": ",", "UV_CONSTRAINT": " ", "UV_INSECURE_HOST": " "}
"""How a variable separates its values; pip separates them by blanks."""


def pip_options() -> dict[str, str]:
    """Return what pip's files and variables say, by the names of pip's options, as `pip install` reads them."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    found = [line.partition("=") for line in lines]
    precedence = ("global.", "install.", ":env:.")
    return {
        name.removeprefix(prefix): ast.literal_eval(value)
        for prefix in precedence
        for name, _, value in found
        if name.startswith(prefix)
    }


def uv_variables(options: dict[str, str], *, is_lock: bool) -> dict[str, str]:
    """Return uv's variables for some options of pip.

    Args:
        options: values by the names of pip's options.
        is_lock: whether uv writes a lock. A lock has hashes of the files of every platform, and an index in a local
            folder has only the files of its own machine: a lock leaves such indexes out.
    """
    variables = {"UV_INDEX_STRATEGY": "unsafe-best-match"}  # pip, too, takes the best version of all indexes
    for option, variable in VARIABLES.items():
        values = options.get(option, "").split()
        if is_lock and option == "extra-index-url":
            values = [value for value in values if not value.startswith("file:")]
        if values:
            variables[variable] = LIST_SEPARATORS.get(variable, " ").join(values)
    return variables


def main() -> None:
    """Become uv, which stands beside this interpreter."""
    arguments = sys.argv[1:]
    variables = uv_variables(pip_options(), is_lock=arguments[:2] == ["pip", "compile"])
    uv = str(Path(sys.executable).with_name("uv"))
    os.execve(uv, [uv, *arguments], {**variables, **os.environ})


if __name__ == "__main__":
    main()
