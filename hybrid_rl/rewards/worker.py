"""The program of a worker process of `pool.py`: it receives tasks and sends one result per function and response.

A task is some functions and some responses. The pool's messages are those of hybrid_rl.serialization. A message to the
pool is JSON, so that the pool runs no code of the user by reading it. While the functions load it is an object:
`{"process_id": number}` at first, `{"loading": name}` before each function, then `{"errors": [message]}`, or
`{"functions": [what the pool knows of each]}` when all of them are loaded. Afterwards a number or an
object is a result, see `returned.pack`, and a string the reason for a failure.

The pool kills this process at its limits, and the process's supervisor kills it when the pool's process ends.
"""

import contextlib
import json
import os
import socket
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.rewards.calling import Caller
from hybrid_rl.rewards.loading import RuleFunction, load_functions
from hybrid_rl.rewards.messages import receive_message, send_message
from hybrid_rl.rewards.returned import pack
from hybrid_rl.rewards.signatures import Sample
from hybrid_rl.rewards.supervisor import run_worker
from hybrid_rl.serialization import decode


def serve(connection: socket.socket) -> None:
    """Score the responses that arrive, until an empty message arrives or the other end of the connection closes."""
    _send(connection, {"process_id": os.getpid()})
    settings = decode(receive_message(connection))
    functions = _load(connection, settings)
    if functions is None:
        return
    _send(connection, {"functions": [vars(function.described()) for function in functions]})

    process_id = os.getpid()
    with contextlib.closing(Caller(answer_column=settings["answer_column"])) as caller:
        while message := receive_message(connection):
            for number in decode(message)[0]:
                # Decoded for each function, so that none sees what another one has changed in the prompt.
                results = caller.score(functions[number], _samples(*decode(message)[1:]))
                if os.getpid() != process_id:
                    os._exit(0)  # a process that the function has forked, and which returned like the function
                for result in results:
                    _send(connection, result if isinstance(result, str) else pack(result))


def _samples(prompts: Sequence[dict[str, Any]], rows: Sequence[tuple[int, str, list[int]]]) -> list[Sample]:
    """Return the responses of a task.

    Args:
        prompts: fields of each prompt.
        rows: for each response the number of its prompt, its text and its tokens.
    """
    objects = [SimpleNamespace(**fields) for fields in prompts]
    return [Sample(prompt=objects[number], response=text, response_ids=ids) for number, text, ids in rows]


def _load(connection: socket.socket, settings: Mapping[str, Any]) -> list[RuleFunction] | None:
    """Return the functions; None if some cannot be used, which the pool has then been sent."""
    try:
        return load_functions(
            settings["names"],
            field=settings["field"],
            report=lambda name: _send(connection, {"loading": name}),
            given=settings["given"],
        )
    except ConfigError as error:
        _send(connection, {"errors": error.messages})
        return None


def _send(connection: socket.socket, message: dict[str, Any] | float | str) -> None:
    send_message(connection, json.dumps(message).encode())


if __name__ == "__main__":
    run_worker(serve)
