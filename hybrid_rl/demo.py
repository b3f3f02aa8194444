"""The demo's task, sorting digits, and the two models it starts from; built in about a minute, without a network.

A prompt reads `sort 5 3 8 1 :`, its answer `1 3 5 8`. The policy is trained with supervision until it sorts some two in five
held-out prompts, so that there is something left for PPO. The reward model learns from pairs of a right and a wrong response
which one is better, and never sees the rule. Files and names: `DemoPaths`.
"""

import copy
import hashlib
import json
import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

from hybrid_rl.config import Config

SPECIAL = ["<pad>", "<bos>", "<eos>"]
PAD, BOS, EOS = range(3)
DIGITS = list("0123456789")
VOCABULARY = [*SPECIAL, "<unk>", "sort", ":", *DIGITS]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the task, the models and their training."""

    min_digits: int = 4
    max_digits: int = 7
    num_train: int = 30_000
    num_heldout: int = 1_000
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 2
    head_dim: int = 32
    """One of the head sizes that vLLM's CPU attention serves."""
    batch_size: int = 256
    """Examples, or pairs, per optimizer step."""
    policy_lr: float = 2e-3
    policy_accuracy: float = 0.38
    """Supervision ends at the first measurement that reaches it."""
    reward_lr: float = 1e-3
    reward_steps: int = 400
    num_samples: int = 10_000
    """Training prompts that the policy answers; its wrong answers are half of the rejected responses."""
    min_pairwise_accuracy: float = 0.97


@dataclass(frozen=True, kw_only=True)
class DemoPaths:
    """What `build_demo` leaves: two Hugging Face folders and two JSONL files with the columns prompt and answer."""

    policy: Path
    reward: Path
    train: Path
    heldout: Path
    initial_accuracy: float
    """Share of held-out prompts that the policy gets exactly right with greedy decoding."""
    pairwise_accuracy: float
    """Share of held-out pairs in which the reward model prefers the right response."""


@dataclass(frozen=True)
class Example:
    """A prompt and its right response, as text and as token ids."""

    prompt: str
    answer: str
    prompt_ids: list[int]
    answer_ids: list[int]
    """Ends with EOS."""


Pair = tuple[Example, list[int]]
"""An example and the ids of a wrong response to it."""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer of one token per word, which puts BOS first."""
    vocabulary = {token: i for i, token in enumerate(VOCABULARY)}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>", unk_token="<unk>"
    )


def make_examples(settings: DemoSettings, tokenizer: PreTrainedTokenizerFast, rng: random.Random) -> list[Example]:
    """Return the training examples and after them the held-out ones, all different."""
    rows: dict[str, str] = {}
    while len(rows) < settings.num_train + settings.num_heldout:
        digits = rng.choices(DIGITS, k=rng.randint(settings.min_digits, settings.max_digits))
        rows[f"sort {' '.join(digits)} :"] = " ".join(sorted(digits))
    prompts = tokenizer(list(rows)).input_ids
    answers = tokenizer(list(rows.values()), add_special_tokens=False).input_ids
    return [Example(*row, p, [*a, EOS]) for row, p, a in zip(rows.items(), prompts, answers, strict=True)]


def corrupt(answer_ids: list[int], token_ids: range, rng: random.Random) -> list[int]:
    """Return a wrong response, one to three edits away from the answer; one in eight lacks its EOS."""
    response = answer_ids[:-1]
    for _ in range(rng.choice([1, 1, 2, 3])):
        place, other = rng.randrange(len(response)), rng.randrange(len(response))
        edit = rng.choice(["swap", "drop", "repeat", "insert", "replace", "replace in order", "end early"])
        if edit == "swap":
            response[place], response[other] = response[other], response[place]
        elif edit == "drop" and len(response) > 1:
            del response[place]
        elif edit == "repeat":
            response.insert(place, response[other])
        elif edit == "insert":
            response.insert(place, rng.choice(token_ids))
        elif edit.startswith("replace"):
            response[place] = rng.choice(token_ids)
            response = sorted(response) if edit == "replace in order" else response
        elif edit == "end early":
            response = response[: place + 1]
    response = response if rng.random() < 1 / 8 else [*response, EOS]
    return response if response != answer_ids else corrupt(answer_ids, token_ids, rng)


def padded(sequences: Sequence[list[int]], side: Literal["left", "right"] = "right") -> Tensor:
    """Return the sequences as one [B, T] tensor."""
    width = max(map(len, sequences))
    gaps = [[PAD] * (width - len(s)) for s in sequences]
    return torch.tensor([s + g if side == "right" else g + s for s, g in zip(sequences, gaps, strict=True)])


def batches(items: Sequence[T], size: int, rng: random.Random) -> Iterator[Sequence[T]]:
    """Yield batches without end, reshuffled at each pass."""
    while True:
        order = rng.sample(items, len(items))
        yield from (order[i : i + size] for i in range(0, len(order) - size + 1, size))


def answer_logits(policy: LlamaForCausalLM, examples: Sequence[Example]) -> tuple[Tensor, Tensor, Tensor]:
    """Return the policy's logits [B, T, V] for each token given the right ones before it, the tokens, and which answer."""
    ids = padded([e.prompt_ids + e.answer_ids for e in examples])
    starts, ends = (torch.tensor([[len(e.prompt_ids) + n * len(e.answer_ids)] for e in examples]) for n in (0, 1))
    position = torch.arange(ids.shape[1])
    return policy(input_ids=ids[:, :-1]).logits, ids[:, 1:], ((position >= starts) & (position < ends))[:, 1:]


