"""What the tests of several files share: tiny models, responses, steps, and two ranks."""

import dataclasses
import gc
import itertools
import json
import os
import select
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from hybrid_rl.batch import Packed, Prompt, Rollout, make_train_batch, pack
from hybrid_rl.config import Config, ModelsConfig, PromptsConfig, RewardConfig
from hybrid_rl.models.packed import packed_inputs

ROOT = Path(__file__).parents[1]
PATHS = {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# What a loaded machine takes for an example says nothing about the code.
settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """DeepSpeed collects garbage six times for each engine, each time through all that was ever imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # else C++ libraries tell at exit of what was never freed


WORDS = ["<eos>", "<bos>", *"0123456789", "+", "=", *"abcdefghijklmnopqrstuvwxyz"]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per character, whose padding is its EOS."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<eos>", pad_token="<eos>", bos_token="<bos>")


def tiny_config(*, tied: bool = True) -> LlamaConfig:
    """Return a two-layer Llama of 30,000 parameters with grouped heads of a size that vLLM's CPU kernels take."""
    return LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
        eos_token_id=0,
        pad_token_id=0,
        bos_token_id=1,
    )


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `policy`, `reward`, `prompts.jsonl` (10 rows) and `heldout.jsonl` (6 rows)."""
    root = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(1)
    tokenizer = make_tokenizer()
    config = tiny_config()
    config.num_labels = 1
    for name, model in {
        "policy": LlamaForCausalLM(config),
        "reward": LlamaForSequenceClassification(config),
    }.items():
        for parameter in model.parameters():
            if parameter.ndim >= 2:
                parameter.data.mul_(8)  # away from uniform, so that log-probs and greedy tokens tell weights apart
        model.save_pretrained(root / name)
        tokenizer.save_pretrained(root / name)
    for name, rows in {"prompts": range(10), "heldout": range(10, 16)}.items():
        lines = [json.dumps({"prompt": f"{i}+{i % 3}=", "answer": str(i + i % 3)}) for i in rows]
        (root / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    return root


VALID_CONFIG = Config(
    models=ModelsConfig(actor="a"), prompts=PromptsConfig(path="p"), reward=RewardConfig(functions=["exact_match"])
)
"""The least that `validate` accepts."""


def change(config: Any, changes: dict[str, Any]) -> Any:
    """Return the config with dotted fields replaced."""
    for name, value in changes.items():
        section, _, rest = name.partition(".")
        value = change(getattr(config, section), {rest: value}) if rest else value
        config = dataclasses.replace(config, **{section: value})
    return config


def make_rollout(
    prompt_ids: Sequence[int] = (1,),
    response_ids: Sequence[int] = (4,),
    *,
    prompt_id: int = 0,
    sequence_id: int | None = None,
    rollout_logprobs: Sequence[float] | None = None,
    is_truncated: bool = False,
    text: str = "",
    prompt_text: str = "",
    answer: str | None = None,
) -> Rollout:
    """Return a response to a prompt.

    Args:
        sequence_id:      None takes prompt_id, as for one response per prompt.
        rollout_logprobs: None gives every response token -1.
    """
    return Rollout(
        prompt=Prompt(prompt_id=prompt_id, text=prompt_text, token_ids=list(prompt_ids), answer=answer),
        sequence_id=prompt_id if sequence_id is None else sequence_id,
        response_ids=list(response_ids),
        rollout_logprobs=[-1.0] * len(response_ids) if rollout_logprobs is None else list(rollout_logprobs),
        is_truncated=is_truncated,
        text=text,
    )


@pytest.fixture
def five_rollouts() -> list[Rollout]:
    """Five responses, of 2, 4, 0, 3 and 1 tokens; the second and the fourth are truncated. The answers are 3 to 7."""
    responses = [[5, 0], [3, 4, 11, 9], [], [6, 12, 8], [0]]
    return [
        make_rollout(
            [2 + i] * (i + 1),
            ids,
            prompt_id=20 + i,
            sequence_id=i,
            is_truncated=i in (1, 3),
            text=text,
            answer=str(i + 3),
        )
        for i, (ids, text) in enumerate(zip(responses, ["3", "12", "", "4+", "5"], strict=True))
    ]


def packed_rows(*pieces: list[list[int]]) -> list[Packed]:
    """Return a micro-batch for each list of sequences, whose first two ids are the prompt."""
    ids = [sequence for piece in pieces for sequence in piece]
    rollouts = [make_rollout(sequence[:2], sequence[2:], prompt_id=i) for i, sequence in enumerate(ids)]
    batch, cpu = make_train_batch(rollouts), torch.device("cpu")
    ends = list(itertools.accumulate(map(len, pieces)))
    return [pack(batch, list(range(end - len(piece), end)), cpu) for end, piece in zip(ends, pieces, strict=True)]


@pytest.fixture(scope="session")
def pieces() -> list[Packed]:
    """Two micro-batches, of two responses and of one."""
    return packed_rows([[5, 9, 12, 30, 4], [8, 7, 6, 5, 4, 3, 0]], [[3, 2, 2, 0]])


@pytest.fixture(scope="session")
def train_step() -> Callable[[Any], float]:
    """Return a step of an actor's DeepSpeedEngine towards one response; its value is the gradient norm."""

    def step(trainer: Any) -> float:
        (packed,) = packed_rows([[5, 9, 3, 8, 0]])
        logprobs, _ = trainer.forward(
            **packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0
        )
        trainer.backward(-logprobs.sum(), is_last=True)
        return trainer.step()

    return step


