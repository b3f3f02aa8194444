"""Tools of MCP servers on this machine. A conversation has a connection of its own, since servers may keep a state."""

import asyncio
import contextlib
import ipaddress
import json
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from hybrid_rl.config import ConfigError, check
from hybrid_rl.environments.function_tools import FIELD, ToolError
from hybrid_rl.environments.protocol import ConversationError
from hybrid_rl.rewards.loading import describe

LIST_TIMEOUT_S = 20.0
"""Time limit for a server to list its tools at the start."""
_CONNECT_TIMEOUT_S = 10.0
_CONNECTION_CLOSED = -32000
"""Code of the errors that the client itself raises where the connection has ended."""


@dataclass(frozen=True, kw_only=True)
class McpTool:
    """A tool of an MCP server."""

    schema: dict[str, Any]
    """OpenAI's schema of the function."""
    url: str
    """Of the server."""
    is_async: bool = True
    """Whether its calls must be awaited."""

    @property
    def name(self) -> str:
        """Name by which the model calls the tool."""
        return self.schema["function"]["name"]


def is_url(tool: object) -> bool:
    """Return whether an entry of `environment.tools` is a URL."""
    return isinstance(tool, str) and "://" in tool


def check_url(url: str) -> None:
    """Check that a URL has a loopback address, since conversations must not depend on other machines.

    Raises:
        ConfigError: otherwise.
    """
    try:
        parts = urlsplit(url)
        host, is_http, _ = parts.hostname or "", parts.scheme in ("http", "https"), parts.port
        is_loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:  # no port, or a host that is no address
        is_http = is_loopback = False
    check(
        is_http and is_loopback,
        f"{FIELD}: {url}: the URL of an MCP server must be http://127.0.0.1:<port>/<path>, or have another loopback "
        "address: start the server on this machine",
    )


def list_tools(url: str) -> list[McpTool]:
    """Return the tools of a server.

    Raises:
        ConfigError: the address is not loopback, or the server does not answer.
    """
    check_url(url)
    try:
        found = asyncio.run(_list(url))
    except Exception as error:
        raise ConfigError(f"{FIELD}: {_lost(url, error)}") from error
    check(bool(found), f"{FIELD}: the MCP server {url} has no tools")
    return [McpTool(url=url, schema=_schema(tool)) for tool in found]


async def _list(url: str) -> list[dict[str, Any]]:
    tools, cursor = list[dict[str, Any]](), None
    async with asyncio.timeout(LIST_TIMEOUT_S), _connect(url) as client:
        while True:
            page = await client.list_tools(cursor=cursor)
            tools += [tool.model_dump(by_alias=True, mode="json", exclude_none=True) for tool in page.tools]
            cursor = page.next_cursor
            if not cursor:
                return tools


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    function = {"name": tool["name"], "description": tool.get("description", ""), "parameters": tool["inputSchema"]}
    return {"type": "function", "function": function}


class McpSessions:
    """The connections of a conversation, one for each server that it has called."""

    def __init__(self) -> None:
        self._sessions: dict[str, _Session] = {}

    async def call(self, tool: McpTool, arguments: dict[str, Any]) -> object:
        """Return the result of a tool: text, or values as JSON has them.

        Raises:
            ToolError: the server answers that the call has failed.
            ConversationError: the server does not answer.
        """
        if tool.url not in self._sessions:
            self._sessions[tool.url] = _Session(tool.url)
        return await self._sessions[tool.url].call(tool.name, arguments)

    async def close(self) -> None:
        """End the connections."""
        for session in self._sessions.values():
            await session.close()
        self._sessions.clear()


class _Session:
    """A connection. The task that opens it must close it, so it has a task of its own."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._client: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._closing = asyncio.Event()
        self._task = asyncio.create_task(self._hold())

    async def _hold(self) -> None:
        async with _connect(self._url) as client:
            self._client.set_result(client)
            await self._closing.wait()

    async def call(self, name: str, arguments: dict[str, Any]) -> object:
        from mcp import MCPError

        call = asyncio.create_task(self._call(name, arguments))
        try:
            await asyncio.wait((call, self._task), return_when=asyncio.FIRST_COMPLETED)
            if not call.done():  # the connection has ended
                await self._task
                raise ConnectionError("it closed the connection")
            return _content(call.result())
        except ToolError:
            raise
        except Exception as error:
            if isinstance(error, MCPError) and error.code != _CONNECTION_CLOSED:
                raise ToolError(str(error)) from error
            raise ConversationError(_lost(self._url, error)) from error
        finally:
            call.cancel()

    async def _call(self, name: str, arguments: dict[str, Any]) -> Any:
        client = await self._client
        return await client.call_tool(name, arguments)

    async def close(self) -> None:
        self._closing.set()
        with contextlib.suppress(Exception):
            await self._task


@contextlib.asynccontextmanager
async def _connect(url: str) -> AsyncIterator[Any]:
    # Slow to import, and only where there are servers.
    import httpx2
    from mcp import Client
    from mcp.client.streamable_http import streamable_http_client

    # The environment limits the time of a call. Proxies of the environment variables are not for loopback.
    timeout = httpx2.Timeout(None, connect=_CONNECT_TIMEOUT_S)
    async with (
        httpx2.AsyncClient(timeout=timeout, trust_env=False) as http_client,
        Client(streamable_http_client(url, http_client=http_client)) as client,
    ):
        yield client


def _content(result: Any) -> object:
    """Return what a result holds: the text of its parts, else its structured content.

    Raises:
        ToolError: the result is an error.
    """
    parts = [part.model_dump(by_alias=True, mode="json") for part in result.content]
    text = "\n".join(_text(part) for part in parts)
    if result.is_error:
        raise ToolError(text or "the tool failed")
    return text if parts or result.structured_content is None else result.structured_content


def _text(part: Mapping[str, Any]) -> str:
    if part["type"] == "text":
        return part["text"]
    if part["type"] == "resource" and "text" in part["resource"]:
        return part["resource"]["text"]
    if part["type"] == "resource_link":
        return json.dumps(part["uri"])
    return f"[{part['type']}]"


def _lost(url: str, error: BaseException) -> str:
    return f"the MCP server {url} does not answer: {describe(_first(error), None)}"


def _first(error: BaseException) -> BaseException:
    """Return the first error of a group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
