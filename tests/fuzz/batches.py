"""Fuzz subjects: batches and packing, and log-probs, losses and values of packed models held to transformers."""

import functools
import math
import random
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from hybrid_rl.batch import Rollout, TrainBatch, balance, join, make_train_batch, pack, split
from hybrid_rl.config import ModelsConfig, UpdateConfig
from hybrid_rl.distributed import World
from hybrid_rl.engines import FirstWait
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import Actor
from hybrid_rl.steps.logprobs import Packing, token_logprobs
from hybrid_rl.steps.updates import KlInLoss, update_actor
from tests.conftest import make_rollout, make_turns
from tests.fuzz.cases import check_close
from tests.fuzz.maths import random_turns

CPU = torch.device("cpu")
WORLD = World(rank=0, size=1, local_rank=0, device=CPU)
VOCABULARY = 40


def random_rollouts(rng: random.Random, *, shortest: int = 0) -> list[Rollout]:
    """Return responses of random ids and lengths to prompts of random lengths, which may be conversations."""
    rollouts, are_conversations = [], rng.random() < 0.4
    for number in range(rng.randint(1, 5)):
        prompt = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 6))]
        num_sampled = rng.randint(shortest, 7)
        turns = random_turns(rng, num_sampled) if are_conversations else [num_sampled]
        response = [rng.randrange(VOCABULARY) for _ in range(sum(map(abs, turns)))]
        logprobs = [-rng.uniform(0.1, 4) for _ in range(num_sampled)]
        rollouts.append(
            make_rollout(prompt, response, prompt_id=number // 2, sequence_id=number, rollout_logprobs=logprobs,
                         turns=make_turns(*turns) if are_conversations else ())
        )  # fmt: skip
    return rollouts


def sampled_places(rollout: Rollout) -> list[int]:
    """Return the positions of the sampled tokens in the response."""
    if not rollout.turns:
        return list(range(len(rollout.response_ids)))
    is_sampled = [turn.is_sampled for turn in rollout.turns for _ in range(turn.num_tokens)]
    return [place for place, sampled in enumerate(is_sampled) if sampled]


def check_packing(rng: random.Random, folder: Path) -> None:
    """Packed sequences are the sequences one after the other, and every target is predicted by the token before it."""
    rollouts = random_rollouts(rng)
    batch = make_train_batch(rollouts)
    if rng.random() < 0.5:  # as the exchange between ranks does
        cut = rng.randint(0, len(rollouts))
        batch = join([batch.select(list(range(cut))), batch.select(list(range(cut, len(rollouts))))])
    limit = rng.choice([1, 10, 20, 60])
    pieces = split(batch.sequence_lengths, limit)
    assert sorted(row for piece in pieces for row in piece) == list(range(len(rollouts))), f"rows lost: {pieces}"
    result = torch.zeros(batch.response_mask.shape)
    for piece in pieces:
        lengths = [len(rollouts[row].prompt.token_ids) + len(rollouts[row].response_ids) for row in piece]
        assert sum(lengths) <= limit or len(piece) == 1, f"{lengths} tokens in a piece of {limit}"
        packed = pack(batch, piece, CPU)
        ids = packed.input_ids[0].tolist()
        assert ids == [i for row in piece for i in rollouts[row].prompt.token_ids + rollouts[row].response_ids]
        assert packed.position_ids[0].tolist() == [p for n in lengths for p in range(n)]
        assert packed.cu_seqlens.tolist() == [sum(lengths[:n]) for n in range(len(lengths) + 1)]
        assert packed.max_length == max(lengths)
        assert [ids[i + 1] for i in packed.response_index.tolist()] == packed.targets.tolist()
        assert packed.targets.tolist() == [
            rollouts[row].response_ids[place] for row in piece for place in sampled_places(rollouts[row])
        ]
        packed.scatter(packed.gather(batch.rollout_logprobs), result)
    assert [result[row, sampled_places(rollout)].tolist() for row, rollout in enumerate(rollouts)] == [
        torch.tensor(rollout.rollout_logprobs).tolist() for rollout in rollouts
    ]
    assert batch.group_ids.tolist() == [r.prompt.prompt_id for r in rollouts]
    assert batch.sequence_ids.tolist() == [r.sequence_id for r in rollouts]
    _check_balance(rng)


