"""A vLLM engine whose processes are killed or stopped: one sentence within seconds, and nothing is left."""

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines import Sampling
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.errors import EngineLostError
from hybrid_rl.processes import families, read_state
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, joint_handle, plan_buckets
from tests.conftest import tiny_config
from tests.programs import PATHS

pytestmark = pytest.mark.slow

CPU = torch.device("cpu")
PROMPTS = [[1, 2 + i % 30, 3] for i in range(64)]
SEEDS = list(range(64))
LONG = Sampling(temperature=1.0, max_tokens=60, stop_token_ids=())
LEFT_S = 15.0
"""Time after which nothing may be left of an engine."""


@pytest.fixture
def temporary(monkeypatch) -> Iterator[Path]:
    """A temporary folder of its own; nothing may be left in it, nor in /dev/shm of what the engine adds there."""
    before = set(os.listdir("/dev/shm"))
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        monkeypatch.setattr(tempfile, "tempdir", folder)
        monkeypatch.setenv("TMPDIR", folder)
        yield Path(folder)
        deadline = time.monotonic() + LEFT_S
        while left := leftovers(Path(folder), before):
            assert time.monotonic() < deadline, left
            time.sleep(0.2)


def leftovers(folder: Path, before: set[str]) -> list[str]:
    """Return what an engine has left: files, and blocks of shared memory that no living process maps."""
    files = [str(path) for path in folder.iterdir() if not path.name.startswith("torchinductor_")]
    new = set(os.listdir("/dev/shm")) - before
    maps = "".join(text_of(Path("/proc", pid, "maps")) for pid in os.listdir("/proc") if pid.isdigit())
    return files + [name for name in new if name.startswith(("psm_", "vllm_", "hybrid_rl")) and name not in maps]


def text_of(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


class Engine:
    """A running engine with weights, and the ids of its processes."""

    def __init__(self, model: Path, num_workers: int, stall_timeout_s: float) -> None:
        config = RolloutConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=64)
        self.vllm = VllmEngine(
            str(model),
            config,
            dtype=torch.float32,
            max_model_len=64,
            can_sleep=False,
            seed=0,
            gpus=["cpu"] * num_workers if num_workers > 1 else (),
            stall_timeout_s=stall_timeout_s,
        )
        tensors = load_file(model / "model.safetensors")
        self.plan = plan_buckets([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], 64 << 10)
        self.buckets = [IpcBucket(bucket_bytes(self.plan), CPU) for _ in range(num_workers)]
        self.vllm.open_bucket(joint_handle({f"cpu {i}": b.handle() for i, b in enumerate(self.buckets)}), self.plan)
        self.tensors = tensors
        self.core, *self.workers = [state.pid for state in self.vllm._processes.running()]

    def sync(self) -> None:
        for index, slots in enumerate(self.plan):
            for bucket in self.buckets:
                for slot in slots:
                    slot.view(bucket.tensor).copy_(self.tensors[slot.name])
            self.vllm.load_bucket(index)
            self.vllm.finish_sync() if index == len(self.plan) - 1 else self.vllm._copies.wait()

    def close(self) -> float:
        """Close the engine; return the seconds that it takes, and check that all processes have ended."""
        start = time.monotonic()
        self.vllm.close()
        assert families([self.core, *self.workers]) == [[]] * (1 + len(self.workers))
        return time.monotonic() - start


