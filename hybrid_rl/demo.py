"""The demo's task, sorting digits, and the two models it starts from; built in about a minute, without a network.

A prompt reads `sort 5 3 8 1 :`, its answer `1 3 5 8`. The policy is trained with supervision until it sorts some two in five
held-out prompts, so that there is something left for PPO. The reward model learns from pairs of a right and a wrong response
which one is better, and never sees the rule. Files and names: `DemoPaths`.
"""

import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification, PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>"]
PAD, BOS, EOS = range(3)
LETTERS = list("abcdefghijkl")
VOCABULARY = [*SPECIAL, "<unk>", "sort", ":", *LETTERS]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DemoSettings:
    """Sizes of the task, the models and their training."""

    min_letters: int = 4
    max_letters: int = 6
    dropped_repeats: float = 0.65
    """Share of demonstrations in which a letter that repeats is written once."""
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
    policy_steps: int = 200
    reward_lr: float = 1e-3
    reward_steps: int = 200
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
    """Ends with EOS, like the demonstration."""
    demonstration_ids: list[int]


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
    rows: dict[str, list[str]] = {}
    while len(rows) < settings.num_train + settings.num_heldout:
        letters = rng.choices(LETTERS, k=rng.randint(settings.min_letters, settings.max_letters))
        rows[f"sort {' '.join(letters)} :"] = sorted(letters)
    examples = []
    for prompt, letters in rows.items():
        shown = sorted(set(letters)) if rng.random() < settings.dropped_repeats else letters
        answer_ids, demonstration_ids = ([*tokenizer.convert_tokens_to_ids(x), EOS] for x in (letters, shown))
        prompt_ids = [BOS, *tokenizer.convert_tokens_to_ids(prompt.split())]
        examples.append(Example(prompt, " ".join(letters), prompt_ids, answer_ids, demonstration_ids))
    return examples


def corrupt(answer_ids: list[int], token_ids: range, rng: random.Random) -> list[int]:
    """Return a wrong response, one to three edits away from the answer, most often in order; a few lack their EOS."""
    response = answer_ids[:-1]
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        place, token = rng.randrange(len(response)), rng.choice([rng.choice(response), rng.choice(token_ids)])
        edit = rng.choice(["swap", "drop", "insert", "replace", "end early"])
        if edit == "swap":
            other = rng.randrange(len(response))
            response[place], response[other] = response[other], response[place]
        elif edit == "drop" and len(response) > 1:
            del response[place]
        elif edit == "insert":
            response.insert(place, token)
        elif edit == "replace":
            response[place] = token
        elif edit == "end early":
            response = response[: place + 1]
    response = sorted(response) if rng.random() < 0.7 else response
    response = response if rng.random() < 0.1 else [*response, EOS]
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


def response_logits(
    policy: LlamaForCausalLM, prompts: Sequence[list[int]], responses: Sequence[list[int]]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits [B, T, V] for each token given those before it, the tokens, and which are the response's."""
    ids = padded([p + r for p, r in zip(prompts, responses, strict=True)])
    starts, lengths = (torch.tensor([[len(x)] for x in side]) for side in (prompts, responses))
    position = torch.arange(1, ids.shape[1])
    is_response = (position >= starts) & (position < starts + lengths)
    return policy(input_ids=ids[:, :-1]).logits, ids[:, 1:], is_response


@torch.no_grad()
def greedy_accuracy(policy: LlamaForCausalLM, examples: Sequence[Example]) -> float:
    """Return the share of prompts that greedy decoding answers exactly.

    It does if and only if each answer token is the likeliest after the right ones before it, so one forward tells.
    """
    logits, targets, is_answer = response_logits(
        policy, [e.prompt_ids for e in examples], [e.answer_ids for e in examples]
    )
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
    for step, batch in zip(range(settings.policy_steps), batches(train, settings.batch_size, rng), strict=False):
        logits, targets, is_answer = response_logits(
            policy, [e.prompt_ids for e in batch], [e.demonstration_ids for e in batch]
        )
        loss = F.cross_entropy(logits[is_answer], targets[is_answer])
        optimizer_step(
            optimizer, loss, settings.policy_lr * min(1.0, (step + 1) / 20, 2 * (1 - step / settings.policy_steps))
        )
            print(step + 1, loss.item(), greedy_accuracy(policy, heldout))
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
    responses = [
        r
        for i in range(0, len(examples), 2048)
        for r in sample(policy, examples[i : i + 2048], settings.max_letters + 3)
    ]
    mistakes = [(e, r) for e, r in zip(examples, responses, strict=True) if r != e.answer_ids]
    return mistakes + [(e, corrupt(e.answer_ids, range(EOS + 1, len(VOCABULARY)), rng)) for e in examples]


def pair_scores(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor]:
    """Return scores after each response token [2, B, T], of right and wrong responses, and where the two differ [B, T].

    Past a response's end its last score is repeated: the last column holds the scores of whole responses.
    """
    responses = [e.answer_ids for e, _ in pairs] + [r for _, r in pairs]
    prompts = [e.prompt_ids for e, _ in pairs] * 2
    hidden = reward.model(input_ids=padded([p + r for p, r in zip(prompts, responses, strict=True)])).last_hidden_state
    starts, lengths = (torch.tensor([[len(x)] for x in side]) for side in (prompts, responses))
    columns = starts + torch.arange(int(lengths.max())).minimum(lengths - 1)
    scores = reward.score(hidden)[..., 0].gather(1, columns)
    chosen, rejected = padded(responses).view(2, len(pairs), -1)
    return scores.view(2, len(pairs), -1), (chosen != rejected).cumsum(dim=1) > 0


@torch.no_grad()
def pairwise_accuracy(reward: LlamaForSequenceClassification, pairs: Sequence[Pair]) -> float:
    """Return the share of pairs whose right response scores higher."""
    (chosen, rejected), _ = pair_scores(reward, pairs)
    return float((chosen > rejected)[:, -1].float().mean())


def train_reward(
    settings: DemoSettings, policy: LlamaForCausalLM, pairs: Sequence[Pair], rng: random.Random
) -> LlamaForSequenceClassification:
    """Return a reward model that grew out of the policy, trained with the Bradley-Terry loss."""
    reward = LlamaForSequenceClassification(LlamaConfig(**{**policy.config.to_dict(), "num_labels": 1}))
    reward.model.load_state_dict(policy.model.state_dict())
    optimizer = torch.optim.AdamW(reward.parameters(), lr=settings.reward_lr, weight_decay=0.0)
    for step, batch in zip(range(settings.reward_steps), batches(pairs, settings.batch_size, rng), strict=False):
        (chosen, rejected), is_different = pair_scores(reward, batch)
        loss = -F.logsigmoid(chosen - rejected)[is_different].mean()
        optimizer_step(
            optimizer, loss, settings.reward_lr * min(1.0, (step + 1) / 20, 2 * (1 - step / settings.reward_steps))
        )
            print(step + 1, loss.item(), float(chosen.detach().std()), float((chosen - rejected).mean()))
    return reward
