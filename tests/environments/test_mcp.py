"""Tools of an MCP server that runs on this machine as a program of its own."""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.environments.mcp import check_url
from hybrid_rl.environments.pool import EnvironmentPool
from hybrid_rl.environments.protocol import ConversationError, Step
from hybrid_rl.environments.tools import ToolEnvironment, load_tools

SERVER = '''
import asyncio
import logging
import os
import socket

import uvicorn
from mcp.server.mcpserver import MCPServer

logging.disable()
server = MCPServer("shop")

@server.tool()
def price(item: str) -> int:
    """Return the price of an item."""
    return {"apple": 3, "pear": 4}[item]

@server.tool()
def shelf() -> list[str]:
    """List the items."""
    return ["apple", "pear"]

@server.tool()
async def wait(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "waited"

@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)

listener = socket.socket()
listener.bind(("127.0.0.1", 0))
listener.listen()
print(listener.getsockname()[1], flush=True)
uvicorn.Server(uvicorn.Config(server.streamable_http_app(), log_level="critical")).run(sockets=[listener])
'''
ROW = {"prompt_messages": [{"role": "user", "content": "What does an apple cost?"}]}


@contextmanager
def running_server(folder: Path) -> Iterator[str]:
    """Yield the URL of a new server."""
    program = folder / "server.py"
    program.write_text(SERVER)
    with subprocess.Popen([sys.executable, str(program)], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}/mcp"
        finally:
            process.kill()


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with running_server(tmp_path_factory.mktemp("mcp")) as url:
        yield url


def turn(*calls: tuple[str, dict[str, Any]]) -> dict[str, Any]:
    made = [
        {"id": f"call{i}", "type": "function", "function": {"name": name, "arguments": json.dumps(arguments)}}
        for i, (name, arguments) in enumerate(calls)
    ]
    return {"role": "assistant", "content": "", "tool_calls": made}


def steps(url: str, *turns: dict[str, Any], **arguments: Any) -> list[Step]:
    """Return the answers to the turns of a conversation with the tools of a server."""

    async def converse() -> list[Step]:
        environment = ToolEnvironment([url], **arguments)
        environment.reset(ROW)
        try:
            return [await environment.step(message) for message in turns]
        finally:
            await environment.close()

    return asyncio.run(converse())


def texts(step: Step) -> list[str]:
    return [message["content"] for message in step.observation]


def test_tools_of_a_server_have_its_schemas_and_are_called(url):
    assert ToolEnvironment.prepare([url]) is True
    schema = ToolEnvironment([url]).reset(ROW).tools[0]
    assert schema["type"] == "function" and schema["function"]["name"] == "price"
    assert schema["function"]["description"] == "Return the price of an item."
    assert schema["function"]["parameters"]["required"] == ["item"]
    first, last = steps(url, turn(("price", {"item": "apple"}), ("shelf", {})), turn())
    assert texts(first) == ["3", "apple\npear"]
    assert first.info == {"num_tool_calls": 2, "num_failed_tool_calls": 0} and last.done


def test_calls_that_the_server_refuses_have_failed_and_the_conversation_goes_on(url):
    (step,) = steps(url, turn(("price", {"item": "plum"}), ("price", {"it": "apple"}), ("price", {"item": "pear"})))
    crash, wrong, right = texts(step)
    assert crash.startswith("error: ") and "price" in crash
    assert wrong.startswith("error: ") and "item" in wrong
    assert right == "4" and step.info == {"num_tool_calls": 3, "num_failed_tool_calls": 2}


def test_a_call_that_takes_too_long_has_failed_and_the_connection_goes_on(url):
    (step,) = steps(url, turn(("wait", {"seconds": 60}), ("price", {"item": "apple"})), call_timeout_s=1.0)
    assert texts(step) == ["error: the call took longer than 1 s", "3"]


def test_python_functions_and_servers_are_used_together(url, tmp_path):
    path = tmp_path / "double.py"
    path.write_text('def double(x: int) -> int:\n    "Double a number."\n    return 2 * x\n')
    with EnvironmentPool("tools", arguments={"tools": [url, f"{path}:double"]}, timeout_s=30, num_workers=1) as pool:
        pool.reset(1, ROW)
        while not (answers := pool.receive(30.0)):
            pass
        assert [tool["function"]["name"] for tool in answers[0].result.tools][-1] == "double"
        pool.step(1, turn(("price", {"item": "pear"}), ("double", {"x": 4})))
        while not (answers := pool.receive(30.0)):
            pass
        assert texts(answers[0].result) == ["4", "8"]


def test_a_server_that_ends_fails_its_conversations_with_one_sentence(tmp_path):
    with running_server(tmp_path) as url:
        load_tools((url,))
        for _ in range(2):  # while the server runs, and when it has ended
            started = time.monotonic()
            with pytest.raises(ConversationError, match=f"^the MCP server {url} does not answer: .+$"):
                steps(url, turn(("leave", {})))
            assert time.monotonic() - started < 10.0


def test_a_server_that_does_not_run_is_reported_at_the_start():
    with pytest.raises(ConfigError) as error:
        ToolEnvironment.prepare(["http://127.0.0.1:1/mcp"])
    (message,) = error.value.messages
    assert message.startswith("environment.tools: the MCP server http://127.0.0.1:1/mcp does not answer: ConnectError")


@pytest.mark.parametrize("url", ["http://127.0.0.1:8000/mcp", "http://localhost/mcp", "http://[::1]:8000/mcp"])
def test_loopback_addresses_are_accepted(url):
    check_url(url)


@pytest.mark.parametrize(
    "url",
    [
        "http://10.0.0.1:8000/mcp",
        "https://example.com/mcp",
        "http://127.0.0.1.example.com/mcp",
        "http://user@example.com:80/mcp",
        "http://127.0.0.1@example.com/mcp",
        "http://127.0.0.1:99999/mcp",
        "stdio://127.0.0.1/server",
        "http://",
    ],
)
def test_other_addresses_are_refused(url):
    with pytest.raises(ConfigError, match=r"environment\.tools: .* must be http://127\.0\.0\.1:<port>/<path>"):
        check_url(url)
