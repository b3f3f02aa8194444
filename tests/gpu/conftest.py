"""GPU tests: `python -m pytest -m gpu tests/gpu` on a machine with a GPU; each needs about two minutes."""

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

ROOT = Path(__file__).parents[2]


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_samples(folder: Path) -> list[dict[str, int]]:
    """Return the samples of rank 0's GPU memory: bytes `used` in all, and reserved by PyTorch for the `trainer`."""
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [event["args"] for event in events if event["name"] == "device_memory"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The files of a finished run."""

    rows: list[dict[str, float]]
    """Metrics, a row per step."""
    responses: dict[int, dict[str, Any]]
    """Responses of the first step by prompt id."""
    trainer_peak: int
    """Largest number of bytes that PyTorch reserved for the trainer of rank 0; NCCL and engines do not count."""

    def assert_same_first_step(self, other: "RunResult") -> None:
        """Both runs sample the same tokens, except where rounding decides, which differs with the batches of an engine.

        Rewards of equal responses agree within 1e-3. Means over all responses, and values that bfloat16 rounds
        differently in another packing, agree within 5 %.
        """
        for name in ("rollout/logprob_gap", "actor/loss", "actor/grad_norm", "critic/loss", "time/step"):
            print(name, [row[name] for row in self.rows], [row[name] for row in other.rows])
        print("peak of the trainer", self.trainer_peak, other.trainer_peak)
        pairs = [(row, other.responses[number]) for number, row in self.responses.items()]
        same = [(ours, theirs) for ours, theirs in pairs if ours["response"] == theirs["response"]]
        print(f"{len(same)} of {len(pairs)} responses are the same")
        assert len(pairs) == 64 and len(same) >= 0.85 * len(pairs)
        for ours, theirs in same:
            assert theirs["reward"] == pytest.approx(ours["reward"], rel=1e-3, abs=1e-6)
        length = "rollout/response_length"
        assert other.rows[0][length] == pytest.approx(self.rows[0][length], rel=1e-3)
        for name in ("kl", "actor/entropy", "actor/grad_norm", "critic/loss", "critic/grad_norm"):
            assert other.rows[0][name] == pytest.approx(self.rows[0][name], rel=0.05, abs=1e-3)
        assert max(row["rollout/logprob_gap"] for row in other.rows) < 0.02


@pytest.fixture(scope="session")
def engine_bytes() -> Callable[[Path], list[int]]:
    """Return a function that reads the bytes of the GPU outside the trainer, in the second half of a run's samples."""

    def read(folder: Path) -> list[int]:
        samples = read_samples(folder)
        return [sample["used"] - sample["trainer"] for sample in samples[len(samples) // 2 :]]

    return read


@pytest.fixture
def launch() -> Callable[..., Path]:
    """Return a function that runs a script of launch/ with settings and arguments and returns the run's folder."""

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


def settings(small: Path, folder: Path, changes: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Return settings of PPO with four models that verify every tensor in every weight sync, with some changes."""
    base: dict[str, dict[str, Any]] = {
        "run": {"name": "run", "dir": str(folder), "num_steps": 3, "eval_every_steps": 0, "resume": "never"},
        "models": {"actor": str(small / "policy"), "reward": str(small / "reward")},
        "prompts": {"path": str(small / "prompts.jsonl"), "answer_column": None, "max_prompt_tokens": 64},
        "rollout": {
            "rollout_batch_size": 64,
            "max_response_tokens": 64,
            "kv_cache_memory_bytes": 2 << 30,
            "enforce_eager": True,
        },
        "advantage": {"kl_coef": 0.05},
        "update": {"mini_batch_size": 32, "micro_batch_tokens": 4096, "actor": {"lr": 1e-5}, "critic": {"lr": 1e-5}},
        "sync": {"mode": "copy", "num_verified": 1000},
        "memory": {"swap": "off"},
        "checkpoint": {"every_steps": 0, "export": False},
    }
    assert changes.keys() <= base.keys()
    return {section: values | changes.get(section, {}) for section, values in base.items()}


@pytest.fixture
def train(small: Path, tmp_path: Path, launch: Callable[..., Path]) -> Callable[..., RunResult]:
    """Return a function that trains on `num_ranks` GPUs with some settings changed, in a folder of the given name."""

    def run(name: str, *, num_ranks: int = 2, by_ray: bool = False, **changes: dict[str, Any]) -> RunResult:
        folder = tmp_path / name
        folder.mkdir()
        changed = settings(small, folder, changes)
        if by_ray:
            result = launch(changed, "--address", "local", "--num_workers", str(num_ranks), script="ray_cluster.py")
        else:
            result = launch(changed, "--num_processes", str(num_ranks))
        responses = {row["prompt_id"]: row for row in read_lines(result / "rollouts" / "step_000001.jsonl")}
        peak = max(sample["trainer"] for sample in read_samples(result))
        return RunResult(rows=read_lines(result / "metrics.jsonl"), responses=responses, trainer_peak=peak)

    return run
