"""Checks of the GPUs of this machine: PyTorch's build, compute capability, and what the settings ask of them."""

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from hybrid_rl.config import Config, ConfigError, ModelsConfig, check
from hybrid_rl.machine.visible_devices import VARIABLE, check_names, visible_names

T = TypeVar("T")
HALF_CAPABILITY = (8, 0)
"""Compute capability from which GPUs compute in bfloat16, and flash-attn runs."""


def driver_uuids() -> list[str] | None:
    """Return the UUIDs of all GPUs of this machine in the driver's order; None if the driver does not list any.

    CUDA is not initialised, so CUDA_VISIBLE_DEVICES can still be changed.
    """
    return _ask_driver(lambda pynvml, handle: pynvml.nvmlDeviceGetUUID(handle)) or None


def driver_names() -> list[tuple[str, int]]:
    """Return name and bytes of memory of all GPUs of this machine; none if the driver does not list any."""
    return _ask_driver(
        lambda pynvml, handle: (pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    )


def _ask_driver(question: Callable[[Any, Any], T]) -> list[T]:
    """Return the driver's answer for each GPU, without initialising CUDA; none if there is no driver."""
    try:
        import pynvml  # absent where no GPU was there to install it for
    except ImportError:
        return []
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return []
    try:
        handles = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
        return [question(pynvml, handle) for handle in handles]
    finally:
        pynvml.nvmlShutdown()


def has_gpu(devices: Path = Path("/dev")) -> bool:
    """Return whether this machine, or this container, has been given a GPU of NVIDIA.

    Args:
        devices: folder of the device files. A container without GPUs has none, although it shows the host's driver.
    """
    return any(devices.glob("nvidia[0-9]*"))


def is_readable(environment: Mapping[str, str]) -> bool:
    """Return whether CUDA sees a GPU for every name in CUDA_VISIBLE_DEVICES; see check_names."""
    try:
        check_names(environment, driver_uuids())
    except ConfigError:
        return False
    return True


def check_torch_build() -> None:
    """Check that PyTorch can use the GPUs of this machine, unless CUDA_VISIBLE_DEVICES hides them or is wrong itself.

    Raises:
        ConfigError: PyTorch is a CPU build, or its CUDA does not start; the run would train on the CPU.
    """
    if not has_gpu() or visible_names(os.environ) == [] or not is_readable(os.environ):
        return
    remedy = f'or set {VARIABLE}="" to train on the CPU'
    check(
        torch.version.cuda is not None,
        f"torch {torch.__version__} is a build for CPUs, but this machine has NVIDIA GPUs: install "
        f"requirements/gpu.txt, {remedy}",
    )
    if torch.cuda.is_available():
        return
    try:
        torch.cuda.init()
        reason = "it finds no GPU"
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
    check(False, f"torch {torch.__version__} cannot use the GPUs of this machine ({reason}): correct it, {remedy}")


def check_gpu(device: torch.device, models: ModelsConfig) -> None:
    """Check that a GPU can run PyTorch's kernels and what the settings ask for; see check_capability."""
    properties = torch.cuda.get_device_properties(device)
    capability = (properties.major, properties.minor)
    check_capability(properties.name, capability, models, torch.cuda.get_arch_list())


def check_capability(
    name: str, capability: tuple[int, int], models: ModelsConfig, architectures: Sequence[str]
) -> None:
    """Check that a compute capability suffices for PyTorch's kernels and what the settings ask for.

    Args:
        name: name of the GPU, for messages.
        capability: its compute capability, major and minor.
        models: settings of the models.
        architectures: what PyTorch is built for, such as sm_90 and compute_90; none if it is not known.

    Raises:
        ConfigError: the GPU is older or newer than the build, or lacks bfloat16 or what flash-attn needs.
    """
    where = f"{name} with compute capability {capability[0]}.{capability[1]}"
    check(
        not architectures or any(runs_on(built, capability) for built in architectures),
        f"{where}: torch {torch.__version__} has no kernels for it, only for {', '.join(architectures)}; install a "
        f"build for it, or leave the GPU out of {VARIABLE}",
    )
    if capability >= HALF_CAPABILITY:
        return
    check(
        models.dtype == "float32",
        f"models.dtype = {models.dtype}: bfloat16 needs compute capability 8.0, and this is a {where}; set float32",
    )
    is_flash = models.attention == "flash_attention_2"
    is_chosen = models.attention == "auto" and importlib.util.find_spec("flash_attn") is not None
    check(
        not is_flash and not is_chosen,
        f"models.attention = {models.attention}: flash-attn needs compute capability 8.0, and this is a {where}; "
        "set sdpa",
    )


def check_engine_memory(config: Config, device: torch.device, available_bytes: int, *, aliased_bytes: int) -> None:
    """Check that the GPU leaves vLLM what it requires when it starts; see check_fraction.

    Args:
        available_bytes: memory of the GPU that no other process holds.
        aliased_bytes: weights of the trainer that are there before vLLM starts, because its parameters are views of
            them.
    """
    if config.rollout.engine == "vllm":
        total = torch.cuda.get_device_properties(device).total_memory
        fraction = config.rollout.gpu_memory_utilization
        check_fraction(fraction, total_bytes=total, available_bytes=available_bytes, aliased_bytes=aliased_bytes)


def check_fraction(fraction: float, *, total_bytes: int, available_bytes: int, aliased_bytes: int) -> None:
    """Check that a fraction of a GPU's memory is free, and more than the weights that vLLM finds there.

    Raises:
        ConfigError: it is not; vLLM would refuse to start.
    """
    field = f"rollout.gpu_memory_utilization = {fraction}"
    wanted = int(fraction * total_bytes)
    check(
        wanted <= available_bytes,
        f"{field}: vLLM requires {wanted:,} bytes of the GPU, but other processes leave {available_bytes:,}; end them, "
        f"or set at most {int(100 * available_bytes / total_bytes) / 100}",
    )
    check(
        wanted > aliased_bytes,
        f"{field}: vLLM starts beside the actor's weights, which take {aliased_bytes:,} of the {wanted:,} bytes; set "
        f"more than {aliased_bytes / total_bytes:.2f}, or sync.mode: copy",
    )


def runs_on(built: str, capability: tuple[int, int]) -> bool:
    """Return whether code that is built for an architecture, such as sm_86 or compute_90, runs on a capability.

    Machine code (sm) runs on later minor versions of its major version, PTX (compute) on all later ones. The suffix a
    binds code to its own version, and f to later minor versions of its major version.
    """
    found = re.fullmatch(r"(sm|compute)_(\d+)(\d)([af]?)", built)
    if not found:
        return False
    own = (int(found[2]), int(found[3]))
    if found[4] == "a":
        return own == capability
    return own <= capability and ((found[1] == "compute" and not found[4]) or own[0] == capability[0])
