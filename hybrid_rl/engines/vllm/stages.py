"""The stages of an engine's start, which a worker writes to a file in the engine's folder for the trainer to read."""

import functools
import json
import os
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from hybrid_rl.engines import ReportStage
from hybrid_rl.engines.vllm.lifetime import FOLDER

FILE = "stages"
WORKERS = {"vllm.v1.worker.gpu_worker": "Worker", "vllm.v1.worker.cpu_worker": "CPUWorker"}
"""Module -> its class of worker."""
METHODS = {
    "init_device": "device",
    "load_model": "model",
    "determine_available_memory": "memory profile",
    "initialize_from_config": "KV cache",
    "compile_or_warm_up_model": "warm-up",
}
"""Method of a worker that vLLM calls at the start, in this order -> name of the stage."""
INNER = {
    ("vllm.compilation.backends", "VllmBackend", "__call__"): "compile",
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "capture_model"): "CUDA graphs",
}
"""Module, class and method that a stage may call -> name of the stage."""

_open: list[str] = []
"""Stages of this process that go on, the outer one first."""


def record_stages() -> None:
    """Let the worker of this process write the stages of its start. Called once its class is imported."""
    for module, name in WORKERS.items():
        worker = getattr(sys.modules.get(module), name, None)
        for method, stage in METHODS.items():
            if worker is not None and method in vars(worker):
                setattr(worker, method, _recorded(vars(worker)[method], stage, is_writer=_is_first))


def _record_inner() -> None:
    """Record the methods of INNER whose modules are imported by now."""
    for (module, name, method), stage in INNER.items():
        owner = getattr(sys.modules.get(module), name, None)
        function = getattr(owner, method, None)
        if function is not None and not hasattr(function, "__wrapped__"):
            setattr(owner, method, _recorded(function, stage, is_writer=lambda _: bool(_open)))


def _is_first(worker: Any) -> bool:
    """Return whether a worker is the one of several that writes."""
    return getattr(worker, "rank", 0) == 0


def _recorded(function: Callable[..., Any], stage: str, *, is_writer: Callable[[Any], bool]) -> Callable[..., Any]:
    """Return a method that writes its beginning and its end, unless a method of the same stage has called it."""

    @functools.wraps(function)
    def recorded(owner: Any, *args: Any, **kwargs: Any) -> Any:
        if stage in _open or FOLDER not in os.environ or not is_writer(owner):
            return function(owner, *args, **kwargs)
        _record_inner()
        name, start_ns = ": ".join([*_open, stage]), time.monotonic_ns()
        _write(name, start_ns, None)
        _open.append(stage)
        try:
            return function(owner, *args, **kwargs)
        finally:
            _open.pop()
            _write(name, start_ns, time.monotonic_ns())

    return recorded


def _write(name: str, start_ns: int, end_ns: int | None) -> None:
    line = json.dumps([name, start_ns, end_ns]) + "\n"
    with suppress(OSError), open(Path(os.environ[FOLDER], FILE), "a") as file:  # an engine starts without it, too
        file.write(line)


class StartStages:
    """Reports the stages of an engine's start in the trainer, which starts at this moment."""

    def __init__(self, folder: Path, report: ReportStage) -> None:
        """Begin with the import of vLLM.

        Args:
            folder: of the engine.
            report: receives each stage.
        """
        self._path, self._report = folder / FILE, report
        self._num_read = 0
        self._name, self._start_ns = "", 0
        self._begin("import of vLLM")

    def launch(self) -> None:
        """Begin the launch of the processes, which ends with the first stage of a worker."""
        self._finish(time.monotonic_ns())
        self._begin("processes")

    def look(self) -> None:
        """Report the stages that workers have written in the meantime."""
        lines = self._path.read_text().split("\n")[:-1] if self._path.exists() else []
        for line in lines[self._num_read :]:
            name, start_ns, end_ns = json.loads(line)
            self._finish(start_ns)
            self._report(name, start_ns, end_ns)
        self._num_read = len(lines)

    def end(self) -> None:
        """Report what is left when the engine has started or has failed."""
        self.look()
        self._finish(time.monotonic_ns())

    def _begin(self, name: str) -> None:
        self._name, self._start_ns = name, time.monotonic_ns()
        self._report(name, self._start_ns, None)

    def _finish(self, end_ns: int) -> None:
        """Report the end of the trainer's own stage, if one goes on."""
        if self._name:
            self._report(self._name, self._start_ns, end_ns)
            self._name = ""