@torch.no_grad()
def greedy_accuracy(policy: LlamaForCausalLM, examples: Sequence[Example]) -> float:
    """Return the share of prompts that greedy decoding answers exactly.

    It does if and only if each answer token is the likeliest after the right ones before it, so one forward tells.
    """
    logits, targets, is_answer = answer_logits(policy, examples)
    return float(((logits.argmax(-1) == targets) | ~is_answer).all(dim=1).float().mean())


def optimizer_step(optimizer: torch.optim.Optimizer, loss: Tensor, lr: float) -> None:
    """Update the parameters once, with their gradient clipped at norm 1."""
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_([p for g in optimizer.param_groups for p in g["params"]], 1.0)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()


def train_policy(
    settings: DemoSettings, train: Sequence[Example], heldout: Sequence[Example], rng: random.Random
) -> LlamaForCausalLM:
    """Return a policy trained with supervision until `policy_accuracy` on the held-out prompts."""
    policy = LlamaForCausalLM(llama_config(settings))
    optimizer = torch.optim.AdamW(policy.parameters(), lr=settings.policy_lr, weight_decay=0.0)
    for step, batch in enumerate(batches(train, settings.batch_size, rng)):
        logits, targets, is_answer = answer_logits(policy, batch)
        loss = F.cross_entropy(logits[is_answer], targets[is_answer])
        optimizer_step(optimizer, loss, settings.policy_lr * min(1.0, (step + 1) / 20))
        if step % 2 == 1 and greedy_accuracy(policy, heldout) >= settings.policy_accuracy:
            break
    return policy


def llama_config(settings: DemoSettings) -> LlamaConfig:
    """Return the shape of both models."""
    num_heads = settings.hidden_size // settings.head_dim
    return LlamaConfig(
        vocab_size=len(VOCABULARY),
        hidden_size=settings.hidden_size,
        intermediate_size=settings.intermediate_size,
        num_hidden_layers=settings.num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads,
        head_dim=settings.head_dim,
        max_position_embeddings=64,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )


@torch.no_grad()
def sample(policy: LlamaForCausalLM, examples: Sequence[Example], max_tokens: int) -> list[list[int]]:
    """Return one response to each prompt, sampled at temperature 1; EOS included, padding removed."""
    prompts = padded([e.prompt_ids for e in examples], "left")
    tokens = policy.generate(
        prompts, attention_mask=prompts != PAD, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_tokens
    )
    responses = tokens[:, prompts.shape[1] :].tolist()
    return [r[: r.index(EOS) + 1] if EOS in r else r for r in responses]


def make_pairs(
    settings: DemoSettings, policy: LlamaForCausalLM, examples: Sequence[Example], rng: random.Random
) -> list[Pair]:
    """Return for each example a corrupted answer, and the policy's own response where that is wrong."""
    responses = [r for i in range(0, len(examples), 2048) for r in sample(policy, examples[i : i + 2048], settings.max_digits + 3)]
    mistakes = [(e, r) for e, r in zip(examples, responses, strict=True) if r != e.answer_ids]
    return mistakes + [(e, corrupt(e.answer_ids, range(EOS + 1, len(VOCABULARY)), rng)) for e in examples]


def pair_scores(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> Tensor:
    """Return the scores of right and wrong responses, [2, B]; read at each sequence's last token."""
    chosen, rejected = [e.prompt_ids + e.answer_ids for e, _ in pairs], [e.prompt_ids + r for e, r in pairs]
    return reward(input_ids=padded(chosen + rejected)).logits.view(2, -1)


@torch.no_grad()
def pairwise_accuracy(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> float:
    """Return the share of pairs whose right response scores higher."""
    chosen, rejected = pair_scores(reward, pairs)
    return float((chosen > rejected).float().mean())


def train_reward(
    settings: DemoSettings, policy: LlamaForCausalLM, pairs: Sequence[Pair], rng: random.Random
) -> LlamaForSequenceClassification:
    """Return a reward model that grew out of the policy, trained with the Bradley-Terry loss."""
    reward = LlamaForSequenceClassification(LlamaConfig(**{**policy.config.to_dict(), "num_labels": 1}))
    reward.model.load_state_dict(policy.model.state_dict())
    optimizer = torch.optim.AdamW(reward.parameters(), lr=settings.reward_lr, weight_decay=0.0)
    for step, batch in zip(range(settings.reward_steps), batches(pairs, settings.batch_size, rng), strict=False):
        chosen, rejected = pair_scores(reward, batch)
        loss = -F.logsigmoid(chosen - rejected).mean()
        optimizer_step(optimizer, loss, settings.reward_lr * min(1.0, (step + 1) / 20, 2 * (1 - step / settings.reward_steps)))
        if os.environ.get("V") and step%20==19:print(step+1, loss.item(), float(chosen.detach().std()), float((chosen-rejected).mean()))
    return reward
