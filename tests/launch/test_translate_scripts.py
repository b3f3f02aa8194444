"""Command lines with the arguments and values of example scripts pass `check` and `plan` for their GPUs.

Names on the hub and paths become local stand-ins: models of a few thousand parameters, and rows in the shapes that the
scripts read. All other values are the scripts', except the sizes that a test divides by a stated factor.
"""

import json
import math
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

from hybrid_rl.config import Config, ConfigError
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.settings.types import get_setting
from launch.check import check_run_elsewhere
from launch.plan import show_plan
from launch.settings import SettingsParser, make_parser, read_settings
from launch.translate.command import translate
from launch.translate.systems import SYSTEMS
from tests.conftest import WORDS, make_tokenizer
from tests.launch.scripts_of_trainers import (
    COATI_RAY,
    OPENRLHF_AGENT,
    OPENRLHF_IMAGES,
    OTHERS,
    POLICIES,
    REWARD_MODELS,
    SCRIPTS,
)
from tests.programs import PATHS, ROOT

NUM_ROWS = 32
REWARD_FUNC = """
def reward_func(queries, prompts, labels, **kwargs):
    rewards = [float(len(query) % 2) for query in queries]
    return {"rewards": rewards, "scores": rewards, "extra_logs": {"length": len(queries[0])}}
"""
FAST = ("openrlhf dapo", "openrlhf ppo on slurm", "coati ppo", "verl grpo", "trl yaml")
"""Scripts whose check is one of the fast tests; together they have every kind of text and both kinds of rewards."""


