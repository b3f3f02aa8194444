"""GPU tests: `python -m pytest -m gpu tests/gpu` on a machine with a GPU; each needs about two minutes."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def engine_bytes() -> Callable[[Path], list[int]]:
    """Read what was in use on the GPU beside the trainer's tensors, at each look in the second half of a run."""

    def read(folder: Path) -> list[int]:
        events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
        looks = [event["args"] for event in events if event["name"] == "device_memory"]
        return [look["used"] - look["trainer"] for look in looks[len(looks) // 2 :]]

    return read


@pytest.fixture
def launch() -> Callable[..., Path]:
    """Run a script of launch/ with settings and further arguments to a good end; return the run's folder."""

    def run(settings: dict[str, dict[str, Any]], *arguments: str, script: str = "colocated.py") -> Path:
        folder = Path(settings["run"]["dir"])
        path = folder / "settings.yaml"
        path.write_text(yaml.safe_dump(settings))
        command = [sys.executable, f"launch/{script}", "--config", str(path), *arguments]
        ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=420)
        assert ended.returncode == 0, (ended.stdout + ended.stderr)[-6000:]
        return folder / settings["run"]["name"]

    return run


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> Path:
    """A folder with a random `policy` of 0.2B parameters, a `reward` model of the same shape, and `prompts.jsonl`."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    root = tmp_path_factory.mktemp("small")
    words = {word: i for i, word in enumerate(["<eos>", *(f"w{n}" for n in range(31_999))])}
    core = Tokenizer(models.WordLevel(words, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=896,
        intermediate_size=4864,
        num_hidden_layers=10,
        num_attention_heads=14,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=1,
        dtype="bfloat16",
    )
    for name, model_class in {"policy": LlamaForCausalLM, "reward": LlamaForSequenceClassification}.items():
        model_class(config).to(torch.bfloat16).save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    rows = [{"prompt": " ".join(f"w{(37 * i + 11 * k) % 31_999}" for k in range(8 + i % 24))} for i in range(64)]
    (root / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root
