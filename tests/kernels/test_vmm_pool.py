"""The native pool: its own test under CTest, and the Python side on the same library with a driver in host memory."""

import ctypes
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from hybrid_rl_kernels import vmm_pool
from hybrid_rl_kernels.vmm_pool import Region, Reserve, VmmError, VmmOutOfMemoryError, VmmPool

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
CAPACITY = 32 * MIB


def run(*command: str) -> str:
    environment = {**os.environ, "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("build")
    run("cmake", "-S", str(ROOT), "-B", str(folder), "-DCMAKE_CXX_FLAGS=-Werror")
    run("cmake", "--build", str(folder), "--parallel", "2")
    return folder


def test_the_state_machine_on_a_fake_driver(build):
    assert "100% tests passed" in run("ctest", "--test-dir", str(build), "--output-on-failure")


def test_without_a_driver_the_library_loads_and_says_so(build):
    """The library that is shipped: no symbol of CUDA is needed to load it."""
    code = f"""if True:
        from pathlib import Path
        from hybrid_rl_kernels.vmm_pool import VmmError, VmmPool
        try:
            VmmPool(library=Path({str(build / vmm_pool.LIBRARY)!r}))
        except VmmError as error:
            print(error)
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.startswith(("no CUDA driver: libcuda.so.1", "no CUDA driver: cuInit found no GPU"))


def test_a_missing_library_tells_how_to_build_it(monkeypatch):
    monkeypatch.setattr(vmm_pool, "find_library", lambda: None)
    with pytest.raises(VmmError, match=r"not built; in the checkout: cmake -S . -B build && cmake --build build"):
        VmmPool()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert "cmake -S . -B build" in vmm_pool.why_unavailable()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert vmm_pool.why_unavailable() == "PyTorch sees no GPU"


@pytest.fixture(scope="module")
def fake(build: Path) -> Iterator[tuple[VmmPool, ctypes.CDLL]]:
    path = build / "libvmm_pool_fake.so"
    yield VmmPool(chunk_bytes=4 * MIB, library=path), ctypes.CDLL(str(path))


@pytest.fixture
def pool(fake) -> VmmPool:
    fake[1].fake_reset(ctypes.c_size_t(CAPACITY + used(fake[1])))
    return fake[0]


def used(library: ctypes.CDLL) -> int:
    library.fake_used.restype = ctypes.c_size_t
    return library.fake_used()


def tensor_in(region: Region, num_bytes: int) -> torch.Tensor:
    """A CPU tensor in memory of the fake device, which is host memory."""
    buffer = (ctypes.c_byte * num_bytes).from_address(region.allocate(num_bytes))
    return torch.frombuffer(buffer, dtype=torch.float32)


@pytest.mark.parametrize("policy, moved", [("copy", [6, 6, 6, 6]), ("copy_once", [6, 6, 0, 6]), ("drop", [0, 0, 0, 0])])
def test_bytes_and_contents_by_policy(pool, policy, moved):
    region = pool.region("states", policy=policy)
    tensor = tensor_in(region, 6 * MIB)
    tensor.copy_(torch.arange(tensor.numel()))
    before, address, elsewhere = tensor.clone(), tensor.data_ptr(), vmm_pool.released_bytes()
    assert region.num_bytes == 6 * MIB
    found = []
    for _ in range(2):
        found.append(region.release())
        assert not region.is_resident and vmm_pool.released_bytes() - elsewhere == 6 * MIB
        found.append(region.restore())
        assert region.is_resident and tensor.data_ptr() == address and vmm_pool.released_bytes() == elsewhere
        if policy != "drop":
            assert torch.equal(tensor, before)
    assert found == [n * MIB for n in moved]
    region.release()


def test_the_host_copy_is_what_a_restore_brings(pool):
    region = pool.region("reference", policy="copy_once")
    tensor = tensor_in(region, 2 * MIB)
    tensor.fill_(1.0)
    view = tensor[4:10].view(2, 3).T
    with pytest.raises(VmmError, match="no host copy"):
        region.host(tensor)
    region.release()
    assert region.host(view).tolist() == [[1.0, 1.0]] * 3
    region.host(view).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    region.restore()
    assert view.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]] and tensor[:4].tolist() == [1.0] * 4
    tensor.fill_(7.0)
    region.invalidate()
    assert region.release() == 2 * MIB
    assert region.host(view).tolist() == [[7.0, 7.0]] * 3


def test_out_of_memory_names_region_and_bytes_and_rolls_back(pool, fake):
    region, other = pool.region("actor_states"), pool.region("cache", policy="drop")
    tensor = tensor_in(region, 20 * MIB).fill_(3.0)
    region.release()
    other.allocate(16 * MIB)
    with pytest.raises(VmmOutOfMemoryError, match=r"region actor_states.*: 20,971,520 bytes .* wanted") as caught:
        region.restore()
    assert caught.value.wanted_bytes == 20 * MIB and 0 <= caught.value.free_bytes < 4 * MIB
    assert not region.is_resident
    with pytest.raises(VmmOutOfMemoryError, match=r"region cache.*: 67,108,864 bytes"):
        other.allocate(64 * MIB)
    assert pool.exchange(other, region) == (0, 20 * MIB)
    assert (tensor == 3.0).all() and not other.is_resident
    region.release()


def test_wrong_states_are_errors_that_name_the_region(pool):
    first, second = pool.region("critic"), pool.region("critic")
    assert (first.tag, second.tag) == ("critic", "critic 2")
    with pytest.raises(VmmError, match="restore: region critic 2 is resident already"):
        second.restore()
    second.release()
    with pytest.raises(VmmError, match="release: region critic 2 is released"):
        second.release()
    with pytest.raises(VmmError, match="allocate: region critic 2 is released"):
        second.allocate(1)
    with pytest.raises(VmmError, match="restore: region critic is resident already"):
        pool.exchange(first, first)


def test_other_errors_of_the_driver_are_told(pool, fake):
    region = pool.region("frozen")
    fake[1].fake_fail(b"map", 0, 999)
    with pytest.raises(VmmError, match="region frozen: cuMemMap returned CUDA error 999"):
        region.allocate(MIB)
    with pytest.raises(VmmError, match="started before"):
        VmmPool(library=fake[0]._path)


def test_a_first_release_takes_from_the_reserve_and_waits_for_it(pool, fake):
    region = pool.region("reserved")
    tensor = tensor_in(region, 6 * MIB).fill_(2.0)
    assert pool.reserve == Reserve(num_bytes=0, taken_bytes=0, pinning_s=0.0, waited_s=0.0)
    fake[1].fake_hold_pinning(1)
    pool.reserve_host(6 * MIB)
    letting_go = threading.Timer(0.5, fake[1].fake_hold_pinning, [0])
    letting_go.start()
    assert region.release() == 6 * MIB
    for thread in threading.enumerate():
        if thread.name == "pin reserve":
            thread.join()
    reserve = pool.reserve
    assert (reserve.num_bytes, reserve.taken_bytes) == (6 * MIB, 6 * MIB)
    assert 0.02 < reserve.waited_s <= reserve.pinning_s + 0.5 and reserve.pinning_s > 0.2
    region.restore()
    assert (tensor == 2.0).all()
    with pytest.raises(VmmError, match="this pool has a reserve"):
        pool.reserve_host(MIB)
    region.release()


def test_a_reserve_that_cannot_be_pinned_is_told_by_a_release(build):
    """In a process of its own, whose pool has no reserve yet."""
    code = f"""if True:
        import ctypes, threading
        from pathlib import Path
        from hybrid_rl_kernels.vmm_pool import VmmError, VmmPool
        path = Path({str(build / "libvmm_pool_fake.so")!r})
        fake = ctypes.CDLL(str(path))
        fake.fake_reset(ctypes.c_size_t({CAPACITY}))
        pool = VmmPool(chunk_bytes={4 * MIB}, library=path)
        region = pool.region("states")
        region.allocate({4 * MIB})
        fake.fake_fail(b"register_host", 0, 2)
        pool.reserve_host({4 * MIB})  # one unit: of several, pinned side by side, the release may get a good one
        try:
            region.release()
        except VmmError as error:
            print(error, region.is_resident, region.release())
    """
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    said = "region states: pinning a reserve of 4194304 bytes of host memory: cuMemHostRegister returned CUDA error 2"
    assert done.stdout.strip() == f"{said} True {4 * MIB}"
