"""The stages of an engine's start, from a worker's methods through the file to the trainer."""

import sys
import time
import types

import pytest

from hybrid_rl.engines.vllm import stages
from hybrid_rl.engines.vllm.lifetime import FOLDER


class Compiler:
    def __call__(self) -> str:
        return "compiled"


class Worker:
    """Stands for vLLM's worker of a GPU: it has the methods that vLLM calls at the start."""

    def __init__(self, rank: int = 0) -> None:
        self.rank = rank

    def init_device(self) -> None:
        pass

    def load_model(self) -> str:
        return "loaded"

    def determine_available_memory(self) -> str:
        return Compiler()()


class CPUWorker(Worker):
    def init_device(self) -> None:
        super().init_device()


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Return the messages that the trainer gets, and the reader of the file in tmp_path."""
    modules = {
        "vllm.v1.worker.gpu_worker": {"Worker": type("Worker", (), dict(vars(Worker)))},
        "vllm.compilation.backends": {"VllmBackend": Compiler},
    }
    base = modules["vllm.v1.worker.gpu_worker"]["Worker"]

    class Own(base):  # type: ignore[misc, valid-type]
        def init_device(self) -> None:
            base.init_device(self)

    modules["vllm.v1.worker.cpu_worker"] = {"CPUWorker": Own}
    for name, content in modules.items():
        module = types.ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Compiler, "__call__", Compiler.__call__)  # restored after the test
    monkeypatch.setenv(FOLDER, str(tmp_path))
    stages.record_stages()
    told: list[tuple[str, int, int | None]] = []
    return told, stages.StartStages(tmp_path, lambda *stage: told.append(stage)), Own


def test_stages_reach_the_trainer_when_they_begin_and_when_they_end(start):
    told, reader, worker_class = start
    reader.launch()
    worker = worker_class()
    worker.init_device()
    assert worker.load_model() == "loaded"
    reader.look()
    assert worker.determine_available_memory() == "compiled"
    reader.end()
    assert [(name, end is not None) for name, _, end in told] == [
        ("import of vLLM", False),
        ("import of vLLM", True),
        ("processes", False),
        ("processes", True),
        ("device", False),  # once, although the method of the class calls the one of its base
        ("device", True),
        ("model", False),
        ("model", True),
        ("memory profile", False),
        ("memory profile: compile", False),
        ("memory profile: compile", True),
        ("memory profile", True),
    ]
    ends = {name: (begin, end) for name, begin, end in told if end is not None}
    assert ends["processes"][1] == ends["device"][0]  # the launch ends where the first stage of the worker begins
    outer, inner = ends["memory profile"], ends["memory profile: compile"]
    assert outer[0] <= inner[0] <= inner[1] <= outer[1] <= time.monotonic_ns()


def test_one_of_several_workers_writes(start, tmp_path):
    _, _, worker_class = start
    worker_class(rank=1).load_model()
    assert not (tmp_path / stages.FILE).exists()


def test_a_worker_outside_of_an_engine_of_ours_writes_nothing(start, tmp_path, monkeypatch):
    monkeypatch.delenv(FOLDER)
    assert start[2]().load_model() == "loaded"
    assert not (tmp_path / stages.FILE).exists()
