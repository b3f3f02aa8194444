"""The commands of a shell script, as far as they are known without running it."""

import re
import shlex

from hybrid_rl.config import ConfigError

ASSIGNMENT = re.compile(r"\s*(?:export\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)=(.*?)(?:\s#.*)?")
ARRAY = re.compile(r"(?<=[A-Za-z_0-9]=)\(([^()]*)\)")
VARIABLE = re.compile(r"'[^']*'|\$\{(\w+)(?:\[@\])?\}|\$(\w+)")
OPERATOR = re.compile(r"[|&;]+|\d*>.*|&>.*|#.*")


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, without comment lines and with variables and arrays expanded.

    A line that starts with a dash continues the previous command, even without a backslash. A variable is not expanded
    if the script does not set it, or sets it to nothing or to the output of a command.

    Raises:
        ConfigError: a quotation is not closed.
    """
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\n\s*(?=-)", " ", "\n".join(lines).replace("\\\n", " "))
    joined = ARRAY.sub(lambda array: '"' + " ".join(array[1].split()).replace('"', '\\"') + '"', joined)
    variables: dict[str, str] = {}
    found = []
    for line in joined.splitlines():
        try:
            expanded = VARIABLE.sub(lambda use: variables.get(use[1] or use[2] or "", use[0]), line)
            words = shlex.split(expanded)
            assignment = ASSIGNMENT.fullmatch(expanded)
            values = shlex.split(assignment[2]) if assignment else []
        except ValueError as error:
            raise ConfigError(f"the command line cannot be split into words: {error}: {line.strip()[:80]}") from error
        if assignment and len(values) < 2:
            value = "".join(values)
            if value and not re.search(r"\$\(|`", value):
                variables[assignment[1]] = value
        elif words:
            found.append(words)
    return found


def up_to_operator(words: list[str]) -> list[str]:
    """Return the words before the first pipe, redirection, further command or comment."""
    return words[: next((i for i, word in enumerate(words) if OPERATOR.fullmatch(word)), len(words))]
