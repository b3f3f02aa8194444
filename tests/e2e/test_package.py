"""A wheel of a clean copy, installed into an empty environment, trains and answers from another folder."""

import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
UV = [sys.executable, str(ROOT / "requirements" / "uv.py")]
LIMIT_S = 1500
"""Seconds for one command, on a machine that does much else, too."""
SMALL = [
    "--run.num_steps=2",
    "--run.eval_every_steps=0",
    "--rollout.rollout_batch_size=32",
    "--update.mini_batch_size=16",
]
Command = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * LIMIT_S)]


def run(*command: str | Path, folder: Path, **environment: str) -> "subprocess.CompletedProcess[str]":
    """Run a command without what leads to this checkout."""
    kept = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=folder, env={**kept, **environment}, capture_output=True, text=True, timeout=LIMIT_S
    )


def last_line(ended: "subprocess.CompletedProcess[str]") -> str:
    return (ended.stderr.strip().splitlines() or ["no output"])[-1].strip()


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a copy of the files of the checkout that git knows or would add, such as a clone has them."""
    folder = tmp_path_factory.mktemp("copy")
    listed = run("git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", folder=ROOT).stdout.split("\0")
    for name in listed:
        if name and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return an empty environment."""
    folder = tmp_path_factory.mktemp("environment") / "venv"
    made = run(*UV, "venv", "--python", sys.executable, folder, folder=ROOT)
    assert made.returncode == 0, made.stderr
    return folder


@pytest.fixture(scope="module")
def indexes(copy: Path, environment: Path) -> list[str]:
    """Return the options of uv by which it finds torch's CPU build; skip where no index answers or none has it."""
    ask = [*UV, "pip", "install", "--dry-run", "--no-deps", "--python", environment / "bin" / "python"]
    asked = run(*ask, "--refresh", "packaging", folder=copy)
    if asked.returncode:
        pytest.skip(f"no package index answers: {last_line(asked)}")
    (torch,) = re.findall(r"^(torch==\S+\+cpu)", (copy / "requirements" / "cpu.txt").read_text(), re.M)
    (index,) = re.findall(r"--index (https://\S+)", (copy / "Makefile").read_text())
    for options in ([], ["--index", index]):
        if run(*ask, *options, torch, folder=copy).returncode == 0:
            return options
    pytest.skip(f"no package index has {torch}")


@pytest.fixture(scope="module")
def wheel(copy: Path, indexes: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the wheel of the copy."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(*UV, "build", "--wheel", "--out-dir", folder, copy, folder=copy)
    assert built.returncode == 0, built.stderr
    (path,) = folder.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def command(copy: Path, wheel: Path, environment: Path, indexes: list[str]) -> Command:
    """Install the wheel with its extra `cpu`, and return what runs its command in a folder."""
    install = [*UV, "pip", "install", *indexes, "--python", environment / "bin" / "python"]
    installed = run(*install, f"hybrid_rl[cpu] @ {wheel.as_uri()}", folder=copy)
    assert installed.returncode == 0, installed.stderr

    def call(folder: Path, *words: str) -> "subprocess.CompletedProcess[str]":
        settings = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
        return run(environment / "bin" / "hybrid-rl", *words, folder=folder, **settings)

    return call


def test_the_wheel_holds_what_a_run_needs_under_two_names(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    folders = {name.split("/")[0] for name in names if ".dist-info/" not in name}
    assert folders == {"hybrid_rl", "hybrid_rl_kernels"}
    assert {"hybrid_rl_kernels/libvmm_pool.so", "hybrid_rl/launch/main.py", "hybrid_rl/py.typed"} <= {*names}
    configs = {path.relative_to(ROOT).as_posix() for path in (ROOT / "launch" / "configs").rglob("*.yaml")}
    assert {f"hybrid_rl/{name}" for name in configs} <= {*names}
    assert not [name for name in names if "tests/" in name or "__pycache__" in name]


def test_the_demo_trains_from_another_folder(command, environment, tmp_path):
    ended = command(tmp_path, "run", *SMALL)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    run_folder = tmp_path / "runs" / "demo"
    rows = [json.loads(line) for line in (run_folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all(row["kl"] == row["kl"] for row in rows)
    assert yaml.safe_load((run_folder / "config.yaml").read_text())["rollout"]["engine"] == "vllm"
    assert (run_folder / "export" / "config.json").is_file()
    where = [environment / "bin" / "python", "-c", "import hybrid_rl.launch.main as m; print(m.__file__)"]
    assert run(*where, folder=tmp_path).stdout.startswith(str(environment))


@pytest.mark.parametrize(
    "words, expected",
    [
        (["check"], r"settings, models, data and machine: no mistakes"),
        (["plan", "--gpus", "2", "--gpu-memory", "80GiB"], r"(?s)GiB on each GPU.*fits"),
        (["data"], r"(?s)prompts\.path.*30000 prompts"),
        (["configs"], r"(?m)^recipes/grpo_7b_8gpu "),
        (["ray", "--help"], r"^usage: hybrid-rl ray "),
        (["--version"], r"^hybrid_rl \d"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_the_other_commands_answer(command, words, expected, tmp_path):
    ended = command(tmp_path, *words)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert re.search(expected, ended.stdout), ended.stdout


def test_a_translated_command_line_is_a_configuration(command, tmp_path):
    script = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=train.parquet"
    ended = command(tmp_path, "translate", "verl", script)
    assert yaml.safe_load(ended.stdout)["prompts"]["path"] == "train.parquet", ended.stderr
    (tmp_path / "my.yaml").write_text(ended.stdout)
    printed = command(tmp_path, "run", "--config", "my.yaml", "--print_config")
    assert yaml.safe_load(printed.stdout)["prompts"]["path"] == "train.parquet", printed.stderr