@pytest.fixture(scope="session")
def qwen_7b() -> Qwen2Config:
    """The shape of Qwen2.5-7B."""
    return Qwen2Config(
        vocab_size=152064,
        hidden_size=3584,
        intermediate_size=18944,
        num_hidden_layers=28,
        num_attention_heads=28,
        num_key_value_heads=4,
        tie_word_embeddings=False,
    )


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a program ended."""

    code: int
    """Minus the signal that killed it."""
    output: str
    """Of both streams."""
    cpu_s: float
    """Seconds that it computed, which do not depend on what else the machine does."""


class ForkServer:
    """Runs one program at a time, each in a process of its own, forked from one that has imported the trainer."""

    def __init__(self, folder: Path) -> None:
        self._output = folder / "output.txt"
        self._server = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "fork_server.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **PATHS, "OMP_NUM_THREADS": "1"},
        )

    def start(self, *arguments: str, environment: Mapping[str, str], folder: Path = ROOT) -> None:
        """Start a program, given by its file and its arguments."""
        assert self._server.stdin
        self._output.unlink(missing_ok=True)
        job = {"arguments": arguments, "environment": dict(environment), "folder": str(folder)}
        self._server.stdin.write(json.dumps({**job, "output": str(self._output)}) + "\n")
        self._server.stdin.flush()

    def wait(self, timeout_s: float = 400.0) -> Ended:
        """Wait for the program that was started; what takes longer is killed, with all that it started."""
        assert self._server.stdout
        if not select.select([self._server.stdout], [], [], timeout_s)[0]:
            for process in psutil.Process(self._server.pid).children(recursive=True):
                process.kill()
        code, cpu_s = json.loads(self._server.stdout.readline())
        return Ended(code=code, output=self._output.read_text(), cpu_s=cpu_s)

    def close(self) -> None:
        """End the server."""
        self._server.communicate(timeout=60)


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ForkServer]]:
    """Two servers, for two programs at the same time."""
    servers = [ForkServer(tmp_path_factory.mktemp("forks")) for _ in range(2)]
    yield servers
    for server in servers:
        server.close()


@pytest.fixture(scope="session")
def on_two_ranks(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, fork_servers: list[ForkServer]
) -> Callable[[str], list[Any]]:
    """Return what the program `file` saves in two processes over gloo, as rank<i>.pt in the folder it is given.

    Its arguments are that folder and the one of the tiny models.
    """

    def run(file: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("two_ranks")
        # They meet here, as at torch's elastic agent: a port that rank 0 opens by itself, some time after it was found
        # free, may be another's by then.
        store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        common = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        common |= {**PATHS, "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "OMP_NUM_THREADS": "1"}
        for rank, server in enumerate(fork_servers):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            server.start(file, str(folder), str(tiny), environment=environment)
        ended = [server.wait() for server in fork_servers]
        assert [e.code for e in ended] == [0, 0], "".join(e.output[-3000:] for e in ended)
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    return run
