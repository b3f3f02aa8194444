"""Write the settings and the plan of each recipe into docs/recipes.md: python docs/generate_recipes.py.

The page marks a place with `<!-- settings: NAME -->` or `<!-- plan: NAME -->`; the block of code after it is replaced.
A plan reads the model's config.json alone, so a folder with that file, in the shape of the real model, is enough.
"""

import dataclasses
import io
import re
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from transformers import Qwen2Config

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid_rl.config import Config
from hybrid_rl.planning.cards import CARDS
from hybrid_rl.planning.plan import Machine
from hybrid_rl.validate import validate
from launch.colocated import parse
from launch.plan import WIDTH, show_plan

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "recipes.md"
CONFIGS = ROOT / "launch" / "configs" / "recipes"
SHAPES = {
    "Qwen2.5-1.5B-Instruct": (28, 1536, 8960, 12, 2, 151936, True),
    "Qwen2.5-3B-Instruct": (36, 2048, 11008, 16, 2, 151936, True),
    "Qwen2.5-7B-Instruct": (28, 3584, 18944, 28, 4, 152064, False),
}
"""Layers, width, feed-forward width, heads, key heads, vocabulary, tied head: the published config.json of each."""
MACHINES = {
    "grpo_1.5b_1gpu": ("h100", 1),
    "grpo_7b_2gpu": ("h100", 2),
    "grpo_7b_8gpu": ("h100", 8),
    "lora_3b_24gb": ("rtx4090", 1),
    "lora_7b_24gb": ("rtx4090", 1),
}
"""Recipe -> card and number of cards."""
BLOCK = re.compile(r"(<!-- (settings|plan): ([\w.]+) -->\n+```\w*\n).*?(```\n)", re.DOTALL)


def write_shape(folder: Path, model: str) -> None:
    """Write the config.json of a model."""
    layers, width, feed_forward, heads, key_heads, words, is_tied = SHAPES[model]
    config = Qwen2Config(
        architectures=["Qwen2ForCausalLM"],
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
        dtype="bfloat16",
    )
    config.save_pretrained(folder)


def read_recipe(name: str) -> Config:
    """Return the checked settings of a recipe."""
    return validate(parse(["--config", str(CONFIGS / f"{name}.yaml")])[0])


def plan(name: str) -> tuple[str, bool]:
    """Return what `launch/colocated.py plan` prints for a recipe, and whether it fits."""
    config, (card, num_gpus) = read_recipe(name), MACHINES[name]
    machine = Machine(gpu_memory_bytes=CARDS[card].memory_bytes, num_gpus=num_gpus, card=CARDS[card])
    with tempfile.TemporaryDirectory() as folder:
        write_shape(Path(folder), Path(config.models.actor).name)
        config = dataclasses.replace(config, models=dataclasses.replace(config.models, actor=folder))
        output = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
        fits = show_plan(config, machine, Console(file=output, width=WIDTH, highlight=False, color_system=None))
        output.seek(0)
    return "".join(line.rstrip() + "\n" for line in output), fits


def page() -> str:
    """Return the page with its blocks as they should be."""

    def block(match: re.Match[str]) -> str:
        head, kind, name, end = match.groups()
        body = plan(name)[0] if kind == "plan" else (CONFIGS / f"{name}.yaml").read_text(encoding="utf-8")
        return head + body + end

    return BLOCK.sub(block, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