@pytest.fixture(scope="module")
def stand_ins(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `policy` and `reward`, and with rows, a template and a reward function as the scripts read them."""
    root = tmp_path_factory.mktemp("stand_ins")
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}="
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=32,
        max_position_embeddings=16384,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
        num_labels=1,
    )
    torch.manual_seed(1)
    for name, model in {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items():
        model(config).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    chats = [[{"role": "user", "content": f"{i}+{i}"}] for i in range(NUM_ROWS)]
    answers = [str(2 * i) for i in range(NUM_ROWS)]
    shapes: dict[str, Callable[[Any, str], dict[str, Any]]] = {
        "chats": lambda chat, answer: {"context_messages": chat},
        "labels": lambda chat, answer: {"prompt": chat[0]["content"], "label": answer},
        "messages": lambda chat, answer: {"messages": chat, "gt_answer": answer},
        "solutions": lambda chat, answer: {"prompt": chat, "solution": answer},
    }
    for name, shape in shapes.items():
        rows = [json.dumps(shape(chat, answer)) for chat, answer in zip(chats, answers, strict=True)]
        (root / f"{name}.jsonl").write_text("\n".join(rows) + "\n")
    for name, source in {"gsm8k": "openai/gsm8k", "maths": "lighteval/MATH"}.items():
        table = pyarrow.Table.from_pylist(
            [
                {
                    "data_source": source,
                    "prompt": chat,
                    "reward_model": {"style": "rule", "ground_truth": answer},
                    "extra_info": {"index": index},
                }
                for index, (chat, answer) in enumerate(zip(chats, answers, strict=True))
            ]
        )
        pyarrow.parquet.write_table(table, root / f"{name}.parquet")
    (root / "prompts.csv").write_text("prompt\n" + "".join(f"{chat[0]['content']}=\n" for chat in chats))
    (root / "reward_func.py").write_text(REWARD_FUNC)
    (root / "template.json").write_text(
        json.dumps({"chat_template": tokenizer.chat_template, "stop_ids": [0], "end_of_assistant": "<eos>"})
    )
    return root


def configured(
    option: str, text: str, folder: Path, tmp_path: Path, *arguments: str, is_open: bool = False
) -> tuple[Config, str]:
    """Return the settings of a script with stand-ins, and the text of its translation, which may be open."""
    names = dict.fromkeys(POLICIES, "policy") | dict.fromkeys(REWARD_MODELS, "reward") | OTHERS
    for name, file in names.items():
        text = text.replace(name, str(folder / file))
    translation = translate(SYSTEMS[option], [text])
    assert bool(translation.findings) == is_open
    path = tmp_path / "translated.yaml"
    path.write_text(translation.text)
    parser: SettingsParser = make_parser("colocated.py", None)
    config, _ = read_settings(parser, ["--config", str(path), "--run.dir", str(tmp_path / "runs"), *arguments])
    return config, translation.text


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SCRIPTS]
)
def test_a_script_passes_check_and_plan_for_its_gpus(
    name: str, stand_ins: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    option, text, num_gpus, num_nodes = SCRIPTS[name]
    config, translated = configured(option, text, stand_ins, tmp_path)
    nodes = f" --nodes {num_nodes}" if num_nodes > 1 else ""
    assert f"--gpus {num_gpus}{nodes}\n" in translated
    machine = Machine(gpu_memory_bytes=80 * GIB, num_gpus=num_gpus, num_nodes=num_nodes)
    lines = check_run_elsewhere(config, machine)
    assert lines[0] == "settings, models and data: no mistakes"
    assert lines[1] == f"ranks: {num_gpus * num_nodes}, with a GPU each; nodes: {num_nodes}"
    num_prompts = len(config.prompts.training_sources) * NUM_ROWS
    assert lines[2].startswith(f"prompts: {num_prompts} for training")
    assert show_plan(config, machine)
    capsys.readouterr()


def test_an_asynchronous_script_says_that_it_runs_colocated(stand_ins: Path, tmp_path: Path) -> None:
    option, text, *_ = SCRIPTS["openrlhf asynchronous"]
    _, translated = configured(option, text, stand_ins, tmp_path)
    lost = translated.partition("# Not carried over, and it changes the run:\n")[2].partition("\n#\n")[0]
    assert "--train.async_enable: the run is colocated" in lost


def test_a_script_of_images_ends_with_one_sentence() -> None:
    with pytest.raises(ConfigError, match=re.escape("--data.max_images_per_prompt 1: models read text only")) as error:
        translate(SYSTEMS["--from-openrlhf"], [OPENRLHF_IMAGES])
    assert len(error.value.messages) == 1


def test_a_script_of_an_agent_runs_its_file_as_the_environment() -> None:
    found = yaml.safe_load(translate(SYSTEMS["--from-openrlhf"], [OPENRLHF_AGENT]).text)
    assert found["environment"] == {
        "name": "openrlhf",
        "arguments": {"path": "examples/python/agent_func.py"},
        "max_turns": 37120,  # half of --data.max_len, as tokens of a response: a turn has at least one
        "rewritten_history": "keep",
    }
    assert "reward" not in found["models"] and not {"functions", "remote_urls"} & found["reward"].keys()


SIZES = (
    "rollout.rollout_batch_size",
    "update.mini_batch_size",
    "prompts.max_prompt_tokens",
    "rollout.max_response_tokens",
    "reward.overlong_buffer",
)
STEPS = {
    "openrlhf dapo": ("hf", 64),
    "openrlhf ppo": ("vllm", 64),
    "openrlhf prorl": ("hf", 128),
    "coati ppo": ("hf", 16),
    "coati grpo": ("vllm", 16),
    "verl grpo": ("vllm", 64),
    "verl gspo": ("hf", 128),
    "trl grpo": ("hf", 32),
}
"""Script -> engine of a real step on the CPU, and the factor that divides its sizes; it also has one GPU per engine."""
OFFLINE = {"WANDB_MODE": "offline"}
"""Environment variable of a step, as some scripts use Weights & Biases."""


def train_a_step(config: Config, tmp_path: Path, engine: str, factor: int) -> dict[str, float]:
    """Return the metrics of a real step with the settings of translated.yaml, whose sizes are divided by a factor."""
    divided = {size: get_setting(config, size) // factor for size in SIZES if get_setting(config, size) >= factor}
    others = {
        "run.dir": tmp_path / "runs",
        "run.num_steps": 1,
        "run.resume": "never",
        "models.reward": config.models.reward,
        "rollout.engine": engine,
        "rollout.tensor_parallel_size": 1,
    }
    given = {name: value for name, value in (divided | others).items() if value is not None}
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    command = [sys.executable, ROOT / "launch" / "colocated.py", "--config", tmp_path / "translated.yaml", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500, env=os.environ | PATHS | OFFLINE)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = (tmp_path / "runs" / config.run.name / "metrics.jsonl").read_text().splitlines()
    return json.loads(rows[-1])


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_script_trains_a_step(name: str, stand_ins: Path, tmp_path: Path) -> None:
    (option, text, *_), (engine, factor) = SCRIPTS[name], STEPS[name]
    config, _ = configured(option, text, stand_ins, tmp_path)
    row = train_a_step(config, tmp_path, engine, factor)
    assert row["step"] == 1
    assert math.isfinite(row["actor/loss"])


def test_an_untrained_reward_model_is_refused(stand_ins: Path, tmp_path: Path) -> None:
    config, _ = configured(*COATI_RAY, stand_ins, tmp_path, "--models.reward", str(stand_ins / "policy"), is_open=True)
    with pytest.raises(ConfigError, match="holds no trained `score` head"):
        check_run_elsewhere(config, Machine(gpu_memory_bytes=80 * GIB))


@pytest.mark.slow
def test_the_default_command_of_coati_on_ray_starts_with_a_reward_model(stand_ins: Path, tmp_path: Path) -> None:
    config, _ = configured(*COATI_RAY, stand_ins, tmp_path, "--models.reward", str(stand_ins / "reward"), is_open=True)
    assert (config.update.zero_stage, config.responses_per_step) == (1, 80)
    assert math.isfinite(train_a_step(config, tmp_path, "hf", 8)["actor/loss"])
