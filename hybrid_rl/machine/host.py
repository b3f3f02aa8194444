"""Checks of the node besides its GPUs: memory, shared memory, open files."""

import os
import resource
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

from hybrid_rl.config import check

GIB = 1 << 30
MIN_OPEN_FILES = 512
"""Files that a rank with its engine and scorers may have open at once, rounded up generously."""
NCCL_BYTES = 32 << 20
"""Shared memory of a rank's connections where NCCL cannot use NVLink or PCIe directly; Docker's default of 64 MiB is
too little for more than two ranks."""
SHARED_MEMORY = Path("/dev/shm")
UNLIMITED_BYTES = 1 << 60
"""A cgroup limit from this size on means that there is none."""


def available_memory(proc: Path = Path("/proc"), cgroups: Path = Path("/sys/fs/cgroup")) -> tuple[int, str]:
    """Return the bytes of host memory that a new process may take, and what limits them.

    Args:
        proc: folder with `meminfo` and `self/cgroup`.
        cgroups: folder of the cgroup hierarchies, version 1 or 2.
    """
    fields = dict(line.split(":") for line in (proc / "meminfo").read_text().splitlines())
    available, limit = int(fields["MemAvailable"].split()[0]) * 1024, "MemAvailable"
    for folder, group in _memory_groups(proc, cgroups):
        free = _free_in_group(folder)
        if free < available:
            available, limit = free, f"the memory limit of cgroup {group}"
    return available, limit


def _memory_groups(proc: Path, cgroups: Path) -> list[tuple[Path, str]]:
    """Return the folders and names of the memory cgroups of this process, from its own up to the root."""
    found = []
    for line in (proc / "self" / "cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        root = cgroups / "memory" if controllers else cgroups
        names = [Path(path), *Path(path).parents]
        found += [(root / str(name).lstrip("/"), str(name)) for name in names]
    return [(folder, name) for folder, name in found if folder.is_dir()]


def _free_in_group(folder: Path) -> int:
    """Return the bytes below the limit of a cgroup; its file cache counts as free, because the kernel drops it."""
    for limit_name, used_name, cache_name in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        limit, used = folder / limit_name, folder / used_name
        if not limit.exists() or not used.exists():
            continue
        text = limit.read_text().strip()
        if text == "max" or int(text) >= UNLIMITED_BYTES:
            continue
        rows = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return max(0, int(text) - int(used.read_text()) + int(rows.get(cache_name, 0)))
    return UNLIMITED_BYTES


def check_memory(needs: Mapping[str, int]) -> None:
    """Check that the host memory of this node has room for a run.

    Args:
        needs: use -> bytes, which are needed at the same time.

    Raises:
        ConfigError: it has not; the message lists the uses.
    """
    available, limit = available_memory()
    needed = sum(needs.values())
    uses = ", ".join(f"{size / GIB:.1f} GiB for {use}" for use, size in needs.items() if size)
    check(
        needed <= available,
        f"the run needs {needed / GIB:.1f} GiB of host memory on this node ({uses}), but {limit} leaves "
        f"{available / GIB:.1f} GiB: end other processes, give the job more memory, or use smaller models",
    )


def check_buckets(bucket_bytes: int, *, num_ranks: int) -> None:
    """Check that the mapped files through which weights pass on a CPU have room.

    Args:
        bucket_bytes: size of a rank's file, which lies in /dev/shm or, if that is too small, in the temporary folder.
        num_ranks: ranks of this node.

    Raises:
        ConfigError: the folder that a rank would take is too small for all ranks.
    """
    folders = [f for f in (SHARED_MEMORY, Path(tempfile.gettempdir())) if os.access(f, os.W_OK)]
    free = {folder: shutil.disk_usage(folder).free for folder in folders}
    taken = [folder for folder in folders if free[folder] > bucket_bytes][:1]
    sizes = ", ".join(f"{folder} has {size:,} bytes free" for folder, size in free.items())
    check(
        all(free[folder] > num_ranks * bucket_bytes for folder in taken) and bool(taken),
        f"sync.bucket_bytes: weights pass through {num_ranks} files of {bucket_bytes:,} bytes, "
        f"but {sizes or 'no folder is writable'}: lower it, or enlarge /dev/shm (docker run --shm-size 1g)",
    )


def why_little_shared_memory(num_ranks: int, folder: Path = SHARED_MEMORY) -> str | None:
    """Return why /dev/shm may be too small for the connections of several GPUs; None if it is large enough."""
    free = shutil.disk_usage(folder).free if folder.exists() else 0
    if num_ranks == 1 or free >= num_ranks * NCCL_BYTES:
        return None
    return (
        f"{folder} has {free >> 20} MiB free; NCCL may need {num_ranks * NCCL_BYTES >> 20} MiB for {num_ranks} GPUs, "
        "and then fails: enlarge it (docker run --shm-size 1g)"
    )


def check_open_files() -> None:
    """Check the limit on open files.

    Raises:
        ConfigError: it is below MIN_OPEN_FILES.
    """
    limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    check(
        limit == resource.RLIM_INFINITY or limit >= MIN_OPEN_FILES,
        f"the limit on open files is {limit}: a rank may need {MIN_OPEN_FILES}; raise it with ulimit -n 4096",
    )
