"""Versions of packages, and compilers of what DeepSpeed compiles."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybrid_rl.config import Config, ConfigError, OptimizerConfig, UpdateConfig
from hybrid_rl.machine import packages
from hybrid_rl.machine.packages import ENGINES, SUPPORTED, check_compilers, check_packages, check_torch_of

ROOT = Path(__file__).parents[2]


def test_the_supported_versions_are_those_of_the_project():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    given = {Requirement(text).name: Requirement(text).specifier for text in project["dependencies"]}
    assert {Requirement(text).name: Requirement(text).specifier for text in SUPPORTED}.items() <= given.items()


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_the_locked_versions_are_supported(name):
    lines = (ROOT / "requirements" / f"{name}.txt").read_text().splitlines()
    locked = dict(line.split(";")[0].split(" ")[0].split("==") for line in lines if "==" in line and line[0].isalpha())
    wanted = [Requirement(text) for text in (*SUPPORTED, *ENGINES)]
    found = [text for text in wanted if text.name in locked]
    assert len(found) == len(SUPPORTED) + 1
    assert all(text.specifier.contains(locked[text.name]) for text in found)


def test_the_installed_packages_are_accepted():
    check_packages()


def test_packages_that_are_too_old_or_missing_are_all_reported(monkeypatch):
    versions = {"torch": "2.11.0+cu130", "deepspeed": "0.17.2", "vllm": "0.10.1", "transformers": None}
    monkeypatch.setattr(packages, "_version_of", versions.get)
    monkeypatch.setattr(packages, "requires", lambda name: ["torch==2.7.1"] if name == "vllm" else [])
    with pytest.raises(ConfigError) as error:
        check_packages()
    assert error.value.messages == (
        "transformers is not installed: run make install",
        "deepspeed 0.17.2: hybrid_rl supports >=0.19; run make install",
        "vllm 0.10.1: hybrid_rl supports >=0.26; run make install",
        "vllm 0.10.1 is built for torch==2.7.1, but torch 2.11.0+cu130 is installed: run make install, which takes "
        "versions that suit each other",
    )


def test_a_requirement_of_another_platform_or_extra_does_not_count():
    found = {"vllm": "1", "torch": "2.13.0+cpu"}
    check_torch_of("vllm", ["torch==2.13.0", 'torch==1.0; extra == "old"', 'torch==1.0; python_version < "3"'], found)


def test_an_optimizer_on_the_host_needs_a_compiler(monkeypatch, tmp_path):
    config = Config(update=UpdateConfig(actor=OptimizerConfig(kind="cpu_adam")))
    monkeypatch.setattr(packages, "_is_prebuilt", lambda operator: False)
    monkeypatch.setattr(packages.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-99")
    with pytest.raises(ConfigError, match=r"^update.actor.kind = cpu_adam: .* ninja and g\+\+-99 cannot be found"):
        check_compilers(config, offloads_with_deepspeed=False)
    check_compilers(replace(config, update=UpdateConfig()), offloads_with_deepspeed=False)
    for name in ("ninja", "g++-99"):
        (tmp_path / name).touch(mode=0o755)
    check_compilers(config, offloads_with_deepspeed=False)
