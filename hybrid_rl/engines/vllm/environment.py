"""The environment variables that an engine's processes inherit."""

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from hybrid_rl.engines.vllm.lifetime import FOLDER, REPORT, TRAINER_PID
from hybrid_rl.machine.allocator import ALLOCATOR_VARIABLES
from hybrid_rl.memory.device import without_expandable_segments

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_DEFAULTS = {
    "VLLM_LOGGING_LEVEL": "ERROR",  # the warnings of a start ask nothing of the user
    "PYTHONWARNINGS": "ignore::FutureWarning",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    # vLLM's own limit leaves out the factor of YaRN where config.json names the original positions; check_models
    # compares the longest sequence with the positions of the rotary embedding.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    # Latent attention (MLA) computes with matrices that vLLM derives from the weights once, after loading. A weight
    # sync would not reach them. Without it DeepSeek's keys and values are computed from the weights at each use.
    "VLLM_MLA_DISABLE": "1",
}
# With torch.compile, the first generation waits for a C++ compiler, which speeds up one counting function only.
_CPU_DEFAULTS = {
    "TORCH_COMPILE_DISABLE": "1",
    "TORCH_CPP_LOG_LEVEL": "ERROR",  # vLLM warns that it binds memory to the NUMA node of its cores
}


def group_environment(gpus: Sequence[str], *, has_cuda: bool) -> dict[str, str]:
    """Return the variables that an engine over several GPUs needs; none for an engine on one GPU.

    Args:
        gpus: names of the engine's GPUs in CUDA_VISIBLE_DEVICES, of which the calling rank may see only its own.
    """
    if not gpus:
        return {}
    # On a CPU vLLM would bind each worker to its own memory node, and fail where all workers have the same one.
    return {"CUDA_VISIBLE_DEVICES": ",".join(gpus)} if has_cuda else {"VLLM_CPU_OMP_THREADS_BIND": "nobind"}


@contextmanager
def engine_environment(gpus: Sequence[str] = (), *, folder: Path | None = None, report: str = "") -> Iterator[None]:
    """Set the variables that an engine process inherits while the body starts it; restore all variables afterwards.

    Args:
        gpus: see group_environment.
        folder: temporary folder of the engine's processes; None for the trainer's.
        report: file for the exit codes of workers, see EngineProcesses.report_path.
    """
    before, folder_before = dict(os.environ), tempfile.tempdir
    try:
        # The ranks of the trainer are not those of the engine. With torch's agent named as the owner of the store, the
        # engine would wait for a store at a port that nobody serves.
        for name in [name for name in os.environ if name in _RANK_VARIABLES or name.startswith("TORCHELASTIC_")]:
            del os.environ[name]
        for name in ALLOCATOR_VARIABLES:  # vLLM's sleep mode does not work with expandable segments
            if name in os.environ:
                os.environ[name] = without_expandable_segments(os.environ[name])
        os.environ[TRAINER_PID] = str(os.getpid())
        for name, value in (_DEFAULTS if torch.cuda.is_available() else _DEFAULTS | _CPU_DEFAULTS).items():
            os.environ.setdefault(name, value)
        os.environ.update(group_environment(gpus, has_cuda=torch.cuda.is_available()))
        if folder:
            os.environ.update(_folder_environment(folder, report))
            tempfile.tempdir = str(folder)  # a process that is forked does not read TMPDIR again
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
        tempfile.tempdir = folder_before


def _folder_environment(folder: Path, report: str) -> dict[str, str]:
    """Return the variables by which all files of an engine's processes lie in its folder, except compiled kernels."""
    kernels = os.environ.get("TORCHINDUCTOR_CACHE_DIR", f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}")
    return {
        "TMPDIR": str(folder),
        "VLLM_RPC_BASE_PATH": str(folder),
        "TORCHINDUCTOR_CACHE_DIR": kernels,
        FOLDER: str(folder),
        REPORT: report,
    }
