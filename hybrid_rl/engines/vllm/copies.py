"""The trainer's side of weight sync by copy: it tells the engine's workers which bucket to copy next."""

import pickle
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection, Listener
from typing import Any

from hybrid_rl.engines.vllm.environment import socket_folder
from hybrid_rl.weights.bucket import Slot


class BucketCopies:
    """Messages to the engine's workers, which copy buckets in one call of vLLM's collective_rpc per weight sync.

    A message of vLLM takes as long as the copy of a gigabyte, one through a pipe a tenth of that. So each worker reads
    the numbers of the buckets from a pipe, while a thread waits for the one message of vLLM to be answered.
    """

    def __init__(self, llm: Any) -> None:
        """Take a vllm.LLM whose workers have WorkerExtension."""
        self._llm = llm
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._running: Future[Any] | None = None
        self._pipes: list[Connection] = []

    def open(self, handle: bytes, plan: Sequence[Sequence[Slot]]) -> None:
        """Let every worker map the bucket and connect to a pipe."""
        self.wait()
        with (
            tempfile.TemporaryDirectory(dir=socket_folder()) as path,
            Listener(f"{path}/copies", "AF_UNIX") as listener,
        ):
            message = pickle.dumps((handle, plan, listener.address))
            workers = self._llm.collective_rpc("hybrid_open_bucket", args=(message,))
            self._pipes = [listener.accept() for _ in workers]

    def start(self, index: int) -> None:
        """Start to copy bucket `index` of the plan, and wait until the bucket before it is copied."""
        before = self._running
        self._running = before or self._thread.submit(self._llm.collective_rpc, "hybrid_load_buckets")
        for pipe in self._pipes:
            pipe.send_bytes(index.to_bytes(4, "little"))
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
            for pipe in self._pipes:
                pipe.send_bytes(b"")
            running.result()

    def close(self) -> None:
        """End the thread; the copies must have ended."""
        self._thread.shutdown()

    def _await_answers(self, running: Future[Any]) -> None:
        """Wait until every worker has answered for one more bucket."""
        for pipe in self._pipes:
            try:
                pipe.recv_bytes()
            except EOFError:  # the worker has ended; vLLM's error names the reason
                running.result()
                raise
