"""Memory, shared memory and open files of a node."""

import resource
from pathlib import Path

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.machine import host
from hybrid_rl.machine.host import (
    available_memory,
    check_buckets,
    check_memory,
    check_open_files,
    why_little_shared_memory,
)


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """Folders of a machine with 8 GiB available, in a memory cgroup /job of which /job/step is this process's."""
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal:       16777216 kB\nMemAvailable:    8388608 kB\n")
    (proc / "self" / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "cgroup" / "job" / "step").mkdir(parents=True)
    return proc


def write(folder: Path, **files: object) -> None:
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(f"{content}\n")


def test_memory_is_what_the_kernel_calls_available(proc):
    assert available_memory(proc, proc.parent / "cgroup") == (8 << 30, "MemAvailable")


def test_the_smallest_limit_of_a_cgroup_counts_and_its_file_cache_is_free(proc):
    cgroups = proc.parent / "cgroup"
    write(cgroups / "job" / "step", memory__max="max", memory__current=1 << 30, memory__stat="inactive_file 0")
    write(cgroups / "job", memory__max=6 << 30, memory__current=5 << 30, memory__stat=f"inactive_file {2 << 30}")
    assert available_memory(proc, cgroups) == (3 << 30, "the memory limit of cgroup /job")


def test_version_1_of_cgroups_is_read_too(proc):
    (proc / "self" / "cgroup").write_text("5:cpu,cpuacct:/job\n4:memory:/job\n")
    folder = proc.parent / "cgroup" / "memory" / "job"
    folder.mkdir(parents=True)
    write(
        folder,
        memory__limit_in_bytes=4 << 30,
        memory__usage_in_bytes=1 << 30,
        memory__stat="total_inactive_file 0",
    )
    assert available_memory(proc, proc.parent / "cgroup") == (3 << 30, "the memory limit of cgroup /job")


def test_a_run_that_needs_more_memory_is_refused_with_its_uses(monkeypatch):
    monkeypatch.setattr(host, "available_memory", lambda: (3 << 30, "MemAvailable"))
    check_memory({"models": 3 << 30})
    with pytest.raises(ConfigError) as error:
        check_memory({"models": 3 << 30, "EMA": 1 << 29, "nothing": 0})
    assert str(error.value) == (
        "the run needs 3.5 GiB of host memory on this node (3.0 GiB for models, 0.5 GiB for EMA), but MemAvailable "
        "leaves 3.0 GiB: end other processes, give the job more memory, or use smaller models"
    )


def test_the_buckets_of_all_ranks_must_fit_together(monkeypatch, tmp_path):
    monkeypatch.setattr(host, "SHARED_MEMORY", tmp_path)
    monkeypatch.setattr(host.tempfile, "gettempdir", lambda: str(tmp_path))
    free = host.shutil.disk_usage(tmp_path).free
    check_buckets(free // 4, num_ranks=2)
    with pytest.raises(ConfigError, match=r"sync.bucket_bytes: weights pass through 5 files of"):
        check_buckets(free // 4, num_ranks=5)
    with pytest.raises(ConfigError, match="weights pass through 1 file"):
        check_buckets(2 * free, num_ranks=1)


def test_little_shared_memory_is_named_for_several_gpus_only(tmp_path):
    assert why_little_shared_memory(1, tmp_path / "missing") is None
    assert "has 0 MiB free; NCCL may need 64 MiB for 2 GPUs" in str(why_little_shared_memory(2, tmp_path / "missing"))
    assert why_little_shared_memory(2, tmp_path) is None


def test_a_low_limit_on_open_files_is_refused(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    with pytest.raises(ConfigError, match="the limit on open files is 256"):
        check_open_files()
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    check_open_files()
