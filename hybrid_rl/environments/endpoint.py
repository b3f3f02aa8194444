"""A chat-completions endpoint on loopback: agents send their requests, and an environment reads and answers them.

It runs on the event loop of the environments of a worker process. Each conversation has an API key of its own, and a
request without one is answered with 401. A request that cannot be trained is answered with 400 and ends the
conversation with the same sentence, so that an agent that ignores the answer changes nothing.
"""

import asyncio
import logging
import secrets
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from hybrid_rl.environments.chat_completions import (
    ChatRequest,
    RefusedRequestError,
    added_messages,
    completion,
    completion_events,
    read_request,
)
from hybrid_rl.environments.protocol import ConversationError, Message

logger = logging.getLogger(__name__)

MAX_BODY_BYTES = 1 << 24
"""Largest body of a request."""
READ_TIMEOUT_S = 30.0
"""Time limit for the body of a request to arrive."""
IDLE_TIMEOUT_S = 60.0
"""Time after which a connection without a request is closed."""
_warned = set[str]()  # ignored settings that this process has warned of
_endpoints: dict[asyncio.AbstractEventLoop, "Endpoint"] = {}


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The agent has asked for the model's next turn."""

    messages: list[Message]
    """Messages that the request adds to the conversation."""
    tools: list[dict[str, Any]] | None
    """Tools of the conversation; None for none."""


@dataclass(frozen=True, kw_only=True)
class Returned:
    """The agent has come to its end."""

    value: object
    """What it has returned."""


class ChatConversation:
    """The requests of one agent, and the model's answers to them. All methods are called on the endpoint's loop."""

    def __init__(self, *, base_url: str, model: str) -> None:
        """Start without requests.

        Args:
            base_url: of the endpoint, for the agent's client.
            model: name of the model in the endpoint's list.
        """
        self.base_url, self.model = base_url, model
        self.api_key = secrets.token_urlsafe(32)
        """Secret that requests of this conversation have."""
        self._events = asyncio.Queue[Asked | Returned | ConversationError]()
        self._failure: str | None = None
        self._request: ChatRequest | None = None  # the last one
        self._waiting: asyncio.Future[Message] | None = None  # its answer; cancelled if its client has gone
        self._answer: Message | None = None
        self._is_read = False  # whether a client has got that answer

    @property
    def is_abandoned(self) -> bool:
        """Whether the client of the last request has gone before it got the answer."""
        return self._waiting is not None and self._waiting.cancelled()

    async def next_event(self) -> Asked | Returned:
        """Wait until the agent asks or returns.

        Raises:
            ConversationError: the agent has raised an error, or sent a request that cannot be trained.
        """
        event = await self._events.get()
        if isinstance(event, ConversationError):
            raise event
        return event

    def answer(self, message: Message) -> None:
        """Answer the last request with the assistant's message; nothing happens if the agent has given up waiting."""
        self._answer = message
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_result(message)

    def end(self, value: object) -> None:
        """Take what the agent has returned."""
        self._events.put_nowait(Returned(value=value))

    def fail(self, sentence: str) -> None:
        """End the conversation with a failure; requests are refused with the same sentence."""
        self._events.put_nowait(ConversationError(sentence))
        self.refuse(sentence)

    def refuse(self, sentence: str) -> None:
        """Refuse the request that waits, and all to come, with a sentence."""
        self._failure = self._failure or sentence
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(RefusedRequestError(self._failure))

    async def ask(self, request: ChatRequest) -> Message:
        """Return the model's answer to a request of the agent.

        A client that has lost its connection may repeat its request, and gets the answer to the first one.

        Raises:
            RefusedRequestError: the request cannot be trained, or the conversation has ended.
        """
        if self._failure is not None:
            raise RefusedRequestError(self._failure)
        if self._waiting is not None and not self._waiting.done():
            raise RefusedRequestError("two requests at the same time: an agent waits for each answer of the model")
        loop = asyncio.get_running_loop()
        if self._request is None or self._is_read or not request.is_repeat_of(self._request):
            messages = self._added(request)
            self._request, self._answer, self._is_read = request, None, False
            self._events.put_nowait(Asked(messages=messages, tools=request.tools))
        self._waiting = loop.create_future()
        if self._answer is not None:
            self._waiting.set_result(self._answer)
        message = await self._waiting
        self._is_read = True
        return message

    def _added(self, request: ChatRequest) -> list[Message]:
        if self._request is None:
            return request.messages
        if self._answer is None:
            raise RefusedRequestError("the agent gave up waiting for the model's answer and sent another request")
        return added_messages(self._request, self._answer, request)


