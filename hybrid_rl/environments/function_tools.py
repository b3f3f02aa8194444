"""Python functions that the model may call: their schemas, and calls with arguments that fit them."""

import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import docstring_parser
import pydantic
from pydantic.json_schema import GenerateJsonSchema

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.loading import load_object
from hybrid_rl.rewards.loading import describe
from hybrid_rl.rewards.reward_files import RewardFolder

FIELD = "environment.tools"
"""Setting that lists the tools, for messages."""
MAX_ERRORS = 3
"""Wrong arguments of a call that its answer describes."""
_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


class ToolError(Exception):
    """A call that failed; the model reads the message."""


@dataclass(frozen=True, kw_only=True)
class FunctionTool:
    """A Python function that the model may call."""

    schema: dict[str, Any]
    """OpenAI's schema of the function."""
    function: Callable[..., Any]
    arguments: type[pydantic.BaseModel]
    """The arguments, whose aliases are the names of the parameters."""
    folder: RewardFolder | None = None
    """The file's folder, which must be active while the function runs; None for a function that was not named."""

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.schema["function"]["name"]

    @property
    def is_async(self) -> bool:
        """Whether its calls must be awaited."""
        return inspect.iscoroutinefunction(self.function)

    async def call(self, arguments: str) -> object:
        """Return what the function returns.

        Args:
            arguments: a JSON object.
        Raises:
            ToolError: an argument is missing, unknown or of another type, or the function raises an exception.
        """
        values = self._read(arguments)
        try:
            if self.folder is not None:
                self.folder.activate()
            result = self.function(**values)
            return await result if self.is_async else result
        except (Exception, SystemExit) as error:
            raise ToolError(describe(error, None)) from error

    def _read(self, arguments: str) -> dict[str, Any]:
        """Return the values of the arguments that the call gives, by the names of the parameters."""
        try:
            read = self.arguments.model_validate_json(arguments)
        except pydantic.ValidationError as error:
            found = error.errors(include_url=False, include_context=False)
            places = [".".join(map(str, one["loc"])) for one in found]
            described = [f"{place}: {one['msg']}" for place, one in zip(places, found, strict=True)]
            raise ToolError(f"wrong arguments: {'; '.join(described[:MAX_ERRORS])}") from None
        fields = type(read).model_fields
        return {str(fields[name].alias): getattr(read, name) for name in read.model_fields_set}


def load_function(tool: str | Callable[..., Any]) -> FunctionTool:
    """Return the tool of a function.

    Args:
        tool: `path.py:function`, the name of a function that hybrid_rl.train was given, or the function itself.
    Raises:
        ConfigError: the function cannot be imported, or no schema can be made from its signature and docstring.
    """
    if not isinstance(tool, str):
        return make_tool(tool, getattr(tool, "__name__", repr(tool)))
    function, _, folder = load_object(tool, field=FIELD)
    return make_tool(function, tool, folder)


def make_tool(function: Callable[..., Any], name: str, folder: RewardFolder | None = None) -> FunctionTool:
    """Return the tool of a function, by its type hints and the descriptions in its docstring.

    Args:
        function: each parameter has a type hint; the docstring describes the function, and may describe parameters.
        name: of the function, for messages.
        folder: see FunctionTool.
    Raises:
        ConfigError: the docstring or a type hint is missing, or a type is none that JSON can express.
    """
    where = f"{FIELD}: {name}"
    docstring = docstring_parser.parse(inspect.getdoc(function) or "")
    description = "\n".join(part for part in (docstring.short_description, docstring.long_description) if part)
    check(bool(description), f"{where}: has no docstring, which tells the model what the tool does")
    descriptions = {parameter.arg_name: parameter.description for parameter in docstring.params}
    try:
        arguments = _arguments_model(function, descriptions, where)
        parameters = arguments.model_json_schema(schema_generator=_Schema)
    except ConfigError:
        raise
    except Exception as error:  # type hints may name modules of the user, which fail
        raise ConfigError(
            f"{where}: the types of its parameters must be types that JSON can express: {describe(error, None)}"
        ) from error
    schema = {"name": function.__name__, "description": description, "parameters": parameters}
    return FunctionTool(
        schema={"type": "function", "function": schema}, function=function, arguments=arguments, folder=folder
    )


def _arguments_model(
    function: Callable[..., Any], descriptions: dict[str, str | None], where: str
) -> type[pydantic.BaseModel]:
    hints = typing.get_type_hints(function, include_extras=True)
    fields: dict[str, Any] = {}
    for number, parameter in enumerate(inspect.signature(function).parameters.values()):
        name = parameter.name
        check(
            parameter.kind in _BY_NAME,
            f"{where}: its parameter {name} cannot be given by name: a tool is called by the names of its parameters, "
            "without *args, **kwargs and parameters before /",
        )
        check(name in hints, f"{where}: its parameter {name} has no type hint, which tells the model what to give")
        default = ... if parameter.default is inspect.Parameter.empty else parameter.default
        # A field of the parameter's own name could hide an attribute of pydantic's.
        fields[f"argument{number}"] = (
            hints[name],
            pydantic.Field(default, alias=name, description=descriptions.get(name)),
        )
    strict = pydantic.ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=False)
    return pydantic.create_model(function.__name__, __config__=strict, **fields)


class _Schema(GenerateJsonSchema):
    """Schemas without the titles that pydantic makes of names, which only take tokens."""

    def generate(self, schema: Any, mode: Any = "validation") -> dict[str, Any]:
        found = _without_titles(super().generate(schema, mode=mode))
        found.pop("additionalProperties", None)
        return {"type": "object", "properties": {}} | found


def _without_titles(schema: Any, *, is_names: bool = False) -> Any:
    """Return a JSON schema without titles.

    Args:
        is_names: whether the keys are names of properties, which may be called title.
    """
    if isinstance(schema, list):
        return [_without_titles(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: _without_titles(value, is_names=not is_names and key in ("properties", "$defs"))
        for key, value in schema.items()
        if is_names or key != "title"
    }
