"""Install flash-attn beside the locked packages: `make install FLASH=1`.

flash-attn is published as source. Its build takes a ready wheel where its authors offer one for this torch, CUDA and
Python; otherwise it compiles, which needs a CUDA toolkit, a C++ compiler and much memory, and takes up to an hour.
"""

import importlib.metadata
import os
import shutil
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
LOCK = FOLDER / "flash.txt"
BYTES_PER_JOB = 8 << 30
"""Host memory that one compiler of flash-attn's kernels may take."""
OTHERWISE = "models.attention: auto takes torch's own kernels instead"


def obstacle(torch_cuda: str | None, *, has_gpu: bool) -> str | None:
    """Return why flash-attn cannot run in this environment; None if it may.

    Args:
        torch_cuda: version of CUDA that torch is built for; None for its CPU build.
        has_gpu: whether torch sees an NVIDIA GPU.
    """
    if torch_cuda is None:
        return f"flash-attn needs an NVIDIA GPU, and the torch of this environment is the CPU build; {OTHERWISE}"
    if not has_gpu:
        return f"flash-attn needs an NVIDIA GPU, and torch sees none; {OTHERWISE}"
    return None


def why_not_built(name: str, torch: str, torch_cuda: str, missing: list[str]) -> str:
    """Return the sentence for a build that has failed, whose output stands above it.

    Args:
        name: flash-attn and its version.
        torch: version of torch.
        torch_cuda: version of CUDA that torch is built for.
        missing: tools for compiling that cannot be found.
    """
    python = ".".join(map(str, sys.version_info[:2]))
    without = f"; {' and '.join(missing)} cannot be found" if missing else ", as its output above says"
    return (
        f"{name}: no wheel could be fetched for torch {torch}, CUDA {torch_cuda} and Python {python}, and it could not "
        f"be compiled{without}; install a CUDA toolkit {torch_cuda} and g++ for it; {OTHERWISE}"
    )


def missing_tools() -> list[str]:
    """Return the tools for compiling CUDA code that cannot be found."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    nvcc = str(Path(home) / "bin" / "nvcc") if home else "nvcc"
    return [tool for tool in (nvcc, os.environ.get("CXX", "g++")) if not shutil.which(tool)]


def max_jobs() -> int:
    """Return the number of compilers that this machine has cores and memory for."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return max(1, min(len(os.sched_getaffinity(0)), memory // BYTES_PER_JOB))


def main() -> None:
    """Install flash-attn, or say why not.

    Raises:
        SystemExit: with code 1, after one sentence on stderr.
    """
    import torch

    if reason := obstacle(torch.version.cuda, has_gpu=torch.cuda.is_available()):
        sys.exit(f"error: FLASH=1: {reason}")
    name = next(line for line in LOCK.read_text().splitlines() if line.startswith("flash-attn==")).split()[0]
    print(f"installing {name}: where no wheel can be fetched it is compiled, which may take an hour", flush=True)
    install = ["pip", "install", "--no-deps", "--no-build-isolation", "--require-hashes", "-r", str(LOCK)]
    environment = {"MAX_JOBS": str(max_jobs()), **os.environ}
    if subprocess.run([sys.executable, str(FOLDER / "uv.py"), *install], env=environment).returncode:
        sys.exit(f"error: FLASH=1: {why_not_built(name, torch.__version__, str(torch.version.cuda), missing_tools())}")
    if subprocess.run([sys.executable, "-c", "import flash_attn"]).returncode:
        sys.exit(
            f"error: FLASH=1: {name} is installed, but cannot be imported; uninstall it, or compile it for this torch"
        )
    print(f"flash-attn {importlib.metadata.version('flash-attn')}: models.attention: auto takes it from here on")


if __name__ == "__main__":
    main()