def _check_balance(rng: random.Random) -> None:
    """No rank has more than Graham's 4/3 of the best possible largest sum."""
    lengths, ranks = [rng.randint(1, 50) for _ in range(rng.randint(1, 12))], rng.randint(1, 4)
    found = balance(lengths, ranks)
    assert len(found) == len(lengths) and set(found) <= set(range(ranks))
    largest = max(sum(n for n, r in zip(lengths, found, strict=True) if r == rank) for rank in range(ranks))
    ordered = sorted(lengths, reverse=True)
    # With more items than ranks, two of the ranks + 1 longest share a rank in every assignment.
    pair = ordered[ranks - 1] + ordered[ranks] if len(ordered) > ranks else 0
    bound = max(math.ceil(sum(lengths) / ranks), ordered[0], pair)
    assert largest <= bound + ordered[-1] * ranks or largest <= 4 / 3 * bound + ordered[0], f"{lengths} on {ranks}"


@functools.cache
def _models(kind: str) -> tuple[Any, Actor]:
    """Return a tiny model of transformers, and the actor that is loaded from its folder."""
    import tempfile

    torch.manual_seed(3)
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 64,
        "tie_word_embeddings": kind == "llama",
    }
    plain: Any = LlamaForCausalLM(LlamaConfig(**shape)) if kind == "llama" else Qwen2ForCausalLM(Qwen2Config(**shape))
    for parameter in plain.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(10)  # away from uniform
    with tempfile.TemporaryDirectory() as folder:
        plain.save_pretrained(folder)
        actor = load_actor(folder, ModelsConfig(), CPU)
    return plain.eval(), actor


def direct_logprobs(model: Any, rollouts: list[Rollout], temperature: float) -> list[torch.Tensor]:
    """Return the log-probs of each response's sampled tokens by transformers, one sequence at a time, with gradient."""
    found = []
    for rollout in rollouts:
        ids, first = torch.tensor([rollout.prompt.token_ids + rollout.response_ids]), len(rollout.prompt.token_ids)
        logits = model(input_ids=ids).logits[0, first - 1 : -1].float() / temperature
        found.append(logits.log_softmax(-1).gather(1, ids[0, first:, None])[sampled_places(rollout), 0])
    return found


def check_logprobs(rng: random.Random, folder: Path) -> None:
    """Log-probs of packed sequences are those that transformers gives to each sequence alone."""
    plain, actor = _models(rng.choice(["llama", "qwen2"]))
    rollouts, temperature = random_rollouts(rng), rng.choice([1.0, 0.7, 2.0])
    packing = Packing(limit=TokenLimit(rng.choice([12, 30, 80])), world=WORLD)
    found = token_logprobs(actor, make_train_batch(rollouts), packing, temperature=temperature)
    with torch.no_grad():
        expected = direct_logprobs(plain, rollouts, temperature)
    for row, values in enumerate(expected):
        ours = found[row, sampled_places(rollouts[row])]
        check_close(ours.tolist(), values.tolist(), f"log-probs of row {row}", tolerance=1e-4)


class PlainEngine:
    """Collects the gradients that an update gives to a model, and takes no step."""

    lr = 0.0
    first_wait = FirstWait.STEP

    def __init__(self, actor: Actor) -> None:
        self._actor = actor

    def forward(self, **inputs: Any) -> Any:
        """Return the outputs of the model."""
        return self._actor(**inputs)

    def backward(self, loss: torch.Tensor, *, is_last: bool) -> None:
        """Add the gradient of a loss."""
        loss.backward()

    def step(self) -> float:
        """Return the gradient norm."""
        return math.sqrt(sum(float(p.grad.square().sum()) for p in self._actor.parameters() if p.grad is not None))