@pytest.fixture(scope="session")
def four_heads(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with as many heads as the largest number of workers."""
    folder = tmp_path_factory.mktemp("four_heads")
    config = tiny_config()
    config.num_attention_heads = config.num_key_value_heads = 4
    config.vocab_size = 64  # a smaller one is padded, so that the last worker would hold nothing but padding
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture
def start(tiny: Path, four_heads: Path, temporary: Path) -> Iterator[Callable[..., Engine]]:
    """Return a function that starts an engine, which is closed after the test."""
    engines = []

    def make(*, num_workers: int = 1, stall_timeout_s: float = 60.0) -> Engine:
        engines.append(Engine(tiny / "policy" if num_workers == 1 else four_heads, num_workers, stall_timeout_s))
        return engines[-1]

    yield make
    for engine in engines:
        engine.vllm.close()


def signal_later(pid: int, number: signal.Signals, seconds: float) -> None:
    threading.Timer(seconds, lambda: os.kill(pid, number)).start()


def generate_until_lost(engine: Engine) -> tuple[str, float]:
    """Generate again and again; return the sentence of EngineLostError, and the seconds until it was raised."""
    start = time.monotonic()
    with pytest.raises(EngineLostError) as info:
        while time.monotonic() - start < 120:
            engine.vllm.generate(PROMPTS, LONG, SEEDS)
    return str(info.value), time.monotonic() - start


def test_a_stopped_engine_goes_on_with_the_same_tokens_or_ends_the_run(start):
    engine = start(stall_timeout_s=10.0)
    engine.sync()
    expected = engine.vllm.generate(PROMPTS, LONG, SEEDS)
    os.kill(engine.core, signal.SIGSTOP)
    signal_later(engine.core, signal.SIGCONT, 4.0)
    begin = time.monotonic()
    assert engine.vllm.generate(PROMPTS, LONG, SEEDS) == expected
    assert time.monotonic() - begin >= 4.0
    os.kill(engine.core, signal.SIGSTOP)
    sentence, seconds = generate_until_lost(engine)
    assert sentence == (
        f"process {engine.core} of the rollout engine is stopped (SIGSTOP or a debugger) and has made no progress for "
        "10 s (run.stall_timeout_s); the trainer waits for it to generate 64 responses"
    )
    assert 10 <= seconds < 30
    assert engine.close() < 15


def test_an_engine_killed_while_it_generates_ends_the_run(start):
    engine = start()
    engine.sync()
    signal_later(engine.core, signal.SIGKILL, 0.3)
    sentence, seconds = generate_until_lost(engine)
    assert sentence.startswith(f"process {engine.core} of the rollout engine was killed by SIGKILL (exit code -9;")
    assert seconds < 30
    assert engine.close() < 15


def test_an_engine_killed_while_it_copies_weights_ends_the_run(start):
    engine = start()
    engine.sync()
    signal_later(engine.core, signal.SIGKILL, 0.3)
    begin = time.monotonic()
    with pytest.raises(EngineLostError, match=rf"process {engine.core} .* was killed by SIGKILL"):
        while time.monotonic() - begin < 60:
            engine.sync()
    assert time.monotonic() - begin < 30
    assert engine.close() < 15


def test_an_idle_engine_closes_when_it_is_stopped(start):
    engine = start()
    os.kill(engine.core, signal.SIGSTOP)
    assert engine.close() < 15


@pytest.mark.parametrize("num_workers, number", [(4, signal.SIGKILL), (2, signal.SIGSTOP)], ids=["killed", "stopped"])
def test_workers_share_the_weights_and_one_is_lost(start, num_workers, number):
    # Beside other work, five processes on two cores can be without progress for a while.
    engine = start(num_workers=num_workers, stall_timeout_s=60.0 if number == signal.SIGKILL else 20.0)
    assert len(engine.workers) == num_workers
    engine.sync()
    lost = engine.workers[1]
    signal_later(lost, number, 0.3)
    sentence, seconds = generate_until_lost(engine)
    words = "was killed by SIGKILL (exit code -9" if number == signal.SIGKILL else "is stopped"
    assert sentence.startswith(f"process {lost} of the rollout engine {words}")
    assert seconds < 60
    assert engine.close() < 40


START = """
import os, sys, torch
from hybrid_rl.config import RolloutConfig
from hybrid_rl.engines.vllm.engine import VllmEngine

if __name__ == "__main__":
    config = RolloutConfig(kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
    settings = {"dtype": torch.float32, "max_model_len": 64, "can_sleep": False, "seed": 0, "stall_timeout_s": 20.0}
    VllmEngine(sys.argv[1], config, gpus=["cpu"] * int(sys.argv[2]), **settings)
    print("started", flush=True)
    import time
    time.sleep(600)
"""


def engine_processes_of(trainer: int) -> list[int]:
    """Return the ids of the processes that a trainer has started and that load vLLM."""
    return [
        state.pid for state in families([trainer])[0] if "spawn_main" in text_of(Path(f"/proc/{state.pid}/cmdline"))
    ]


@pytest.fixture
def start_trainer(tiny: Path, temporary: Path, tmp_path: Path) -> Iterator[Callable[..., subprocess.Popen]]:
    """Return a function that starts a trainer in a process and a group of its own; its engine starts."""
    program = tmp_path / "start.py"
    program.write_text(START)
    trainers = []

    def make(num_workers: int = 0) -> subprocess.Popen:
        process = subprocess.Popen(
            [sys.executable, str(program), str(tiny / "policy"), str(num_workers)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **PATHS},
            start_new_session=True,
        )
        trainers.append(process)
        return process

    yield make
    for process in trainers:
        process.kill()
        process.communicate()


@pytest.fixture
def trainer(start_trainer: Callable[..., subprocess.Popen]) -> subprocess.Popen:
    """A trainer whose engine has one GPU."""
    return start_trainer()


def test_a_signal_to_the_whole_group_prints_nothing_of_the_engine(start_trainer):
    trainer = start_trainer(num_workers=2)
    assert any(line == "started\n" for line in trainer.stdout)
    engine = [state.pid for state in families([trainer.pid])[0]]
    assert len(engine) >= 4
    os.killpg(trainer.pid, signal.SIGTERM)
    output, _ = trainer.communicate(timeout=60)
    assert (trainer.returncode, output) == (-signal.SIGTERM, "")


@pytest.mark.parametrize("is_started", [False, True], ids=["starting", "started"])
def test_a_killed_trainer_takes_its_engine_with_it(trainer, is_started):
    """The fixture `temporary` checks that nothing is left."""
    while not (engines := engine_processes_of(trainer.pid)):
        time.sleep(0.1)
    if is_started:
        assert any(line == "started\n" for line in trainer.stdout)
    else:
        time.sleep(2.0)
    trainer.kill()
    deadline = time.monotonic() + LEFT_S
    while any((state := read_state(pid)) and not state.has_ended for pid in engines):
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
def test_an_engine_lost_while_it_starts_ends_the_start(trainer, number):
    while not (engines := engine_processes_of(trainer.pid)):
        time.sleep(0.1)
    time.sleep(2.0)
    os.kill(engines[0], number)
    output, _ = trainer.communicate(timeout=60)
    (sentence,) = [line for line in output.splitlines() if "EngineLostError: " in line]
    words = "was killed by SIGKILL (exit code -9" if number == signal.SIGKILL else "is stopped"
    assert f"process {engines[0]} of the rollout engine {words}" in sentence
    assert sentence.endswith("the trainer waits for it to start")
