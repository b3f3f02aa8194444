"""Values as bytes, exactly: what ranks exchange, what the phase log keeps, and what the scorers receive.

The bytes are MessagePack. Reading them builds the types below and the dataclasses that the reader names, and nothing
else: unlike unpickling, it runs no code that the bytes choose.

None, bool, int, float (every bit of it), str (also half a surrogate pair, to which sampled bytes can decode), bytes,
list and dict are MessagePack's own. Each other value is a list of a marker, which no value of a user is, and parts.
"""

import datetime
import decimal
import fractions
import functools
import pathlib
import typing
import uuid
import zoneinfo
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import msgpack

Parts = Sequence[Any]
"""What a value is built from again: values that can be serialized themselves."""


def encode(value: Any) -> bytes:
    """Return the bytes of a value, from which `decode` builds an equal value of the same types.

    Args:
        value: of the types above; or int of any size, tuple, set, frozenset, complex, Decimal, Fraction, UUID, Path,
            date, datetime, time and timedelta; arrays and scalars of NumPy, Timestamp and Timedelta of pandas; a tensor
            on the CPU; a dataclass. A dataclass object that occurs twice is one object in the result as well.
    Raises:
        TypeError: a value inside is of another type, such as a subclass of one of these; names the type.
        ValueError: it is nested too deeply.
    """
    packer = msgpack.Packer(default=_Splitter(), strict_types=True, unicode_errors="surrogatepass")
    return packer.pack(value)


def decode(content: bytes, *classes: type) -> Any:
    """Return the value that was encoded.

    Args:
        content: what `encode` returned, or any bytes.
        classes: dataclasses whose objects may occur, besides those in the annotations of their fields.
    Raises:
        ValueError: the bytes are no such value, or hold a dataclass that is not among `classes`.
    """
    joiner = _Joiner(_with_parts(classes))
    try:
        return msgpack.unpackb(
            content, list_hook=joiner, strict_map_key=False, unicode_errors="surrogatepass", ext_hook=_Marker
        )
    except Exception as error:  # parts of any kind can stand behind a marker, and make any constructor fail
        raise ValueError(f"cannot be decoded: {type(error).__name__}: {error}") from error


class _Marker(msgpack.ExtType):
    """The first entry of a list that stands for a value of another type: its code names the type."""


class _Splitter:
    """Replaces each value that MessagePack has no type for by a list of a marker and its parts."""

    def __init__(self) -> None:
        self._number_of: dict[int, int] = {}  # id of a dataclass object -> the number under which it was written
        self._written: list[Any] = []  # keeps these objects, so that no other gets the id of one of them

    def __call__(self, value: Any) -> list[Any]:
        if type(value) in _FORMS:
            code, split, _ = _FORMS[type(value)]
            return [msgpack.ExtType(code, b""), *split(value)]
        if is_dataclass(value) and not isinstance(value, type):
            return self._split_object(value)
        code, parts = _split_foreign(value)
        return [msgpack.ExtType(code, b""), *parts]

    def _split_object(self, value: Any) -> list[Any]:
        if id(value) in self._number_of:
            return [msgpack.ExtType(_AGAIN, b""), self._number_of[id(value)]]
        number = self._number_of[id(value)] = len(self._written)
        self._written.append(value)
        content = {field.name: getattr(value, field.name) for field in fields(value)}
        return [msgpack.ExtType(_OBJECT, b""), number, type(value).__name__, content]


class _Joiner:
    """Replaces each list that begins with a marker by the value that it stands for."""

    def __init__(self, classes: Mapping[str, type]) -> None:
        self._classes = classes
        self._objects: dict[int, Any] = {}  # number -> dataclass object

    def __call__(self, parts: list[Any]) -> Any:
        if not parts or type(parts[0]) is not _Marker:
            return parts
        code, content = parts[0].code, parts[1:]
        if code == _OBJECT:
            return self._join_object(*content)
        return self._objects[content[0]] if code == _AGAIN else _JOINS[code](*content)

    def _join_object(self, number: int, name: str, content: dict[str, Any]) -> Any:
        if name not in self._classes:
            raise ValueError(f"holds the class {name}, not only {', '.join(self._classes) or 'builtin types'}")
        expected = {field.name for field in fields(self._classes[name])}
        if content.keys() != expected:
            raise ValueError(f"{name} has the fields {', '.join(content)}, not {', '.join(sorted(expected))}")
        self._objects[number] = found = self._classes[name](**content)
        return found


@functools.cache
def _with_parts(classes: tuple[type, ...]) -> Mapping[str, type]:
    """Return name -> class of the dataclasses, and of those in the annotations of their fields."""
    found: dict[str, type] = {}
    for each in classes:
        found[each.__name__] = each
        hints = typing.get_type_hints(each).values()
        found |= _with_parts(tuple(part for hint in hints for part in _leaves(hint) if is_dataclass(part)))
    return found


def _leaves(hint: Any) -> Iterator[Any]:
    arguments = typing.get_args(hint)
    if not arguments:
        yield hint
    for argument in arguments:
        yield from _leaves(argument)


