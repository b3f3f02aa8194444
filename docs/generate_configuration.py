"""Write docs/configuration.md from the dataclasses of hybrid_rl/config.py: python docs/generate_configuration.py.

Each section of the settings becomes a table with name, default, values and the docstring of every field.
"""

import ast
import dataclasses
import inspect
import json
import types
import typing
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from hybrid_rl.checkpoints.resume_rules import MEANINGS, RULES
from hybrid_rl.config import Config
from hybrid_rl.settings.ranges import FINITE, RANGES

PAGE = Path(__file__).parent / "configuration.md"
WORDS = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "mapping",
    list: "list",
    type(None): "null",
}
INTRODUCTION = """\
# Configuration

Which settings are there, and what does each do?

A run is described by one YAML file with the sections below. Every setting can be overridden on the command line:

```
.venv/bin/python launch/colocated.py --config my.yaml --update.actor.lr 5e-7
.venv/bin/python launch/colocated.py --config my.yaml --print_config   # what would run
.venv/bin/python launch/colocated.py --help                            # this page
```

A later `--config` counts before an earlier one, setting by setting, and the command line before every file. `~` at the
start of a path is the home folder. A value is read as its setting asks for it: `off` is text for `memory.swap` and
false for `advantage.whiten`, and `1e-6` is a number. An empty value is null, which few settings take. A key may also be
a dotted name, such as `update.actor.lr`, but no setting may be given twice in one file.

Settings are checked before anything loads. An error names the setting, its value, the rule and the remedy; all errors
are reported at once, and the command ends with code 2. This page is generated from the dataclasses of
`hybrid_rl/config.py`.
"""


def field_docs(kind: type) -> dict[str, str]:
    """Return the docstring below each field of a dataclass, as one line."""
    body = ast.parse(inspect.getsource(kind)).body[0].body  # type: ignore[attr-defined]
    docs = {}
    for field, below in pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[ast.unparse(field.target)] = " ".join(str(below.value.value).split())
    return docs


def values(annotation: Any) -> str:
    """Return in words which values a setting takes."""
    arguments = typing.get_args(annotation)
    origin = typing.get_origin(annotation)
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in arguments)
    if origin in (types.UnionType, typing.Union):
        return " or ".join(values(argument) for argument in arguments)
    if origin is tuple:
        return f"{len(arguments)} values, each a {values(arguments[0])}"
    if origin is list:
        return f"list, each item a {values(arguments[0])}"
    return WORDS[origin or annotation]


def default(value: Any) -> str:
    """Return a default as YAML has it."""
    return f"`{json.dumps(list(value) if isinstance(value, tuple) else value)}`"


def sections(settings: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the settings of every section, the inner ones after the section that holds them."""
    if name:
        yield name, settings
    for field in dataclasses.fields(settings):
        inner = getattr(settings, field.name)
        if dataclasses.is_dataclass(inner):
            yield from sections(inner, f"{name}.{field.name}".strip("."))


def table(name: str, settings: Any) -> str:
    """Return one section of the page."""
    kind = type(settings)
    docs, annotations = field_docs(kind), typing.get_type_hints(kind)
    lines = [f"## {name}", "", inspect.cleandoc(kind.__doc__ or ""), ""]
    lines += ["| Setting | Default, values | Meaning |", "|---|---|---|"]
    for field in dataclasses.fields(settings):
        value = getattr(settings, field.name)
        if dataclasses.is_dataclass(value):
            section = f"{name}.{field.name}"
            lines.append(f"| `{field.name}` | | The section [{section}](#{section.replace('.', '')}). |")
            continue
        meaning = docs.get(field.name, "").replace("|", "&#124;").replace("<", "&lt;")
        words = values(annotations[field.name])
        bounds = RANGES.get(f"{name}.{field.name}", FINITE)
        rule = "" if bounds is FINITE else f", {bounds.rule}"
        lines.append(f"| `{field.name}` | {default(value)}<br>{words}{rule} | {meaning} |")
    return "\n".join(lines) + "\n"


RESUMING = """
## Settings of a run that continues

With `run.resume: auto` or `must` a run goes on from its newest whole checkpoint. Its settings are compared with the
settings of the checkpoint, its models by the hash of their files: a copy under another path is the same model, and
another model under the same path is refused. All refusals are reported at once, before a model loads or a file of the
run changes.

Every file of a checkpoint is compared with its checksum. If the newest checkpoint is damaged, `auto` goes back to the
newest whole one with a warning that names the file and the lost steps, and `must` exits with code 2; both exit with
code 2 if none is whole. `never` moves an earlier run of the same folder to `<run.dir>/<run.name>.old-1`, or the next
free number, and starts at step 1. One run at a time may use a folder; a second one exits with code 2.

"""
"""Section above the table of rules."""


def resume_rules() -> str:
    """Return the section on the settings of a run that continues."""
    lines = ["| Rule | What happens where the value is not the checkpoint's |", "|---|---|"]
    lines += [f"| {kind} | {meaning} |" for kind, meaning in MEANINGS.items()]
    lines += ["", "| Setting | Rule | Reason |", "|---|---|---|"]
    for name, rule in RULES.items():
        kind = f"{rule.kind} in part, else warns" if rule.trait else rule.kind
        condition = f" (only with `{rule.needs}`)" if rule.needs else ""
        lines.append(f"| `{name}` | {kind} | {rule.reason}{condition} |")
    return RESUMING + "\n".join(lines) + "\n"


def page() -> str:
    """Return the whole page."""
    tables = "".join("\n" + table(name, settings) for name, settings in sections(Config()))
    return INTRODUCTION + tables + resume_rules()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
