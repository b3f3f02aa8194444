"""A snapshot continues training bit for bit, and under every other ZeRO stage too."""

from dataclasses import replace

import pytest
import torch

from hybrid_rl.config import ConfigError
from tests.engines.conftest import SETTINGS, STAGES, take_step, weights_of


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_loaded_snapshot_of_cpu_adam_continues_bit_for_bit(make_engine, pieces, tmp_path, stage):
    engine, other = (make_engine(stage, settings=replace(SETTINGS, kind="cpu_adam")) for _ in range(2))
    take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    other.load(tmp_path / "actor")
    assert take_step(other, pieces) == take_step(engine, pieces)
    theirs = weights_of(engine)
    assert all(torch.equal(weight, theirs[name]) for name, weight in weights_of(other).items())


@pytest.mark.parametrize("stage", STAGES)
def test_a_loaded_snapshot_continues_bit_for_bit(make_engine, pieces, tmp_path, stage):
    engine = make_engine(stage)
    for _ in range(2):
        take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    expected = [(engine.lr, take_step(engine, pieces)) for _ in range(2)]
    other = make_engine(stage)
    other.load(tmp_path / "actor")
    assert [(other.lr, take_step(other, pieces)) for _ in range(2)] == expected
    theirs = weights_of(engine)
    for name, weight in weights_of(other).items():
        assert torch.equal(weight, theirs[name]), name


@pytest.mark.parametrize(
    "first, then, dtype",
    [(*stages, "float32") for stages in ((1, 3), (3, 2), (2, 1), (0, 3), (3, 0))]
    + [(*stages, "bfloat16") for stages in ((1, 3), (3, 2), (2, 1))],
)
def test_a_snapshot_continues_under_another_zero_stage(make_engine, pieces, tmp_path, first, then, dtype):
    engine = make_engine(first, dtype=dtype)
    for _ in range(2):
        take_step(engine, pieces)
    engine.snapshot().write(tmp_path / "actor", 0)
    other = make_engine(then, dtype=dtype)
    other.load(tmp_path / "actor")
    held, expected = weights_of(other), weights_of(engine)
    assert all(torch.equal(weight, expected[name]) for name, weight in held.items())
    assert [take_step(other, pieces) for _ in range(2)] == pytest.approx(
        [take_step(engine, pieces) for _ in range(2)], rel=1e-5 if dtype == "float32" else 1e-2
    )
    assert other.lr == engine.lr


def test_a_snapshot_of_another_model_is_refused(make_engine, tmp_path):
    engine = make_engine(2)
    taken = engine.snapshot()
    del taken.tensors["model.model.norm.weight/master"]
    taken.write(tmp_path, 0)
    with pytest.raises(ConfigError, match=r"another model: 1 tensors of .* such as model.model.norm.weight/master,"):
        engine.load(tmp_path)


def test_a_folder_without_snapshots_is_an_error(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="has no part"):
        make_engine(1).load(tmp_path)