class Endpoint:
    """The HTTP server of the conversations of a process."""

    def __init__(self) -> None:
        """Make a server that `start` starts."""
        self._conversations: dict[str, ChatConversation] = {}  # API key -> conversation
        application = web.Application(middlewares=[self._guard], client_max_size=MAX_BODY_BYTES)
        application.router.add_post("/v1/chat/completions", self._complete)
        application.router.add_get("/v1/models", self._list_models)
        # A handler is cancelled where its client has gone, so that a client may repeat a request.
        self._runner = web.AppRunner(
            application,
            handler_cancellation=True,
            access_log=None,
            keepalive_timeout=IDLE_TIMEOUT_S,
            shutdown_timeout=1.0,
        )
        self._start: asyncio.Task[None] | None = None
        self._base_url = ""

    async def start(self) -> None:
        """Listen on a free port of loopback, unless the server does so."""
        if self._start is None:
            self._start = asyncio.create_task(self._listen())
        await asyncio.shield(self._start)

    async def _listen(self) -> None:
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self._base_url = f"http://127.0.0.1:{self._runner.addresses[0][1]}/v1"

    async def stop(self) -> None:
        """End all conversations and the server."""
        for conversation in list(self._conversations.values()):
            self.close(conversation)
        await self._runner.cleanup()
        _endpoints.pop(asyncio.get_running_loop(), None)

    def open(self, *, model: str) -> ChatConversation:
        """Return a new conversation, which takes requests until it is closed.

        Args:
            model: name of the model in the endpoint's list.
        """
        conversation = ChatConversation(base_url=self._base_url, model=model)
        self._conversations[conversation.api_key] = conversation
        return conversation

    def close(self, conversation: ChatConversation) -> None:
        """End a conversation: the request that waits is refused, and others of its agent are unknown."""
        self._conversations.pop(conversation.api_key, None)
        conversation.refuse("the conversation has ended")

    @web.middleware
    async def _guard(
        self, request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        """Answer requests without a key, to other addresses and with errors as OpenAI's interface does."""
        if self._conversation_of(request) is None:
            return _error(401, "the request has no API key of a conversation that goes on")
        try:
            return await handler(request)
        except RefusedRequestError as error:
            return _error(400, str(error))
        except web.HTTPException as error:
            sentence = f"{request.method} {request.path}: {error.reason}: agents are trained by chat completions alone"
            return _error(error.status, sentence)

    def _conversation_of(self, request: web.Request) -> ChatConversation | None:
        scheme, _, key = request.headers.get("Authorization", "").partition(" ")
        return self._conversations.get(key.strip()) if scheme.lower() == "bearer" else None

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        conversation = self._conversation_of(request)
        assert conversation is not None
        try:
            asked = read_request(await _read_json(request))
            _warn(asked.ignored)
            answer = await conversation.ask(asked)
        except RefusedRequestError as error:
            conversation.fail(str(error))
            raise
        model = asked.model or conversation.model
        if asked.is_streamed:
            return web.Response(body=completion_events(answer, model=model), content_type="text/event-stream")
        return web.json_response(completion(answer, model=model))

    async def _list_models(self, request: web.Request) -> web.StreamResponse:
        conversation = self._conversation_of(request)
        assert conversation is not None
        model = {"id": conversation.model, "object": "model", "created": 0, "owned_by": "hybrid_rl"}
        return web.json_response({"object": "list", "data": [model]})


async def running_endpoint() -> Endpoint:
    """Return the endpoint of the running event loop, started at the first call."""
    endpoint = _endpoints.setdefault(asyncio.get_running_loop(), Endpoint())
    await endpoint.start()
    return endpoint


async def _read_json(request: web.Request) -> object:
    try:
        async with asyncio.timeout(READ_TIMEOUT_S):
            return await request.json()
    except TimeoutError:
        raise RefusedRequestError(f"the body of the request took longer than {READ_TIMEOUT_S:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise RefusedRequestError(f"the body of the request has more than {MAX_BODY_BYTES} bytes") from None
    except (ValueError, RecursionError):
        raise RefusedRequestError("the body of the request is no JSON") from None


def _error(status: int, sentence: str) -> web.Response:
    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}
    return web.json_response({"error": error}, status=status)


def _warn(ignored: tuple[str, ...]) -> None:
    new = [name for name in ignored if name not in _warned]
    if new:
        _warned.update(new)
        logger.warning(
            "the agent's requests set %s, which has no effect: the model samples with the settings of the run",
            ", ".join(new),
        )
