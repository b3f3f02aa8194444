"""The tables of what fits on cards of 80 GB are those that the planner makes."""

import pytest

from docs import generate_large_models
from hybrid_rl.planning.model_shape import ModelShape

SIZES = {"1.5B": 1.54e9, "7B": 7.62e9, "14B": 14.8e9, "32B": 32.8e9, "70B": 70.6e9, "30B-A3B": 30.5e9}
"""Parameters as the makers of the models publish them."""


def actor(model: str) -> ModelShape:
    return generate_large_models.read(model, "lora")[1].actor


@pytest.mark.parametrize("model", SIZES)
def test_the_models_of_the_tables_have_their_published_sizes(model):
    assert actor(model).num_params == pytest.approx(SIZES[model], rel=0.005)


@pytest.mark.parametrize("mode, model", [("dense", "7B"), ("dense", "70B"), ("lora", "7B"), ("lora", "30B-A3B")])
def test_rows_of_the_tables_are_up_to_date(mode, model):
    page = generate_large_models.PAGE.read_text()
    for num_cards in generate_large_models.NODES:
        row = generate_large_models.row(model, mode, num_cards)
        assert f"\n{row}\n" in page, "write it anew: python docs/generate_large_models.py"


@pytest.mark.slow
def test_the_page_is_up_to_date():
    assert generate_large_models.page() == generate_large_models.PAGE.read_text()


def test_a_row_fits_with_the_settings_that_it_names():
    found, plan = generate_large_models.find("70B", "lora", 16)
    assert found and plan.fits and plan.machine.num_ranks == 16
    assert "--update.zero_stage 3" in found.overrides and found.config.models.lora.rank == 32
    nothing, lacking = generate_large_models.find("70B", "dense", 2)
    assert nothing is None and lacking.missing_bytes > 0


def test_without_the_settings_that_a_row_names_nothing_fits():
    config, shapes = generate_large_models.read("32B", "dense")
    given = generate_large_models.make_plan(config, generate_large_models.machine(16), shapes)
    found, plan = generate_large_models.find("32B", "dense", 16)
    assert found and not given.fits and plan.fits
