"""The trainer's side of weight sync by copy: it tells the engine's workers which bucket to copy next."""

import pickle
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

from hybrid_rl.engines.vllm.watch import Call, EngineWatch
from hybrid_rl.weights.bucket import Slot


class BucketCopies:
    """Messages to the engine's workers, which copy buckets in one call of vLLM's collective_rpc per weight sync.

    A message of vLLM takes as long as the copy of a gigabyte, one through a pipe a tenth of that. So each worker reads
    the numbers of the buckets from a pipe, while a thread waits for the one message of vLLM to be answered.
    """

    def __init__(
        self, call_workers: Callable[..., list[Any]], watch: EngineWatch, *, num_workers: int, folder: Path
    ) -> None:
        """Take what reaches the workers.

        Args:
            call_workers: calls a method of WorkerExtension in every worker.
            folder: place for the socket to which the workers connect.
        """
        self._call_workers = call_workers
        self._watch = watch
        self._num_workers = num_workers
        self._folder = folder
        self._running: Call[Any] | None = None
        self._pipes: list[Connection] = []

    def open(self, handle: bytes, plan: Sequence[Sequence[Slot]]) -> None:
        """Let every worker map the bucket and connect to a pipe."""
        self.wait()
        self.close()
        # All workers may connect before the first connection is accepted.
        with Listener(str(self._folder / "copies"), "AF_UNIX", backlog=self._num_workers) as listener:
            message = pickle.dumps((handle, plan, listener.address))
            self._watch.call(lambda: self._call_workers("hybrid_open_bucket", message), "map the bucket")
            self._pipes = [listener.accept() for _ in range(self._num_workers)]

    def start(self, index: int) -> None:
        """Start to copy bucket `index` of the plan, and wait until the bucket before it is copied."""
        before = self._running
        self._running = before or self._watch.start(
            lambda: self._call_workers("hybrid_load_buckets"), "copy the weights"
        )
        self._send(self._running, index.to_bytes(4, "little"))
        if before:
            self._await_answers(before)

    def wait(self) -> None:
        """Wait until the last bucket is copied.

        Raises:
            Exception: the first error of any copy.
        """
        running, self._running = self._running, None
        if running:
            self._await_answers(running)
            self._send(running, b"")
            self._watch.wait(running.has_ended, "finish its copy of the weights")
            self._watch.result(running, "finish its copy of the weights")

    def close(self) -> None:
        """Close the pipes, upon which a worker in the middle of a weight sync ends it."""
        for pipe in self._pipes:
            pipe.close()
        self._pipes = []

    def _send(self, running: Call[Any], message: bytes) -> None:
        try:
            for pipe in self._pipes:
                pipe.send_bytes(message)
        except OSError:
            self._raise_error_of(running)
            raise

    def _await_answers(self, running: Call[Any]) -> None:
        """Wait until every worker has answered for one more bucket."""
        for pipe in self._pipes:
            self._watch.wait(partial(_is_answered, pipe, running), "copy a bucket")
            try:
                if not pipe.poll():
                    raise EOFError("vLLM's call has ended without an answer to the pipe")
                pipe.recv_bytes()
            except (EOFError, OSError):
                self._raise_error_of(running)
                raise

    def _raise_error_of(self, running: Call[Any]) -> None:
        """Raise why a worker has closed its pipe: it has ended, or vLLM's call has failed."""
        self._watch.wait(running.has_ended, "copy a bucket")
        self._watch.result(running, "copy a bucket")


def _is_answered(pipe: Connection, running: Call[Any], timeout_s: float) -> bool:
    """Return whether a worker has answered or closed its pipe, or the call has ended, within timeout_s."""
    return pipe.poll(timeout_s) or running.has_ended(0.0)
