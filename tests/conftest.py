"""Fixtures and helpers of several test files: tiny models, responses, training steps, and two ranks."""

import dataclasses
import faulthandler
import gc
import itertools
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    LlamaForSequenceClassification,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2Config,
)

from hybrid_rl.batch import Packed, Prompt, Rollout, Turn, make_train_batch, pack
from hybrid_rl.config import Config, ModelsConfig, PromptsConfig, RewardConfig
from hybrid_rl.distributed.joining import FOLDER_VARIABLE
from hybrid_rl.engines import RolloutEngine
from hybrid_rl.engines.huggingface import HuggingFaceEngine
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, plan_buckets
from tests.programs import PATHS, ForkServer, running_fork_servers

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# How long an example takes depends on the load of the machine.
settings.register_profile("any_load", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any_load")


COPY_ENGINE_FILES = {
    f"tests/e2e/{name}.py" for name in ("test_alias", "test_conversations", "test_recipes_vllm", "test_tensor_parallel")
}
"""Files that share the fixture copy_engine, an engine that takes half a minute to start."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give whole files to a worker of pytest-xdist, and all files that share an engine to the same one."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduler(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.split("::")[0]
            return "copy_engine" if file in COPY_ENGINE_FILES else file

    return Scheduler(config, log)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the e2e files first, since they take longest, and tests marked last_in_file at the end of their file."""
    files = list(dict.fromkeys(item.path for item in items))
    files.sort(key=lambda path: "e2e" not in path.parts)
    items.sort(key=lambda item: (files.index(item.path), bool(item.get_closest_marker("last_in_file"))))


@pytest.fixture(scope="module", autouse=True)
def _imports_are_no_garbage() -> None:
    """Keep the garbage collector from the imported modules: DeepSpeed collects six times per engine."""
    gc.collect()
    gc.freeze()


STALL_LIMIT_S = 900.0
"""Seconds without a finished test, which must exceed the time limit of a test."""
_stall: dict[str, Any] = {}


def pytest_configure(config: pytest.Config) -> None:
    is_worker = hasattr(config, "workerinput")  # it ends first, so that its threads are shown
    _stall.update(timeout=STALL_LIMIT_S if is_worker else STALL_LIMIT_S + 60.0, file=os.dup(2))  # pytest redirects 2
    expect_progress()


def expect_progress() -> None:
    """Let this process show where its threads are and exit, unless it is called again within the limit."""
    faulthandler.dump_traceback_later(**_stall, exit=True)


def pytest_runtest_logreport() -> None:
    """Start the limit anew; both pytest-xdist's workers and the process that collects their reports call this."""
    expect_progress()


def pytest_unconfigure() -> None:
    faulthandler.cancel_dump_traceback_later()
    gc.unfreeze()  # otherwise C++ libraries warn at exit about objects that were never freed


WORDS = ["<eos>", "<bos>", *"0123456789", "+", "=", *"abcdefghijklmnopqrstuvwxyz"]


def make_tokenizer() -> PreTrainedTokenizerBase:
    """Return a tokenizer with one token per character, whose padding is its EOS."""
    core = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<eos>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    core.decoder = decoders.Fuse()  # texts of tokens have no spaces between them
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


def write_tiny(root: Path) -> None:
    """Write the folders `policy` and `reward`, `prompts.jsonl` (10 rows) and `heldout.jsonl` (6 rows)."""
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


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what write_tiny writes."""
    root = tmp_path_factory.mktemp("tiny")
    write_tiny(root)
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


def sync_weights(engine: RolloutEngine, tensors: Mapping[str, Tensor]) -> None:
    """Give an engine of this process copies of all its weights, without a trainer."""
    plan = plan_buckets([(name, tuple(t.shape), t.dtype) for name, t in tensors.items()], 1 << 30)
    bucket = IpcBucket(bucket_bytes(plan), torch.device("cpu"))
    engine.open_bucket(bucket.handle(), plan)
    for slot in plan[0]:
        slot.view(bucket.tensor).copy_(tensors[slot.name])
    engine.load_bucket(0)
    engine.finish_sync()


def policy_tensors(tiny: Path) -> dict[str, Tensor]:
    """Return name -> weight of the tiny policy."""
    module = load_actor(str(tiny / "policy"), ModelsConfig(), torch.device("cpu"))
    return {name: parameter.detach() for name, parameter in module.model.named_parameters()}


@pytest.fixture(scope="session")
def hf_engine(tiny: Path) -> HuggingFaceEngine:
    """An engine of transformers that has received the weights of the tiny policy."""
    engine = HuggingFaceEngine(str(tiny / "policy"), dtype=torch.float32, device=torch.device("cpu"))
    sync_weights(engine, policy_tensors(tiny))
    return engine


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
    prefill: str = "",
    answer: str | list[str] | None = None,
    turns: Sequence[Turn] = (),
) -> Rollout:
    """Return a response to a prompt.

    Args:
        sequence_id:      None takes prompt_id, as for one response per prompt.
        rollout_logprobs: None gives every sampled token -1.
    """
    num_sampled = sum(t.num_tokens for t in turns if t.is_sampled) if turns else len(response_ids)
    return Rollout(
        prompt=Prompt(
            prompt_id=prompt_id, text=prompt_text, token_ids=list(prompt_ids), prefill=prefill, answer=answer
        ),
        sequence_id=prompt_id if sequence_id is None else sequence_id,
        response_ids=list(response_ids),
        rollout_logprobs=[-1.0] * num_sampled if rollout_logprobs is None else list(rollout_logprobs),
        is_truncated=is_truncated,
        text=text,
        turns=list(turns),
    )


def make_turns(*lengths: int) -> list[Turn]:
    """Return turns of some lengths: a positive number of sampled tokens, a negative one of an observation's."""
    return [Turn(role="assistant" if n > 0 else "tool", num_tokens=abs(n)) for n in lengths]


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


@pytest.fixture(scope="session")
def fork_servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[ForkServer]]:
    """Two servers, which run two programs at the same time."""
    with running_fork_servers(*(tmp_path_factory.mktemp("forks") for _ in range(2))) as servers:
        yield servers


@pytest.fixture(scope="session")
def on_two_ranks(
    tiny: Path, tmp_path_factory: pytest.TempPathFactory, fork_servers: list[ForkServer]
) -> Callable[[str], list[Any]]:
    """Return a function that runs the program `file` in two processes over gloo and returns what each rank saves.

    The program's arguments are the folder in which it saves rank<i>.pt, and the folder of the tiny models.
    """

    def run(file: str) -> list[Any]:
        folder = tmp_path_factory.mktemp("two_ranks")
        common = {FOLDER_VARIABLE: str(folder), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
        common |= {**PATHS, "OMP_NUM_THREADS": "1"}
        for rank, server in enumerate(fork_servers):
            environment = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            server.start(file, str(folder), str(tiny), environment=environment)
        ended = [server.wait() for server in fork_servers]
        assert [e.code for e in ended] == [0, 0], "".join(e.output[-3000:] for e in ended)
        return [torch.load(folder / f"rank{rank}.pt") for rank in range(2)]

    return run
