"""The tables of docs/seeds.md, generated from the translators by `python -m launch.translate.table`."""

from collections.abc import Iterator

from .program import KEEP_DEFAULT, Argument, Program
from .reading import read_arguments
from .systems import SYSTEMS

HEADER = "| Argument | Default | Setting here | What differs |\n|---|---|---|---|\n"
PREFIX = {
    "maps": "",
    "fixed": "",
    "lost": "Not carried over: ",
    "missing": "Missing, without an effect on results: ",
    "moot": "No meaning here: ",
    "refused": "Another value ends the translation: ",
}


def table(program: Program) -> str:
    """Return a Markdown table with a row per argument or fact of a program."""
    return HEADER + "".join(f"| {' | '.join(_cells(program, argument))} |\n" for argument in program.arguments)


def _cells(program: Program, argument: Argument) -> Iterator[str]:
    is_fact = argument.effect == "fixed"
    yield argument.names[0] if is_fact else ", ".join(f"`{program.dashes}{name}`" for name in argument.names)
    yield "" if is_fact or argument.effect == "moot" else _default(argument)
    fields = ", ".join(f"`{field}`{_value(program, field) if is_fact else ''}" for field in argument.fields)
    yield fields + _choices(argument)
    yield PREFIX[argument.effect] + argument.note if argument.note else ""


def _default(argument: Argument) -> str:
    if argument.num_values == 0:
        return "on" if argument.default else "off"
    if argument.default in (None, "", []):
        return "none"
    values = argument.default if isinstance(argument.default, list) else [argument.default]
    return " ".join(f"{value:g}" if isinstance(value, float) else str(value) for value in values)


def _choices(argument: Argument) -> str:
    """Return the values that are spelled differently here."""
    pairs = [
        (("off", "on")[value] if isinstance(value, bool) else value, setting)
        for value, setting in (argument.choices or {}).items()
    ]
    renamed = [f"{value}: {str(setting).lower()}" for value, setting in pairs if value != setting]
    return f" ({', '.join(renamed)})" if renamed else ""


def _value(program: Program, field: str) -> str:
    """Return the value of a rule for a command line without arguments."""
    value = program.rules[field](read_arguments(program, []))
    return "" if value is KEEP_DEFAULT else f" {'null' if value is None else str(value).lower()}"


if __name__ == "__main__":
    for programs in SYSTEMS.values():
        for program in programs:
            print(f"{program.title}\n\n{table(program)}")
