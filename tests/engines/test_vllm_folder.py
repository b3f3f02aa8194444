"""The temporary folder of an engine, and the removal of what dead runs have left."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import pytest

from hybrid_rl.engines.vllm.environment import engine_environment
from hybrid_rl.engines.vllm.folder import EngineFolder, remove_dead, socket_folder
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory, remove_shared_memory
from tests.programs import PATHS

KILLED = """
import os, signal
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from hybrid_rl.engines.vllm.folder import EngineFolder
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory
folder, block = EngineFolder(), SharedMemory(create=True, size=4096)
folder.record(mapped_shared_memory(os.getpid()))
print(folder.path, block.name, flush=True)
resource_tracker.unregister(block._name, "shared_memory")  # as if the tracker were killed, too
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def temporary(monkeypatch):
    """A short temporary folder of this process and its children, like that of a run of its own."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)


def killed_run() -> tuple[Path, Path]:
    """Return the folder and the block of shared memory that a killed trainer has left."""
    command = [sys.executable, "-c", KILLED]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PATHS})
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    folder, block = ended.stdout.split()
    return Path(folder), Path("/dev/shm", block)


def test_the_next_run_removes_what_a_killed_run_has_left(temporary):
    folder, block = killed_run()
    assert folder.parent == temporary and folder.is_dir() and block.exists()
    alive = EngineFolder()
    assert list(temporary.iterdir()) == [alive.path] and not block.exists()
    alive.remove()


def test_the_folder_of_a_living_run_stays(temporary):
    alive = EngineFolder()
    child = f"{KILLED.split('folder, block')[0]}from hybrid_rl.engines.vllm.folder import remove_dead\nremove_dead()"
    subprocess.run([sys.executable, "-c", child], check=True, env={**os.environ, **PATHS})
    remove_dead()
    assert alive.path.is_dir()
    alive.remove()
    assert list(temporary.iterdir()) == []


def test_a_folder_that_is_not_provably_a_dead_runs_stays(temporary):
    (temporary / "hybrid_rl_engine_of_whom").mkdir()  # nobody has locked it, or it is not locked yet
    (temporary / "other").mkdir()
    remove_dead()
    assert len(list(temporary.iterdir())) == 2


def test_only_blocks_of_shared_memory_are_removed(tmp_path):
    file = tmp_path / "psm_file"
    file.touch()
    remove_shared_memory([f"psm_../..{file}", f"../..{file}", "psm_nothing", ""], is_tracked=False)
    assert file.exists()


def test_a_removed_block_leaves_the_resource_tracker_too():
    """Otherwise the tracker prints warnings about it when the trainer ends."""
    program = """
import os
from multiprocessing.shared_memory import SharedMemory
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory, remove_shared_memory
block = SharedMemory(create=True, size=4096)
for _ in range(2):
    remove_shared_memory(mapped_shared_memory(os.getpid()), is_tracked=True)
assert not os.path.exists("/dev/shm/" + block.name)
"""
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **PATHS})
    assert (ended.returncode, ended.stderr) == (0, "")


def test_blocks_of_shared_memory_are_found_by_the_process_that_maps_them():
    block = SharedMemory(create=True, size=4096)
    assert block.name in mapped_shared_memory(os.getpid())
    block.close()
    block.unlink()
    assert block.name not in mapped_shared_memory(os.getpid())
    assert mapped_shared_memory(1 << 30) == set()


@pytest.mark.parametrize("length, folder", [(44, None), (45, "/tmp"), (200, "/tmp")])
def test_sockets_lie_where_their_paths_are_short_enough(monkeypatch, length, folder):
    """A Unix socket's path has at most 107 characters; vLLM names its sockets by a UUID."""
    temporary = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    assert str(socket_folder()) == (folder or temporary)
    name = Path(tempfile.mkdtemp(prefix="hybrid_rl_engine_", dir="/tmp"))
    name.rmdir()
    assert len(f"{socket_folder()}/{name.name}/{uuid.uuid4()}") <= 107


def test_the_files_of_an_engine_lie_in_its_folder(temporary, monkeypatch):
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    before = dict(os.environ)
    engine = EngineFolder()
    with engine_environment(folder=engine.path):
        assert os.environ["VLLM_RPC_BASE_PATH"] == os.environ["TMPDIR"] == tempfile.gettempdir() == str(engine.path)
        assert os.environ["TORCHINDUCTOR_CACHE_DIR"].startswith(f"{temporary}/torchinductor_")
    assert dict(os.environ) == before and tempfile.gettempdir() == str(temporary)
    engine.remove()