def _split_foreign(value: Any) -> tuple[int, Parts]:
    """Return code and parts of a value of a package that only processes with such values need to load."""
    import numpy
    import torch

    if isinstance(value, torch.Tensor) and value.device.type == "cpu":
        dense = value.detach().contiguous()
        return _TENSOR, (str(value.dtype), list(value.shape), dense.reshape(-1).view(torch.uint8).numpy().tobytes())
    if isinstance(value, numpy.ndarray | numpy.generic):
        array = numpy.asarray(value)
        if not array.dtype.hasobject and array.dtype.names is None:
            shape = None if isinstance(value, numpy.generic) else list(value.shape)
            return _ARRAY, (array.dtype.str, shape, array.tobytes())
    if isinstance(value, datetime.datetime | datetime.timedelta):
        import pandas

        time: Any = value
        if type(value) is pandas.Timestamp:
            return _TIMESTAMP, (time.as_unit("ns").value, time.unit, _split_zone(time.tzinfo))
        if type(value) is pandas.Timedelta:
            return _TIMEDELTA, (time.as_unit("ns").value, time.unit)
    place = f" on {value.device}" if isinstance(value, torch.Tensor) else ""
    raise TypeError(f"a value of type {type(value).__module__}.{type(value).__qualname__}{place} cannot be serialized")


def _join_tensor(dtype: str, shape: list[int], content: bytes) -> Any:
    import torch

    kind = getattr(torch, dtype.removeprefix("torch."))
    if not isinstance(kind, torch.dtype):
        raise ValueError(f"{dtype} is no dtype")
    if not content:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind).reshape(shape)


def _join_array(dtype: str, shape: list[int] | None, content: bytes) -> Any:
    import numpy

    array = numpy.frombuffer(content, numpy.dtype(dtype))
    return array[0] if shape is None else array.reshape(shape).copy()


def _join_timestamp(value: int, unit: str, zone: Any) -> Any:
    import pandas

    return pandas.Timestamp(value, unit="ns", tz=_join_zone(zone)).as_unit(unit)


def _join_pandas_timedelta(value: int, unit: str) -> Any:
    import pandas

    return pandas.Timedelta(value, unit="ns").as_unit(unit)


def _split_zone(zone: datetime.tzinfo | None) -> str | float | None:
    """Return the name of a time zone, its fixed distance from UTC in seconds, or None for none."""
    if zone is None:
        return None
    if type(zone) is datetime.timezone:
        return zone.utcoffset(None).total_seconds()
    if type(zone) is zoneinfo.ZoneInfo and zone.key is not None:
        return zone.key
    raise TypeError(f"a time zone of type {type(zone).__module__}.{type(zone).__qualname__} cannot be serialized")


def _join_zone(zone: str | float | None) -> datetime.tzinfo | None:
    if zone is None:
        return None
    return zoneinfo.ZoneInfo(zone) if isinstance(zone, str) else datetime.timezone(datetime.timedelta(seconds=zone))


def _split_datetime(value: datetime.datetime) -> Parts:
    return value.replace(tzinfo=None).isoformat(), value.fold, _split_zone(value.tzinfo)


def _join_datetime(text: str, fold: int, zone: Any) -> datetime.datetime:
    return datetime.datetime.fromisoformat(text).replace(fold=fold, tzinfo=_join_zone(zone))


def _split_time(value: datetime.time) -> Parts:
    return value.replace(tzinfo=None).isoformat(), value.fold, _split_zone(value.tzinfo)


def _join_time(text: str, fold: int, zone: Any) -> datetime.time:
    return datetime.time.fromisoformat(text).replace(fold=fold, tzinfo=_join_zone(zone))


_OBJECT, _AGAIN, _TENSOR, _ARRAY, _TIMESTAMP, _TIMEDELTA = range(1, 7)
"""Codes of values that are not split by their exact type alone."""
_FORMS: dict[type, tuple[int, Callable[[Any], Parts], Callable[..., Any]]] = {
    tuple: (10, lambda value: value, lambda *parts: parts),
    set: (11, list, lambda *parts: set(parts)),
    frozenset: (12, list, lambda *parts: frozenset(parts)),
    int: (13, lambda value: [hex(value)], lambda text: int(text, 16)),  # of more than 64 bits
    complex: (14, lambda value: [value.real, value.imag], complex),
    decimal.Decimal: (15, lambda value: [str(value)], decimal.Decimal),
    fractions.Fraction: (16, lambda value: [value.numerator, value.denominator], fractions.Fraction),
    uuid.UUID: (17, lambda value: [value.hex], uuid.UUID),
    type(pathlib.Path()): (18, lambda value: [str(value)], pathlib.Path),
    datetime.date: (19, lambda value: [value.isoformat()], datetime.date.fromisoformat),
    datetime.timedelta: (20, lambda value: [value.days, value.seconds, value.microseconds], datetime.timedelta),
    datetime.datetime: (21, _split_datetime, _join_datetime),
    datetime.time: (22, _split_time, _join_time),
}
"""Exact type -> code, the function that splits a value, and the one that joins the parts again."""
_JOINS: dict[int, Callable[..., Any]] = {
    **{code: join for code, _, join in _FORMS.values()},
    _TENSOR: _join_tensor,
    _ARRAY: _join_array,
    _TIMESTAMP: _join_timestamp,
    _TIMEDELTA: _join_pandas_timedelta,
}
"""Code -> the function that joins the parts."""
