"""The commands of a shell script, as far as they are known without running it."""

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hybrid_rl.config import ConfigError

ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)
DECLARATIONS = {"export", "declare", "local", "readonly", "typeset"}
BRACES = re.compile(r"(\w+)(\[[@*]\])?(?::?-(.*))?", re.DOTALL)
OPERATOR = re.compile(r"[|&]+|\d*[<>].*|&>.*")
SCRIPT_ARGUMENTS = re.compile(r"\$[@*]|\$\{[@*].*\}")
"""A word that stands for the arguments of the script itself, which are not known."""
ARITHMETIC: Mapping[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def commands(text: str) -> list[list[str]]:
    """Return the words of each command, without comments and with variables, arrays and arithmetic expanded.

    A line that starts with a dash continues the previous command, even without a backslash. A variable is not expanded
    if the script does not set it, or sets it to nothing or to the output of a command; HOME is `~`, and PWD is `.`. The
    text that `bash -c` runs is read, too.

    Raises:
        ConfigError: a quotation is not closed.
    """
    return list(_commands(text, {"HOME": ["~"], "PWD": ["."]}))


def up_to_operator(words: list[str]) -> list[str]:
    """Return the words before the first pipe or redirection, without the arguments of the script itself."""
    end = next((i for i, word in enumerate(words) if OPERATOR.fullmatch(word)), len(words))
    return [word for word in words[:end] if word.strip() and not SCRIPT_ARGUMENTS.fullmatch(word)]


def _commands(text: str, variables: dict[str, list[str]]) -> Iterator[list[str]]:
    reader = _Reader(text, variables)
    while (words := reader.command()) is not None:
        start = 1 if words and words[0] in DECLARATIONS else 0
        assigned = [word for word in words[start:] if not (start and isinstance(word, str) and word.startswith("-"))]
        if assigned and all(isinstance(word, _Array) or ASSIGNMENT.fullmatch(word) for word in assigned):
            for word in assigned:
                _assign(word, variables)
            continue
        plain = [word for word in words if isinstance(word, str)]
        if plain:
            yield plain
        if "-c" in plain[:-1]:
            yield from _commands(plain[plain.index("-c") + 1], variables)


@dataclass(frozen=True, kw_only=True)
class _Array:
    """An assignment of several words to a variable."""

    name: str
    items: tuple[str, ...]


def _assign(word: "str | _Array", variables: dict[str, list[str]]) -> None:
    """Set a variable, or forget it if its value is empty or only known to a shell."""
    if isinstance(word, _Array):
        name, items = word.name, list(word.items)
    else:
        found = ASSIGNMENT.fullmatch(word)
        assert found is not None
        name, items = found[1], [found[2]] if found[2] else []
    variables.pop(name, None)
    if items and not any("$(" in item or "`" in item for item in items):
        variables[name] = items


class _Reader:
    """Reads a script word by word."""

    def __init__(self, text: str, variables: Mapping[str, list[str]]) -> None:
        self._text, self._variables = text, variables
        self._position = 0

    def command(self) -> "list[str | _Array] | None":
        """Return the words up to the end of a command; None at the end of the script."""
        if self._position >= len(self._text):
            return None
        words: list[str | _Array] = []
        while not self._is_end(has_words=bool(words)):
            words += self._word()
        return words

    def _is_end(self, *, has_words: bool) -> bool:
        """Skip blanks and comments, and return whether the command ends here; its separator is skipped, too."""
        while self._position < len(self._text):
            rest = self._text[self._position :]
            if rest[0] in " \t" or rest.startswith("\\\n"):
                self._position += 1 if rest[0] in " \t" else 2
            elif rest[0] == "#":
                self._position += len(rest.partition("\n")[0])
                is_whole_line = not self._text[: self._position].rpartition("\n")[2].partition("#")[0].strip()
                self._position += 1 if is_whole_line else 0
            elif rest[0] == "\n" and has_words and re.match(r"\s*(?:#[^\n]*\n\s*)*--?[A-Za-z]", rest):
                self._position += 1
            elif separator := re.match(r"\n|;+|&&|\|\|", rest):
                self._position += separator.end()
                return True
            else:
                return False
        return True

    def _word(self) -> "list[str | _Array]":
        """Return the word here: none or several words if it is the expansion of a variable."""
        words: list[str | _Array] = []
        current, is_quoted = "", False
        while self._position < len(self._text) and self._text[self._position] not in " \t\n;":
            letter = self._text[self._position]
            if letter == "(" and re.fullmatch(r"[A-Za-z_]\w*\+?=", current):
                return [_Array(name=current.rstrip("+="), items=tuple(self._items()))]
            if letter in "'\"":
                is_quoted = True
                parts = [self._until("'")] if letter == "'" else self._double_quoted()
            elif letter == "\\":
                parts = [self._text[self._position + 1 : self._position + 2].replace("\n", "")]
                self._position += 2
            elif letter == "$":
                parts = self._expansion(is_quoted=False)
            else:
                parts = [self._until("`", keep=True) if letter == "`" else letter]
                self._position += letter != "`"
            *complete, current = [current + parts[0], *parts[1:]] if parts else [current]
            words += complete
        return [*words, current] if current or is_quoted else words

    def _items(self) -> list[str]:
        """Return the words of an array, whose parenthesis opens here."""
        self._position += 1
        start, depth = self._position, 1
        quote = ""
        while self._position < len(self._text) and depth:
            letter = self._text[self._position]
            if quote or letter in "'\"":
                quote = "" if letter == quote else quote or letter
            else:
                depth += {"(": 1, ")": -1}.get(letter, 0)
            self._position += 1
        reader = _Reader(self._text[start : self._position - 1], self._variables)
        return [word for words in iter(reader.command, None) for word in words if isinstance(word, str)]

    def _until(self, end: str, *, keep: bool = False) -> str:
        """Return the text from the quotation mark here to the next one."""
        stop = self._text.find(end, self._position + 1)
        if stop < 0:
            line = self._text[: self._position].rpartition("\n")[2] + self._text[self._position :].partition("\n")[0]
            raise ConfigError(f"the command line cannot be split into words: no closing quotation: {line.strip()[:80]}")
        text = self._text[self._position + 1 : stop]
        self._position = stop + 1
        return f"{end}{text}{end}" if keep else text

    def _double_quoted(self) -> list[str]:
        """Return the text in the double quotes that open here; several words if an array is expanded in them."""
        start = self._position
        self._position += 1
        words = [""]
        while not self._text.startswith('"', self._position):
            letter = self._text[self._position : self._position + 1]
            if not letter:
                self._position = start
                self._until('"' if self._text.find('"', start + 1) < 0 else "\0")
            if letter == "\\" and self._text[self._position + 1 : self._position + 2] in '"\\$`\n':
                words[-1] += self._text[self._position + 1].replace("\n", "")
                self._position += 2
            elif letter == "$":
                first, *others = self._expansion(is_quoted=True) or [""]
                words = [*words[:-1], words[-1] + first, *others]
            else:
                words[-1] += letter
                self._position += 1
        self._position += 1
        return words

    def _expansion(self, *, is_quoted: bool) -> list[str]:
        """Return the words that the dollar sign here stands for: itself where its value is not known."""
        rest = self._text[self._position :]
        if rest.startswith(("$((", "$(", "${")):
            length = _balanced(rest[1:])
            self._position += 1 + length
            inner = rest[2:length]
            if rest.startswith("$((") and inner.endswith(")"):
                return [_arithmetic(inner[1:-1], self._variables) or rest[: 1 + length]]
            found = BRACES.fullmatch(inner) if rest[1] == "{" else None
        else:
            found = re.match(r"(\w+|[@*#?$!-])()()", rest[1:])
            length = found.end() if found else 0
            self._position += 1 + length
        values = self._variables.get(found[1]) if found else None
        if values is None and found and found[3]:
            values = [word for word in _Reader(found[3], self._variables).command() or () if isinstance(word, str)]
        if found is None or values is None:
            return [rest[: 1 + length]]
        if found[2]:
            return values
        return [values[0]] if is_quoted else values[0].split()


def _balanced(text: str) -> int:
    """Return the length of the parenthesised or braced text at the start of a text."""
    opening, closing = text[0], {"(": ")", "{": "}"}[text[0]]
    depth = 0
    for length, letter in enumerate(text, 1):
        depth += {opening: 1, closing: -1}.get(letter, 0)
        if not depth:
            return length
    return len(text)


def _arithmetic(text: str, variables: Mapping[str, list[str]]) -> str | None:
    """Return the value of an arithmetic expression of whole numbers; None if it is not known."""

    def value(node: ast.AST) -> int:
        match node:
            case ast.Expression(body=body):
                return value(body)
            case ast.Constant(value=int(number)):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in ARITHMETIC:
                return int(ARITHMETIC[type(op)](value(left), value(right)))
            case ast.Name(id=name):
                return int(variables[name][0])
        raise ValueError

    try:
        return str(value(ast.parse(re.sub(r"\$\{?(\w+)\}?", r"\1", text).strip(), mode="eval")))
    except (SyntaxError, ValueError, LookupError, ZeroDivisionError):
        return None
