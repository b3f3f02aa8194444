"""Write what fits on cards of 80 GB into docs/large-models.md: python docs/generate_large_models.py.

The page marks the place of a table with `<!-- fits: MODE -->`; the lines up to the next blank line are replaced. Every
row is the first alternative that `hybrid_rl.planning.advice` finds for the published shape of a model.
"""

import functools
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from transformers import LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3MoeConfig

sys.path.insert(0, str(Path(__file__).parents[1]))

from hybrid_rl.config import (
    AdvantageConfig,
    Config,
    LoraConfig,
    ModelsConfig,
    PromptsConfig,
    RewardConfig,
    RolloutConfig,
    UpdateConfig,
)
from hybrid_rl.planning.advice import Alternative, find_fitting_settings, most_saving
from hybrid_rl.planning.cards import CARDS
from hybrid_rl.planning.plan import GIB, Machine, Plan
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.rates import rates_of
from hybrid_rl.planning.shapes import Shapes, read_shapes
from hybrid_rl.planning.simulator import simulate

PAGE = Path(__file__).parents[1] / "docs" / "large-models.md"
CARD = CARDS["h100"]
NODE_MEMORY_PER_CARD = 256 * GIB
NODES = {1: (1, 1), 2: (2, 1), 8: (8, 1), 16: (8, 2)}
"""Number of cards -> cards of a node, and nodes."""
LORA_RANK = 32
BLOCK = re.compile(r"(<!-- fits: (\w+) -->\n\n).*?(\n\n|\Z)", re.DOTALL)


def qwen2(
    layers: int, width: int, feed_forward: int, heads: int, key_heads: int, words: int, is_tied: bool
) -> Qwen2Config:
    """Return the configuration of a Qwen2.5 model."""
    return Qwen2Config(
        num_hidden_layers=layers,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        vocab_size=words,
        tie_word_embeddings=is_tied,
        max_position_embeddings=32768,
    )


MODELS: dict[str, PretrainedConfig] = {
    "1.5B": qwen2(28, 1536, 8960, 12, 2, 151936, True),
    "7B": qwen2(28, 3584, 18944, 28, 4, 152064, False),
    "14B": qwen2(48, 5120, 13824, 40, 8, 152064, False),
    "32B": qwen2(64, 5120, 27648, 40, 8, 152064, False),
    "70B": LlamaConfig(
        num_hidden_layers=80,
        hidden_size=8192,
        intermediate_size=28672,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=False,
        max_position_embeddings=131072,
    ),
    "30B-A3B": Qwen3MoeConfig(
        num_hidden_layers=48,
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        vocab_size=151936,
        tie_word_embeddings=False,
        max_position_embeddings=40960,
    ),
}
"""The published config.json of Qwen2.5 1.5B to 32B, Llama 3.1 70B and Qwen3-30B-A3B."""


def settings(folder: str, mode: str) -> Config:
    """Return the settings before anything is changed to make them fit: GRPO with a KL on 512 responses per step.

    Args:
        folder: of the model.
        mode: dense, which trains all weights, or lora.
    """
    return Config(
        models=ModelsConfig(actor=folder, lora=LoraConfig(rank=LORA_RANK if mode == "lora" else 0)),
        prompts=PromptsConfig(path="prompts.jsonl", max_prompt_tokens=512),
        rollout=RolloutConfig(rollout_batch_size=64, group_size=8, max_response_tokens=1536),
        reward=RewardConfig(functions=["math"]),
        advantage=AdvantageConfig(estimator="grpo", kl_coef=0.001, kl_in="loss", kl_estimator="k3"),
        update=UpdateConfig(mini_batch_size=128, micro_batch_tokens=16384),
    )


@functools.cache
def read(model: str, mode: str) -> tuple[Config, Shapes]:
    """Return the settings for a model and the sizes of its models."""
    with tempfile.TemporaryDirectory() as folder:
        MODELS[model].save_pretrained(folder)
        config = settings(folder, mode)
        return config, read_shapes(config)


def machine(num_cards: int) -> Machine:
    """Return the machine with a number of cards."""
    num_gpus, num_nodes = NODES[num_cards]
    return Machine(
        gpu_memory_bytes=CARD.memory_bytes,
        num_gpus=num_gpus,
        num_nodes=num_nodes,
        card=CARD,
        backend="triton",
        host_memory_bytes=num_gpus * NODE_MEMORY_PER_CARD,
    )


def find(model: str, mode: str, num_cards: int) -> tuple[Alternative | None, Plan]:
    """Return the settings with which a model fits, and their plan; without any, None and the plan that saves most."""
    config, shapes = read(model, mode)
    start = Alternative(config=config, machine=machine(num_cards))
    found = find_fitting_settings(start, shapes)
    return found, make_plan((found or most_saving(start)).config, start.machine, shapes)


def lack(plan: Plan) -> str:
    """Return what the settings that save most would still need."""
    if plan.missing_bytes:
        needed = max(plan.moment_bytes, plan.peak(plan.fullest_phase))
        return f"{needed / GIB:,.0f} GiB of a GPU with all that saves memory"
    return f"{plan.peak_host_bytes / GIB:,.0f} GiB of a node with the optimizer on the host"


def row(model: str, mode: str, num_cards: int) -> str:
    """Return the row of the table for a model on a number of cards."""
    found, plan = find(model, mode, num_cards)
    cells = [model, str(num_cards)]
    if found is None:
        cells += [f"**does not fit**: {lack(plan)}", "", "", ""]
    else:
        peak = max(plan.moment_bytes, plan.peak(plan.fullest_phase))
        _, shapes = read(model, mode)
        time = simulate(found.config, found.machine, shapes, plan, rates_of(CARD))
        changed = [f"`{override.removeprefix('--')}`" for override in found.overrides]
        changed += ["reference sharded"] * plan.shards_frozen
        is_on_host = found.config.update.actor.kind == "cpu_adam"
        seconds = "not predicted" if is_on_host else f"{time.total_s:,.0f}"
        cells += [", ".join(changed) or "as given", f"{peak / GIB:.0f}", f"{plan.peak_host_bytes / GIB:,.0f}", seconds]
    return f"| {' | '.join(cells)} |"


def table(mode: str) -> Iterator[str]:
    """Yield the lines of the table of a mode."""
    yield "| Model | Cards | Fits with | GiB of a GPU | GiB of a node | Seconds of a step |"
    yield "|---|---|---|---|---|---|"
    for model in MODELS:
        for num_cards in NODES:
            yield row(model, mode, num_cards)


def page() -> str:
    """Return the page with its tables as they should be."""

    def block(match: re.Match[str]) -> str:
        head, mode, end = match.groups()
        return head + "\n".join(table(mode)) + end

    return BLOCK.sub(block, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
