"""Small runs on the tiny models: the real loop in this process, or the real command in a process of its own."""

import ctypes
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from torch import Tensor

from hybrid_rl import build, trained_models, trainer
from hybrid_rl.config import (
    AdvantageConfig,
    CheckpointConfig,
    Config,
    ModelsConfig,
    OptimizerConfig,
    PromptsConfig,
    RewardConfig,
    RolloutConfig,
    RunConfig,
    SyncConfig,
    UpdateConfig,
    as_dict,
)
from hybrid_rl.distributed import World
from hybrid_rl.engines.start import start_engine
from hybrid_rl.engines.vllm.engine import VllmEngine
from hybrid_rl.validate import validate
from launch import colocated
from tests.programs import PATHS, ROOT, ForkServer, ProgramResult

RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunResult:
    """Files and weights that a run leaves and that must not depend on how it was run."""

    metrics: list[dict[str, float]]
    """A row per step, without times, and without counters of the weight syncs of one engine."""
    rollouts: list[list[dict[str, Any]]]
    """The responses of each step, in the order of their prompts."""
    state: dict[str, Any]
    """state.json of the last checkpoint, without the identity of the run."""
    weights: dict[str, dict[str, Tensor]] = dataclasses.field(default_factory=dict)
    """Parameters of actor and critic; empty if another process held them."""


@pytest.fixture(scope="session")
def make_config(tiny: Path) -> Callable[..., Config]:
    """Return the settings of a run of PPO with four models in a folder; keywords replace fields of a section."""

    def make(folder: Path, **sections: dict[str, Any]) -> Config:
        config = Config(
            run=RunConfig(name="run", dir=str(folder), num_steps=2, eval_every_steps=1),
            models=ModelsConfig(actor=str(tiny / "policy"), reward=str(tiny / "reward")),
            prompts=PromptsConfig(
                path=str(tiny / "prompts.jsonl"), eval_path=str(tiny / "heldout.jsonl"), max_prompt_tokens=8
            ),
            # The hf engine starts at once and repeats itself exactly.
            rollout=RolloutConfig(
                engine="hf",
                rollout_batch_size=4,
                group_size=2,
                max_response_tokens=12,
                kv_cache_memory_bytes=64 << 20,
                max_num_seqs=16,
            ),
            reward=RewardConfig(functions=["exact_match"]),
            advantage=AdvantageConfig(kl_coef=0.05),
            update=UpdateConfig(
                mini_batch_size=4,
                micro_batch_tokens=48,
                actor=OptimizerConfig(lr=1e-3, warmup_steps=3),
                critic=OptimizerConfig(lr=1e-3),
            ),
            sync=SyncConfig(bucket_bytes=16 << 10),
            checkpoint=CheckpointConfig(every_steps=2, export=False),
        )
        changed = {name: dataclasses.replace(getattr(config, name), **fields) for name, fields in sections.items()}
        return validate(dataclasses.replace(config, **changed))

    return make


