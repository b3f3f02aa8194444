"""The arguments of vLLM, and the shared memory that its processes leave."""

import os
import signal
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest

from hybrid_rl.engines.vllm.arguments import graph_sizes
from hybrid_rl.engines.vllm.environment import engine_environment, socket_folder
from hybrid_rl.engines.vllm.shared_memory import remove_shared_memory


@pytest.mark.parametrize("length, folder", [(60, None), (61, "/tmp"), (200, "/tmp")])
def test_sockets_lie_where_their_paths_are_short_enough(monkeypatch, length, folder):
    """A Unix socket's path has at most 107 characters; vLLM names its sockets by a UUID."""
    temporary = "/" + "t" * (length - 1)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    assert socket_folder() == (folder or temporary)
    with engine_environment():
        assert os.environ["VLLM_RPC_BASE_PATH"] == socket_folder()
    assert len(f"{socket_folder()}/{uuid.uuid4()}") <= 107
    assert "VLLM_RPC_BASE_PATH" not in os.environ


def test_shared_memory_of_a_killed_process_is_removed():
    source = """
import os, signal
from multiprocessing.shared_memory import SharedMemory
from hybrid_rl.engines.vllm.shared_memory import mapped_shared_memory
block = SharedMemory(create=True, size=4096)
assert mapped_shared_memory() == {block.name}
print(block.name, flush=True)
from multiprocessing import resource_tracker
resource_tracker.unregister(block._name, "shared_memory")  # as if the tracker belonged to the trainer, which lives on
os.kill(os.getpid(), signal.SIGKILL)
"""
    ended = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    name = ended.stdout.strip()
    assert Path("/dev/shm", name).exists()
    remove_shared_memory([name, "psm_nothing"])
    assert not Path("/dev/shm", name).exists()


def test_graphs_are_captured_for_up_to_max_num_seqs_sequences():
    sizes = graph_sizes(1000)
    assert sizes[:4] == [1, 2, 4, 8] and sizes[33:37] == [248, 256, 272, 288]
    assert sizes[50:] == [512, 576, 640, 704, 768, 832, 896, 960, 1000]
    assert graph_sizes(576)[50:] == [512, 576]
