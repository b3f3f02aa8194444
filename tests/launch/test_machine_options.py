"""The machine that the options of `plan` and `check` describe."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from hybrid_rl.config import Config, ConfigError, as_dict
from hybrid_rl.planning.cards import CARDS
from hybrid_rl.planning.plan import GIB, Machine
from launch.check import check_run_elsewhere
from launch.colocated import check_only
from launch.machine_options import machine_here, parse_machine
from tests.conftest import VALID_CONFIG, change

NONE = {"gpu": None, "gpu_memory": None, "gpus": None, "nodes": None, "host_memory": None}


def parse(found: Machine | None = None, **options: object) -> Machine:
    return parse_machine(Namespace(**(NONE | options)), found)


@pytest.fixture
def config(tiny: Path, tmp_path: Path) -> Config:
    return change(
        VALID_CONFIG,
        {
            "run.dir": str(tmp_path / "runs"),
            "models.actor": str(tiny / "policy"),
            "models.reward": str(tiny / "reward"),
            "prompts.path": str(tiny / "prompts.jsonl"),
            "prompts.max_prompt_tokens": 8,
            "rollout.engine": "hf",
            "rollout.rollout_batch_size": 4,
            "rollout.max_response_tokens": 12,
            "update.mini_batch_size": 4,
        },
    )


def test_a_named_card_has_its_memory_and_another_size_replaces_it():
    assert parse(gpu="l40s") == Machine(gpu_memory_bytes=46068 << 20, card=CARDS["l40s"])
    assert parse(gpu="H100", gpu_memory="94GB", gpus=8, nodes=2, host_memory="1TiB") == Machine(
        gpu_memory_bytes=94 * 10**9, num_gpus=8, num_nodes=2, card=CARDS["h100"], host_memory_bytes=1 << 40
    )


def test_memory_alone_is_an_unknown_card_also_where_this_machine_has_a_known_one():
    here = Machine(gpu_memory_bytes=140 * GIB, card=CARDS["h200"])
    assert parse(here, gpu_memory="48GB") == Machine(gpu_memory_bytes=48 * 10**9)
    assert parse(here) == here


def test_a_card_that_is_not_known_is_refused_with_the_names_of_all(config):
    with pytest.raises(ConfigError, match=r"--gpu t4: must be one of rtx4090, .*, b200; .* give --gpu-memory alone"):
        parse(gpu="t4")


@pytest.mark.parametrize("name, card", [("NVIDIA H200", "h200"), ("Tesla T4", None)])
def test_without_options_the_card_of_this_machine_counts(monkeypatch, name, card):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    properties = SimpleNamespace(name=name, total_memory=139 * GIB)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    found = machine_here()
    assert (found.gpu_memory_bytes, found.card and found.card.name) == (139 * GIB, card)


def test_without_a_gpu_the_default_is_an_unknown_card_of_80_gib(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert machine_here() == Machine(gpu_memory_bytes=80 * GIB)


def test_a_card_that_lacks_bfloat16_is_refused_by_its_name(config):
    old = replace(CARDS["a10"], name="t4", capability=(7, 5))
    machine = Machine(gpu_memory_bytes=80 * GIB, card=old)
    half = change(config, {"models.dtype": "bfloat16"})
    with pytest.raises(ConfigError, match=r"bfloat16 needs compute capability 8\.0, and this is a t4"):
        check_run_elsewhere(half, machine)


def test_check_for_a_card_needs_no_number_of_gpus(config, tmp_path, capsys):
    (tmp_path / "my.yaml").write_text(yaml.safe_dump(as_dict(config)))
    assert check_only(["--config", str(tmp_path / "my.yaml"), "--gpu", "rtx4090"])
    assert "ranks: 1, with a GPU each; nodes: 1" in capsys.readouterr().out