@pytest.fixture(scope="session")
def copy_engine(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[VllmEngine]:
    """One vLLM engine for all tests that sync copies; each of them syncs its own weights first."""
    rollout = {"engine": "vllm", "stop_strings": ["<eos>"]}  # so that it has a tokenizer
    config = make_config(tmp_path_factory.mktemp("engine"), rollout=rollout)
    engine = start_engine(config, world=World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    assert isinstance(engine, VllmEngine)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def lent_engine(copy_engine: VllmEngine) -> Iterator[VllmEngine]:
    """copy_engine for every run with vLLM, like a new engine: the first weight sync verifies every tensor."""

    def lend(config: Config, **named: Any) -> Any:
        if config.rollout.engine != "vllm":
            return start_engine(config, **named)
        copy_engine.weights_version = 0
        return copy_engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_models, "start_engine", lend)
        patch.setattr(copy_engine, "close", lambda: None)
        yield copy_engine
    for tag in ("weights", "kv_cache"):  # a run leaves it asleep
        copy_engine.map(tag)


@pytest.fixture(scope="session")
def read_run() -> Callable[[Config], RunResult]:
    """Read a run's folder."""

    def read(config: Config) -> RunResult:
        folder = config.run_dir
        metrics = [
            {k: v for k, v in row.items() if not k.startswith(("time/", "sync/", "tokens_per_s"))}
            for row in _rows(folder / "metrics.jsonl")
        ]
        rollouts = [
            sorted(_rows(path), key=lambda row: row["prompt_id"]) for path in sorted((folder / "rollouts").iterdir())
        ]
        latest = folder / "checkpoints" / (folder / "latest").read_text()
        state = json.loads((latest / "state.json").read_text())
        del state["run"]  # its id, settings and the paths of its models
        return RunResult(metrics=metrics, rollouts=rollouts, state=state)

    return read


@pytest.fixture(scope="session")
def train_here(read_run: Callable[[Config], RunResult]) -> Callable[[Config], RunResult]:
    """Train in this process."""

    def train(config: Config) -> RunResult:
        run = build.build(config)
        try:
            with run.recorder:
                trainer.loop(run)
        finally:
            run.close()
        weights = {}
        for name, engine in {"actor": run.actor, "critic": run.critic}.items():
            if engine is None:
                continue
            with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
                weights[name] = {name: tensor.clone() for name, tensor in tensors.items()}
        return dataclasses.replace(read_run(config), weights=weights)

    return train


@pytest.fixture(scope="session")
def run_python(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., ProgramResult]:
    """Run Python with some arguments in the checkout."""

    def run(*arguments: str, timeout_s: float = 400.0) -> ProgramResult:
        output = tmp_path_factory.mktemp("output") / "output.txt"  # survivors would keep a pipe open

        def command() -> ProgramResult:
            with output.open("w") as streams:
                ended = subprocess.Popen(
                    [sys.executable, *arguments], cwd=ROOT, env=_environment(), stdout=streams, stderr=subprocess.STDOUT
                )
                try:
                    code = ended.wait(timeout_s)
                finally:
                    ended.kill()
            return ProgramResult(code=code, output=output.read_text(), cpu_s=0.0)

        return _with_survivors(command)

    return run


@pytest.fixture(scope="session")
def run_forked(fork_servers: list[ForkServer]) -> Callable[..., ProgramResult]:
    """Run a program, given by its file, in the checkout, forked from a process that has imported what it needs."""

    def run(*arguments: str) -> ProgramResult:
        def program() -> ProgramResult:
            fork_servers[0].start(*arguments, environment=_environment())
            return fork_servers[0].wait()

        return _with_survivors(program)

    return run


@pytest.fixture(scope="session")
def launch(run_forked: Callable[..., ProgramResult]) -> Callable[..., ProgramResult]:
    """Run launch/colocated.py with a config and more arguments."""

    def run(config: Config, *arguments: str) -> ProgramResult:
        path = Path(config.run.dir) / "settings.yaml"
        path.write_text(yaml.safe_dump(as_dict(config)))
        return run_forked("launch/colocated.py", "--config", str(path), *arguments)

    return run


@pytest.fixture
def refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., list[str]]:
    """Return the sentences with which launch/colocated.py refuses a start; it prints nothing else and exits with 2."""

    def run(config: Config, *arguments: str) -> list[str]:
        path = tmp_path / "settings.yaml"
        path.write_text(yaml.safe_dump(as_dict(config)))
        monkeypatch.setattr(sys, "argv", ["colocated.py", "--config", str(path), *arguments])
        monkeypatch.setattr(colocated, "handle_signals", lambda: None)  # the handlers of pytest stay
        with pytest.raises(SystemExit) as ended:
            colocated.main()
        lines = capsys.readouterr().err.splitlines()
        assert ended.value.code == 2 and lines and all(line.startswith("error: ") for line in lines), lines
        return [line.removeprefix("error: ") for line in lines]

    return run


def _environment() -> dict[str, str]:
    inherited = {k: v for k, v in os.environ.items() if k not in RANK_VARIABLES}  # they describe this process
    return inherited | PATHS | {"OMP_NUM_THREADS": "1"}


def _with_survivors(run: Callable[[], ProgramResult]) -> ProgramResult:
    """Run a program and add the processes that it started and that live on, which are then killed."""
    before = set(_descendants())
    _adopt_orphans(True)
    try:
        ended = run()
        return dataclasses.replace(ended, survivors=_survivors(before, patience_s=60))
    finally:
        for process in set(_descendants()) - before:
            process.kill()
            process.wait()
        _adopt_orphans(False)


def _rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def _adopt_orphans(is_wanted: bool) -> None:
    """Become the parent of what our children leave behind, whatever session or name it has; or cease to."""
    pr_set_child_subreaper = 36
    ctypes.CDLL(None).prctl(pr_set_child_subreaper, int(is_wanted), 0, 0, 0)


def _descendants() -> list[psutil.Process]:
    return psutil.Process().children(recursive=True)


def _survivors(before: set[psutil.Process], *, patience_s: float) -> list[str]:
    """Return the names of new descendants that do not end within some time."""
    new = [process for process in _descendants() if process not in before]
    _, alive = psutil.wait_procs(new, timeout=patience_s)
    return [str(process) for process in alive]