def check_update(rng: random.Random, folder: Path) -> None:
    """The gradient of an update is that of the loss written out over transformers' log-probs of each sequence."""
    plain, actor = _models(rng.choice(["llama", "qwen2"]))
    rollouts, temperature = random_rollouts(rng, shortest=1), rng.choice([1.0, 0.7])
    batch, drawn = _batch_for_update(rng, rollouts)
    config = UpdateConfig(
        mini_batch_size=len(rollouts),
        micro_batch_tokens=rng.choice([13, 40, 200]),
        policy_loss=rng.choice(["clip", "pg"]),
        entropy_coef=rng.choice([0.0, 0.02]),
        aggregation=rng.choice(["token_mean", "sequence_mean", "sequence_sum_constant"]),
    )
    kl = rng.choice([None, KlInLoss(coef=0.2, estimator=rng.choice(["k2", "k3"]), is_unbiased=rng.random() < 0.5)])
    actor.zero_grad()
    engine: Any = PlainEngine(actor)
    metrics = update_actor(engine, batch, config, WORLD, seed=1, temperature=temperature, max_response_tokens=7, kl=kl)
    plain.zero_grad()
    loss = _direct_loss(plain, rollouts, drawn, config, kl, temperature)
    loss.backward()
    expected = {name: p.grad for name, p in plain.named_parameters()}
    norm = math.sqrt(sum(float(g.square().sum()) for g in expected.values()))
    check_close(metrics["grad_norm"], norm, "gradient norm", tolerance=1e-3)
    for name, parameter in actor.model.named_parameters():
        difference = float((parameter.grad - expected[name]).norm())
        assert difference <= 1e-3 * max(norm, 1e-3), f"gradient of {name} is off by {difference} of {norm}"


def _batch_for_update(rng: random.Random, rollouts: list[Rollout]) -> tuple[TrainBatch, dict[str, list[torch.Tensor]]]:
    """Return a batch with all that an update reads, and its numbers per sequence."""
    batch = make_train_batch(rollouts)
    drawn: dict[str, list[torch.Tensor]] = {}
    for name in ("old_logprobs", "ref_logprobs", "advantages", "loss_weights"):
        low, high = (0.2, 2.0) if name == "loss_weights" else (-1.5, 1.5) if name == "advantages" else (-5.0, -2.0)
        drawn[name] = [torch.tensor([rng.uniform(low, high) for _ in range(r.num_sampled)]) for r in rollouts]
    if rng.random() < 0.5:
        drawn["loss_weights"] = [torch.ones_like(values) for values in drawn["loss_weights"]]
    fields = {}
    for name, rows in drawn.items():
        fields[name] = torch.zeros(batch.response_mask.shape)
        for row, values in enumerate(rows):
            fields[name][row, sampled_places(rollouts[row])] = values
    return batch.with_fields(loss_mask=batch.response_mask, **fields), drawn


def _direct_loss(
    model: Any,
    rollouts: list[Rollout],
    drawn: dict[str, list[torch.Tensor]],
    config: UpdateConfig,
    kl: KlInLoss | None,
    temperature: float,
) -> torch.Tensor:
    """Return the actor's loss, sequence by sequence."""
    total, num_tokens = torch.zeros(()), sum(r.num_sampled for r in rollouts)
    for row, (rollout, logprobs) in enumerate(
        zip(rollouts, direct_logprobs(model, rollouts, temperature), strict=True)
    ):
        old, ref, advantage, factor = (drawn[name][row] for name in drawn)
        ratio = (logprobs - old).exp()
        loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
        loss = factor * (-advantage * logprobs if config.policy_loss == "pg" else loss)
        if kl is not None:
            d = logprobs - ref
            value = d.square() / 2 if kl.estimator == "k2" else (-d).exp() - 1 + d
            loss = loss + kl.coef * (value * ratio if kl.is_unbiased else value)
        if config.entropy_coef:
            ids, first = torch.tensor([rollout.prompt.token_ids + rollout.response_ids]), len(rollout.prompt.token_ids)
            log_p = (model(input_ids=ids).logits[0, first - 1 : -1] / temperature).log_softmax(-1)
            loss = loss - config.entropy_coef * -(log_p.exp() * log_p).sum(-1)[sampled_places(rollout)]
        length = rollout.num_sampled
        share = {
            "token_mean": 1 / num_tokens,
            "sequence_mean": 1 / (length * len(rollouts)),
            "sequence_sum_constant": 1 / (7 * len(rollouts)),
        }[config.aggregation]
        total = total + share * loss.sum()
    return total
