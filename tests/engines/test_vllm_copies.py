"""All workers of an engine connect at once and copy every bucket; their processes run the real worker code."""

import multiprocessing
import os
import signal
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hybrid_rl.engines.vllm.copies import BucketCopies
from hybrid_rl.engines.vllm.processes import EngineProcesses
from hybrid_rl.engines.vllm.watch import EngineWatch
from hybrid_rl.errors import EngineLostError
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, joint_handle, plan_buckets

FORK = multiprocessing.get_context("fork")
CPU = torch.device("cpu")


class Model(nn.Module):
    """A model with two weights that loads them by name, like vLLM's models."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.zeros(8), requires_grad=False)
        self.b = nn.Parameter(torch.zeros(4), requires_grad=False)

    def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            self.get_parameter(name).copy_(tensor)


def serve(rank: int, calls: Connection) -> None:
    """Run the methods of a worker that arrive, in place of vLLM's loop, and send the sum of its weights at last."""
    from hybrid_rl.engines.vllm.worker import WorkerExtension

    torch.set_num_threads(1)
    worker = WorkerExtension()
    worker.device, worker.rank, worker.model_runner = CPU, rank, SimpleNamespace(model=Model())
    while True:
        method, arguments = calls.recv()
        if method == "sum":
            calls.send(sum(float(p.sum()) for p in worker.model_runner.model.parameters()))
            continue
        try:
            calls.send(getattr(worker, method)(*arguments))
        except Exception as error:
            calls.send(error)


class Workers:
    """Worker processes, and vLLM's collective_rpc to them."""

    def __init__(self, num_workers: int) -> None:
        import hybrid_rl.engines.vllm.worker  # noqa: F401  # imported once, before the processes are forked

        self.processes = EngineProcesses()
        pipes = [FORK.Pipe() for _ in range(num_workers)]
        self.all = [
            FORK.Process(target=serve, args=(i, theirs), name=f"EngineCore{i}") for i, (_, theirs) in enumerate(pipes)
        ]
        for worker in self.all:
            worker.start()
        self.pipes = [ours for ours, _ in pipes]
        assert len(self.processes.cores) == num_workers

    def call(self, method: str, *arguments: Any) -> list[Any]:
        for pipe in self.pipes:
            pipe.send((method, arguments))
        results = [pipe.recv() for pipe in self.pipes]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results


@pytest.fixture
def make_workers() -> Iterator[Any]:
    """Return a function that starts workers."""
    made = []

    def make(num_workers: int) -> Workers:
        made.append(Workers(num_workers))
        return made[-1]

    yield make
    for workers in made:
        workers.processes.end(0.0)
        workers.processes.close()


def open_copies(workers: Workers, folder: Path, *, stall_timeout_s: float) -> tuple[BucketCopies, list[IpcBucket]]:
    """Let the workers open a bucket each, all in one."""
    num_workers = len(workers.all)
    watch = EngineWatch(workers.processes, stall_timeout_s=stall_timeout_s)
    copies = BucketCopies(workers.call, watch, num_workers=num_workers, folder=folder)
    plan = plan_buckets([("a", (8,), torch.float32), ("b", (4,), torch.float32)], 32)
    assert len(plan) == 2
    buckets = [IpcBucket(bucket_bytes(plan), CPU) for _ in range(num_workers)]
    copies.open(joint_handle({f"cpu {i}": bucket.handle() for i, bucket in enumerate(buckets)}), plan)
    return copies, buckets


def fill(buckets: list[IpcBucket], value: float) -> None:
    for bucket in buckets:
        bucket.tensor.view(torch.float32).fill_(value)


@pytest.mark.parametrize("num_workers", [1, 4, 8])
def test_all_workers_connect_and_copy_every_bucket(make_workers, tmp_path, num_workers):
    workers = make_workers(num_workers)
    copies, buckets = open_copies(workers, tmp_path, stall_timeout_s=60.0)
    for step in (1.0, 2.0):
        fill(buckets, step)
        copies.start(0)
        copies.start(1)  # bucket 0 is copied when this returns
        copies.wait()
        assert workers.call("sum") == [12 * step] * num_workers
    copies.close()
    assert list(tmp_path.iterdir()) == []  # the socket is removed


@pytest.mark.parametrize("is_stopped", [False, True], ids=["killed", "stopped"])
def test_a_worker_that_is_lost_in_a_copy_ends_the_wait(make_workers, tmp_path, is_stopped):
    workers = make_workers(4)
    copies, buckets = open_copies(workers, tmp_path, stall_timeout_s=1.0)
    fill(buckets, 1.0)
    copies.start(0)
    lost = workers.all[2]
    os.kill(lost.pid, signal.SIGSTOP if is_stopped else signal.SIGKILL)
    words = "is stopped" if is_stopped else "was killed by SIGKILL"
    with pytest.raises(EngineLostError, match=rf"process {lost.pid} .*{words}.*; the trainer waits for it to "):
        for index in (1, 0, 1, 0):
            copies.start(index)
        copies.wait()
    copies.close()


def test_an_error_of_a_copy_is_raised_by_the_wait(make_workers, tmp_path):
    workers = make_workers(1)
    copies, _ = open_copies(workers, tmp_path, stall_timeout_s=60.0)
    copies.start(7)
    with pytest.raises(IndexError):  # the plan has two buckets
        copies.wait()
    copies.close()


def test_workers_end_a_copy_without_an_error_when_the_trainer_closes_its_pipes(make_workers, tmp_path):
    workers = make_workers(2)
    copies, _ = open_copies(workers, tmp_path, stall_timeout_s=60.0)
    copies.start(0)
    copies.close()
    copies.wait()  # raises what a worker has raised
