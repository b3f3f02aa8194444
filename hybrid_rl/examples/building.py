"""Builds what an example starts with: a policy that knows the form of a turn, and rows of data, in a minute or two."""

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from hybrid_rl import demo
from hybrid_rl.config import Config
from hybrid_rl.demo import DemoSettings, batches, build_once, cache_dir, fit, llama_config, padded
from hybrid_rl.environments.loading import check_name
from hybrid_rl.examples.transcripts import EXAMPLES, Transcript

FOLDER = Path(__file__).parent
NUM_TRAIN, NUM_HELDOUT = 16_000, 512
MAX_TOKENS = 128
"""Longest conversation."""
FILES = {"policy": "policy", "train": "train.jsonl", "heldout": "heldout.jsonl"}
"""Second part of a placeholder such as `guessing:policy` -> file or folder."""


def sampled_loss(policy: LlamaForCausalLM, conversations: Sequence[Transcript]) -> Tensor:
    """Return the mean negative log-probability of the policy's own tokens in transcripts."""
    ids = padded([ids for ids, _ in conversations])
    is_sampled = padded([[int(x) for x in mask] for _, mask in conversations]).bool()[:, 1:]
    logits = policy(input_ids=ids[:, :-1]).logits
    return F.cross_entropy(logits[is_sampled], ids[:, 1:][is_sampled])


def write_example(folder: Path, name: str, seed: int) -> None:
    """Write the policy and the data of an example into a folder."""
    example, settings, rng = EXAMPLES[name], DemoSettings(), random.Random(seed)
    tokenizer = example.make_tokenizer()
    played = [example.make_transcript(tokenizer, rng) for _ in range(NUM_TRAIN + NUM_HELDOUT)]
    policy = LlamaForCausalLM(llama_config(settings, vocab_size=len(tokenizer), max_tokens=MAX_TOKENS))
    train = [transcript for _, transcript in played[:NUM_TRAIN]]
    losses = (sampled_loss(policy, batch) for batch in batches(train, example.batch_size, rng))
    fit(policy, losses, num_steps=example.num_steps, lr=settings.policy_lr)
    policy.save_pretrained(folder / "policy")
    tokenizer.save_pretrained(folder / "policy")
    for file, rows in {"train": played[:NUM_TRAIN], "heldout": played[NUM_TRAIN:]}.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row, _ in rows))


def build_example(name: str, cache_dir: Path, *, seed: int = 0, report: Callable[[str], None] = print) -> Path:
    """Return the folder of an example, which is built unless `cache_dir` has it for this seed and code.

    Args:
        report: is called with a line before a build.
    Raises:
        ConfigError: the example needs a package that is not installed.
    """
    if name == "gridworld":
        check_name("gymnasium")

    def write(folder: Path) -> None:
        report(f"{name}: building policy and data in {cache_dir}, a minute or two")
        write_example(folder, name, seed)

    code = "".join(path.read_text() for path in [Path(demo.__file__), *sorted(FOLDER.glob("*.py"))])
    return build_once(cache_dir, f"{name} {seed} {code}", write, seed=seed)


def resolve_examples(config: Config, report: Callable[[str], None] = print) -> Config:
    """Return the config with names such as `guessing:policy` replaced by paths.

    For each example there are the names `policy`, `train` and `heldout`, and `environment` for the class of its file.
    """
    settings = config.environment

    def resolve(value: Any) -> Any:
        name, _, file = value.partition(":") if isinstance(value, str) else ("", "", "")
        if name in EXAMPLES and file == "environment":
            return f"{FOLDER / name}.py:{EXAMPLES[name].class_name}"
        if name in EXAMPLES and file in FILES:
            return str(build_example(name, cache_dir(), report=report) / FILES[file])
        return value

    prompts = replace(config.prompts, path=resolve(config.prompts.path), eval_path=resolve(config.prompts.eval_path))
    arguments = {key: resolve(value) for key, value in settings.arguments.items()}
    environment = replace(settings, name=resolve(settings.name), arguments=arguments)
    models = replace(config.models, actor=resolve(config.models.actor))
    return replace(config, models=models, prompts=prompts, environment=environment)
