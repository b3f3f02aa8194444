"""What the documentation says of the code is true, and what it links to exists."""

import ast
import re
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from docs import draw_diagrams, draw_residency, generate_configuration
from hybrid_rl.machine.packages import ENGINES, SUPPORTED
from hybrid_rl.validate import validate
from launch.colocated import parse
from launch.commands import COMMANDS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *ROOT.glob("*.md"), ROOT / "profiling" / "README.md"])
LINK = re.compile(r"\]\(([^)\s]+)\)")


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as the site and common viewers of Markdown make them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_of_the_repository(page):
    for link in LINK.findall(page.read_text()):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_files_of_the_map_exist():
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("| Question | Answer |")[2].partition("\n\n")[0]
    paths = re.findall(r"`([\w/]+(?:/|\.py))`", table)
    assert len(paths) >= 10 and [path for path in paths if not (ROOT / "hybrid_rl" / path).exists()] == []


def test_the_tests_that_hold_the_guarantees_exist():
    named = re.findall(r"`((?:tests|profiling)/[\w/]+\.py)(?:::(\w+))?`", (DOCS / "guarantees.md").read_text())
    assert len(named) >= 15
    for path, function in named:
        assert (ROOT / path).is_file(), path
        names = {
            node.name for node in ast.walk(ast.parse((ROOT / path).read_text())) if isinstance(node, ast.FunctionDef)
        }
        assert not function or function in names, f"{path}::{function}"


def test_the_site_lists_every_page():
    navigation = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[2]
    assert sorted(re.findall(r"[\w-]+\.md", navigation)) == sorted(page.name for page in DOCS.glob("*.md"))


def test_readme_has_at_most_90_lines():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 90


def test_the_settings_of_the_readme_are_valid(tmp_path):
    (settings,) = re.findall(r"```yaml\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    (tmp_path / "my.yaml").write_text(settings)
    config = validate(parse(["--config", str(tmp_path / "my.yaml")])[0])
    assert config.reward.functions == ["my_rewards.py:has_answer"] and config.responses_per_step == 1024


def test_the_reward_function_of_the_readme_judges_as_it_says():
    (source,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(source, names)
    completions = [[{"role": "assistant", "content": text}] for text in ("it is 7", "it is 8")]
    assert names["has_answer"](prompts=[], completions=completions, answer=["7", "7"]) == [1.0, 0.0]


def test_commands_and_supported_versions_on_the_first_page_are_those_of_the_code():
    page = (DOCS / "index.md").read_text()
    assert re.findall(r"^\| `hybrid-rl (\w+)", page, re.MULTILINE) == [*COMMANDS]
    for text in (*SUPPORTED, ENGINES[0]):
        oldest, newest = (part.version for part in sorted(Requirement(text).specifier, key=lambda s: s.operator)[::-1])
        major, minor = newest.split(".")
        name = {"vllm": "vLLM", "deepspeed": "DeepSpeed"}.get(Requirement(text).name, Requirement(text).name)
        last = f"{major}.{int(minor) - 1}"
        assert f"{name} {oldest} to {last}" in page or (oldest == last and f"{name} {oldest}" in page), text


def test_the_page_of_settings_is_what_the_dataclasses_say():
    assert generate_configuration.PAGE.read_text() == generate_configuration.page(), (
        "write it anew: python docs/generate_configuration.py"
    )


def test_the_picture_of_residency_is_what_the_table_says():
    assert draw_residency.PICTURE.read_text() == draw_residency.draw(), "draw it anew: python docs/draw_residency.py"


@pytest.mark.parametrize("name", draw_diagrams.PICTURES)
def test_diagrams_are_what_the_script_draws(name):
    path = draw_diagrams.IMAGES / f"{name}.svg"
    assert path.read_text() == draw_diagrams.PICTURES[name](), "draw it anew: python docs/draw_diagrams.py"


def texts(folder: Path) -> str:
    """Return all text constants of the Python files in a folder, one a line; parts of an f-string stand apart."""
    trees = [ast.parse(path.read_text()) for path in sorted(folder.rglob("*.py"))]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    return "\n".join(node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str))


def test_messages_under_troubleshooting_are_messages_of_the_code():
    known = (
        "\n".join(texts(ROOT / folder) for folder in ("hybrid_rl", "launch", "requirements"))
        + (ROOT / "Makefile").read_text()
    )
    rows = [line.split(" | ")[0] for line in (DOCS / "troubleshooting.md").read_text().splitlines() if line[:1] == "|"]
    ours = [row.replace("\\|", "|") for row in rows if "vLLM:" not in row and "CUDA out of memory" not in row]
    messages = [message for row in ours for message in re.findall(r"`([^`]+)`", row)]
    fragments = [part.strip(" ;:[]()") for message in messages for part in message.split("...")]
    assert [part for part in fragments if len(part) > 8 and part not in known] == []
    assert len(fragments) > 40
