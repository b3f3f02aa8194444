"""The recipes for real models: their settings are valid, and their plans are what the page shows."""

import pytest

from docs import generate_recipes


def test_there_is_a_machine_for_every_recipe():
    assert sorted(generate_recipes.MACHINES) == sorted(path.stem for path in generate_recipes.CONFIGS.glob("*.yaml"))


@pytest.mark.parametrize("name", generate_recipes.MACHINES)
def test_a_recipe_fits_as_the_page_says(name):
    page = generate_recipes.PAGE.read_text()
    plan, fits = generate_recipes.plan(name)
    assert fits and f"\nfits: {plan.partition('fits: ')[2].splitlines()[0]}\n" in page
    assert (generate_recipes.CONFIGS / f"{name}.yaml").read_text() in page
    assert plan in page, "write it anew: python docs/generate_recipes.py"
