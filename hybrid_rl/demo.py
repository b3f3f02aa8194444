"""The demo: a task of sorting letters, a policy and a reward model for it, built in about a minute without a network.

A prompt is `sort d a k b :` and its answer `a b d k`. The policy is trained on demonstrations; most of those for long
prompts omit the last letter, so that the policy answers short prompts right and long ones wrong. The reward model is
trained on pairs of a right and a wrong response. PPO then improves the policy with the scores of the reward model.
"""

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, pre_tokenizers, processors
from tokenizers.models import WordLevel
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hybrid_rl.atomic import flush_tree
from hybrid_rl.config import Config
from hybrid_rl.config_data import paths_in, with_paths
from hybrid_rl.scratch import scratch_folder

LETTERS = list("abcdefghijkl")
SPECIAL = ["<pad>", "<bos>", "<eos>", "<unk>"]
WORDS = ["sort", ":", *LETTERS]
VOCABULARY = [*SPECIAL, *WORDS]
PAD, BOS, EOS = range(3)
MAX_RESPONSE_TOKENS = 8
PLACEHOLDERS = ["demo:policy", "demo:reward", "demo:train", "demo:heldout"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the task, the models and their training."""

    num_letters: tuple[int, ...] = (4, 4, 4, 5, 5, 6)  # the number of letters of a prompt is drawn from these
    long_prompt: int = 5  # smallest number of letters whose demonstrations may omit the last letter
    early_stops: float = 0.7  # fraction of the demonstrations for long prompts that omit the last letter
    num_train: int = 30_000
    num_heldout: int = 1_000
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 2
    head_dim: int = 32  # a size that vLLM's CPU attention supports
    policy_batch_size: int = 256
    policy_lr: float = 2e-3
    policy_steps: int = 160
    accuracy_window: tuple[float, float] = (0.3, 0.6)  # of greedy answers to held-out prompts, which PPO can improve
    num_pairs: int = 16_000  # training prompts with a corrupted answer
    num_sampled: int = 4_000  # of these, prompts for which wrong responses of the policy add pairs
    reward_batch_size: int = 128  # pairs
    reward_lr: float = 1e-3
    reward_steps: int = 200
    min_pairwise_accuracy: float = 0.97  # on held-out pairs


@dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """Files that `build_demo` writes: two Hugging Face folders, and two JSONL files with columns prompt and answer."""

    policy: Path
    reward: Path
    train: Path
    heldout: Path
    initial_accuracy: float  # fraction of held-out prompts that the policy answers exactly, decoding greedily
    pairwise_accuracy: float  # fraction of held-out pairs whose right response has the higher score


@dataclass(frozen=True)
class Example:
    """A prompt and its right response, as text and as token ids."""

    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]  # ends with EOS
    demonstration_ids: list[int]  # response that the policy is trained on: the answer, or without its last letter


Pair = tuple[Example, list[int]]
"""An example and the token ids of a response to it; in pairs for the reward model, a wrong response."""


def make_tokenizer(words: Sequence[str] = WORDS) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per word, which adds BOS."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *words])}
    backend = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend, **special)


def make_examples(settings: DemoSettings, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Example]:
    """Return the training examples, followed by the held-out ones; all prompts differ."""
    rows: dict[str, list[str]] = {}
    while len(rows) < settings.num_train + settings.num_heldout:
        letters = rng.choices(LETTERS, k=rng.choice(settings.num_letters))
        rows[f"sort {' '.join(letters)} :"] = sorted(letters)
    examples = []
    # Shuffled, because distinct short prompts run out first.
    for prompt, letters in rng.sample(list(rows.items()), len(rows)):
        omits_last = len(letters) >= settings.long_prompt and rng.random() < settings.early_stops
        shown = letters[:-1] if omits_last else letters
        answer_ids, demonstration_ids = ([*tokenizer.convert_tokens_to_ids(x), EOS] for x in (letters, shown))
        prompt_ids = [BOS, *tokenizer.convert_tokens_to_ids(prompt.split())]
        examples.append(Example(prompt, " ".join(letters), prompt_ids, answer_ids, demonstration_ids))
    return examples


def corrupt(answer_ids: list[int], rng: random.Random) -> list[int]:
    """Return a wrong response, one to three edits from the answer; most are sorted, and some lack EOS."""
    response = answer_ids[:-1]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        place = rng.randrange(len(response) or 1)
        before, here, after = response[:place], response[place : place + 1], response[place + 1 :]
        other = [rng.choice([rng.choice(answer_ids[:-1]), rng.randrange(EOS + 1, len(VOCABULARY))])]
        moved, inserted, replaced = before + after + here, before + here + other + after, before + other + after
        run_on = before + other * rng.randint(2, MAX_RESPONSE_TOKENS)
        response = rng.choice([moved, inserted, replaced, run_on, before + after, before])
    response = sorted(response) if rng.random() < 0.7 else response
    response = response[: MAX_RESPONSE_TOKENS - 1] + [EOS] * (rng.random() < 0.9)
    return response if response and response != answer_ids else corrupt(answer_ids, rng)


def padded(sequences: Sequence[list[int]], side: Literal["left", "right"] = "right") -> Tensor:
    """Return the sequences as one padded [B, T] tensor."""
    width = max(map(len, sequences))
    gaps = [[PAD] * (width - len(s)) for s in sequences]
    return torch.tensor([s + g if side == "right" else g + s for s, g in zip(sequences, gaps, strict=True)])


def batches(items: Sequence[T], size: int, rng: random.Random) -> Iterator[Sequence[T]]:
    """Yield batches endlessly, shuffled anew for each pass."""
    while True:
        order = rng.sample(items, len(items))
        yield from (order[i : i + size] for i in range(0, len(order) - size + 1, size))


def response_logits(policy: LlamaForCausalLM, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [B, T, V] of each token, the tokens [B, T], and a mask [B, T] of those of the response."""
    ids = padded([e.prompt_ids + response for e, response in pairs])
    starts = torch.tensor([[len(e.prompt_ids)] for e, _ in pairs])
    ends = starts + torch.tensor([[len(response)] for _, response in pairs])
    position = torch.arange(1, ids.shape[1])
    return policy(input_ids=ids[:, :-1]).logits, ids[:, 1:], (position >= starts) & (position < ends)


@torch.no_grad()
def greedy_accuracy(policy: LlamaForCausalLM, examples: Sequence[Example]) -> float:
    """Return the fraction of prompts that greedy decoding answers exactly.

    That is the case if each token of the answer is the likeliest one after its right predecessors, so one forward
    without generation is enough.
    """
    logits, targets, is_answer = response_logits(policy, [(e, e.answer_ids) for e in examples])
    return float(((logits.argmax(-1) == targets) | ~is_answer).all(dim=1).float().mean())


def llama_config(
    settings: DemoSettings, *, vocab_size: int = len(VOCABULARY), max_tokens: int = 64, **changes: Any
) -> LlamaConfig:
    """Return the config of a model."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=settings.hidden_size // settings.head_dim,
        head_dim=settings.head_dim,
        max_position_embeddings=max_tokens,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
        **changes,
    )


def fit(model: nn.Module, losses: Iterator[Tensor], *, num_steps: int, lr: float) -> None:
    """Minimize the losses, which are computed lazily; 20 steps of warm-up, linear decay over the second half."""
    optimizer = torch.optim.AdamW(model.parameters(), weight_decay=0.0)
    for step, loss in zip(range(num_steps), losses, strict=False):
        optimizer.param_groups[0]["lr"] = lr * min(1.0, (step + 1) / 20, 2 * (1 - step / num_steps))
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()


def train_policy(settings: DemoSettings, examples: Sequence[Example], rng: random.Random) -> LlamaForCausalLM:
    """Return a policy trained to imitate the demonstrations."""
    policy = LlamaForCausalLM(llama_config(settings))

    def loss(batch: Sequence[Example]) -> Tensor:
        logits, targets, is_response = response_logits(policy, [(e, e.demonstration_ids) for e in batch])
        return F.cross_entropy(logits[is_response], targets[is_response])

    losses = map(loss, batches(examples, settings.policy_batch_size, rng))
    fit(policy, losses, num_steps=settings.policy_steps, lr=settings.policy_lr)
    return policy.eval()


@torch.no_grad()
def sample(policy: LlamaForCausalLM, examples: Sequence[Example]) -> list[list[int]]:
    """Return one response to each prompt, sampled at temperature 1, with EOS and without padding."""
    prompts = padded([e.prompt_ids for e in examples], "left")
    sampling = {"do_sample": True, "temperature": 1.0, "top_k": 0, "max_new_tokens": MAX_RESPONSE_TOKENS}
    tokens = policy.generate(prompts, attention_mask=prompts != PAD, **sampling)
    responses = tokens[:, prompts.shape[1] :].tolist()
    return [r[: r.index(EOS) + 1] if EOS in r else r for r in responses]


def make_pairs(
    policy: LlamaForCausalLM, examples: Sequence[Example], num_sampled: int, rng: random.Random
) -> list[Pair]:
    """Return a corrupted answer to each example, and wrong responses of the policy to the first `num_sampled` ones."""
    sampled = examples[:num_sampled]
    mistakes = [(e, r) for e, r in zip(sampled, sample(policy, sampled), strict=True) if r != e.answer_ids]
    return mistakes + [(e, corrupt(e.answer_ids, rng)) for e in examples]


def pair_scores(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Return scores after each response token of right and wrong responses, and where they can differ.

    Returns:
        scores: [2, B, T] float32, right and wrong; past the end of a response its last score is repeated, so the last
            column holds the scores of whole responses.
        is_different: [B, T] bool, true from the first token in which the two responses differ.
    """
    both = [(e, e.answer_ids) for e, _ in pairs] + list(pairs)
    hidden = reward.model(input_ids=padded([e.prompt_ids + response for e, response in both])).last_hidden_state
    starts = torch.tensor([[len(e.prompt_ids)] for e, _ in both])
    lengths = torch.tensor([[len(response)] for _, response in both])
    columns = starts + torch.arange(int(lengths.max())).minimum(lengths - 1)
    scores = reward.score(hidden)[..., 0].gather(1, columns)
    chosen, rejected = padded([response for _, response in both]).view(2, len(pairs), -1)
    return scores.view(2, len(pairs), -1), (chosen != rejected).cumsum(dim=1) > 0


@torch.no_grad()
def pairwise_accuracy(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> float:
    """Return the fraction of pairs whose right response has the higher score."""
    (chosen, rejected), _ = pair_scores(reward, pairs)
    return float((chosen > rejected)[:, -1].float().mean())


def train_reward(
    settings: DemoSettings, policy: LlamaForCausalLM, pairs: Sequence[Pair], rng: random.Random
) -> LlamaForSequenceClassification:
    """Return a reward model, initialized from the policy and trained to prefer right responses (Bradley-Terry).

    The loss compares the scores after every token from the first difference on. A causal model computes them in the
    same forward, a pair gives several terms, and the critic, initialized from this model, can value a response that
    is not finished.
    """
    reward = LlamaForSequenceClassification(llama_config(settings, num_labels=1))
    reward.model.load_state_dict(policy.model.state_dict())

    def loss(batch: Sequence[Pair]) -> Tensor:
        (chosen, rejected), is_different = pair_scores(reward, batch)
        return -F.logsigmoid(chosen - rejected)[is_different].mean()

    losses = map(loss, batches(pairs, settings.reward_batch_size, rng))
    fit(reward, losses, num_steps=settings.reward_steps, lr=settings.reward_lr)
    return reward.eval()


def write_demo(folder: Path, settings: DemoSettings, seed: int, report: Callable[[str], None]) -> None:
    """Build the demo in a folder.

    Args:
        report: is called with each line of progress.
    Raises:
        RuntimeError: a model misses the accuracy that the settings require.
    """
    rng, tokenizer = random.Random(seed), make_tokenizer()
    examples = make_examples(settings, tokenizer, rng)
    train, heldout = examples[: settings.num_train], examples[settings.num_train :]
    policy = train_policy(settings, train, rng)
    accuracy = greedy_accuracy(policy, heldout)
    report(f"demo: policy of {policy.num_parameters():,} parameters, {accuracy:.1%} of held-out prompts right")
    pairs = make_pairs(policy, train[: settings.num_pairs], settings.num_sampled, rng)
    reward = train_reward(settings, policy, pairs, rng)
    preferred = pairwise_accuracy(reward, make_pairs(policy, heldout, len(heldout), rng))
    report(f"demo: reward model prefers the right response in {preferred:.1%} of held-out pairs")
    low, high = settings.accuracy_window
    if not low <= accuracy <= high or preferred < settings.min_pairwise_accuracy:
        raise RuntimeError(
            f"the demo's models miss the required accuracies: {accuracy:.3f} and {preferred:.3f} with {settings}"
        )

    for name, model in {"policy": policy, "reward": reward}.items():
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)
    for name, rows in {"train": train, "heldout": heldout}.items():
        lines = [json.dumps({"prompt": e.prompt, "answer": e.answer}) + "\n" for e in rows]
        (folder / f"{name}.jsonl").write_text("".join(lines))
    (folder / "accuracy.json").write_text(json.dumps({"initial_accuracy": accuracy, "pairwise_accuracy": preferred}))


@contextmanager
def reproducible(seed: int) -> Iterator[None]:
    """Seed torch and limit it to one thread in the body, and restore the caller's state afterwards.

    One thread makes the result independent of the number of cores, and is faster on a machine with other load, where
    threads wait for each other.
    """
    num_threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(num_threads)


def build_once(cache_dir: Path, content: str, write: Callable[[Path], None], *, seed: int) -> Path:
    """Return the folder in `cache_dir` of this content, which is written unless it exists.

    Args:
        content: everything that determines the files.
        write: writes them into an empty folder.
        seed: of torch while they are written.
    """
    folder = cache_dir / hashlib.sha256(content.encode()).hexdigest()[:16]
    if not folder.exists():
        cache_dir.mkdir(parents=True, exist_ok=True)
        with scratch_folder(cache_dir) as scratch, reproducible(seed):
            built = scratch / "built"
            built.mkdir()
            write(built)
            flush_tree(built)
            try:
                built.rename(folder)
            except OSError:  # another process may have built the folder in the meantime
                if not folder.exists():
                    raise
    return folder


def build_demo(cache_dir: Path, *, seed: int = 0, report: Callable[[str], None] = print) -> DemoPaths:
    """Return the files of the demo, which are built unless `cache_dir` holds them for this seed and code.

    Args:
        report: is called with each line of progress.
    Raises:
        RuntimeError: see write_demo.
    """
    settings = DemoSettings()

    def write(folder: Path) -> None:
        report(f"demo: building task and models in {cache_dir}, about a minute")
        write_demo(folder, settings, seed, report)

    folder = build_once(cache_dir, f"{asdict(settings)} {seed} {Path(__file__).read_text()}", write, seed=seed)
    policy, reward, train, heldout = (folder / n for n in ("policy", "reward", "train.jsonl", "heldout.jsonl"))
    accuracies = json.loads((folder / "accuracy.json").read_text())
    return DemoPaths(policy=policy, reward=reward, train=train, heldout=heldout, **accuracies)


def cache_dir() -> Path:
    """Return HYBRID_RL_CACHE if set, else `~/.cache/hybrid_rl`."""
    return Path(os.environ.get("HYBRID_RL_CACHE", Path.home() / ".cache" / "hybrid_rl"))


def resolve_demo(config: Config, report: Callable[[str], None] = print) -> Config:
    """Return the config with `demo:policy`, `demo:reward`, `demo:train` and `demo:heldout` replaced by their paths."""
    models, prompts = config.models, config.prompts
    data = {"path": prompts.path, "eval_path": prompts.eval_path}
    values = [models.actor, models.reward, *paths_in(list(data.values()))]
    if not any(value in PLACEHOLDERS for value in values):
        return config
    paths = build_demo(cache_dir(), report=report)

    def resolve(value: str) -> str:
        return str(getattr(paths, value.removeprefix("demo:"))) if value in PLACEHOLDERS else value

    models = replace(models, actor=resolve(models.actor), reward=models.reward and resolve(models.reward))
    resolved = {name: with_paths(value, resolve) for name, value in data.items()}
    return replace(config, models=models, prompts=replace(prompts, **resolved))
