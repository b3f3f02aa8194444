"""Two ranks that each compute a slice of every micro-batch's tokens train like one rank.

As a program this file is one of the two ranks: python <file> <folder> <tiny>.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
)

from hybrid_rl.batch import TrainBatch, make_train_batch, pack
from hybrid_rl.config import ConfigError, LoraConfig, ModelsConfig, OptimizerConfig, PtxConfig, UpdateConfig
from hybrid_rl.distributed import World, join_world
from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
from hybrid_rl.engines.deepspeed.ulysses import enable_sequence_parallel
from hybrid_rl.memory.micro_batches import TokenLimit
from hybrid_rl.models.loading import load_actor, load_value_model
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl.models.sequence_parallel import apply_together, check_heads, pad_to_ranks
from hybrid_rl.steps.logprobs import Packing, sequence_values, token_logprobs, token_values
from hybrid_rl.steps.ptx import PtxLoss
from hybrid_rl.steps.updates import KlInLoss, update_actor, update_critic
from tests.conftest import make_rollout, make_turns

CPU = torch.device("cpu")
LENGTHS = [(2, 5), (3, 1), (1, 8), (4, 3), (2, 0), (5, 6), (1, 2), (2, 4)]
"""Prompt and response tokens of eight sequences: 7, 4, 9, 7, 2, 11, 3 and 6; number 4 is empty."""
# With an eps well above rounding errors, AdamW does not amplify gradients that are 0 except for rounding.
OPTIMIZER = OptimizerConfig(lr=1e-2, eps=1e-3, max_grad_norm=0.5)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model and the settings of two optimizer steps on four sequences each."""

    role: str = "actor"
    model: str = "tiny"
    stage: int = 2
    micro_batch_tokens: int = 24
    policy_loss: str = "clip"
    lora: int = 0
    checkpointing: bool = False
    kl: bool = False
    ptx: bool = False
    has_turns: bool = False


CASES = {
    "zero 0": Case(stage=0),
    "zero 1, gradient checkpointing": Case(stage=1, checkpointing=True),
    # One sequence per micro-batch: 9 tokens do not divide by 2, and of 3 tokens only the first rank reads any.
    "zero 2, single sequences": Case(micro_batch_tokens=1),
    "zero 3, two key heads": Case(stage=3, model="wide"),
    "critic, zero 2": Case(role="critic"),
    "critic, zero 3, single sequences": Case(role="critic", stage=3, micro_batch_tokens=1),
    "ratios of sequences, kl in the loss": Case(policy_loss="gspo", micro_batch_tokens=13, kl=True),
    "adapters, ptx loss": Case(lora=4, ptx=True),
    "learned positions": Case(model="gpt2"),
    "conversations": Case(has_turns=True, micro_batch_tokens=13, kl=True),
    "conversations, critic": Case(role="critic", has_turns=True),
}
TURNS = [(3, -1, 1), (1,), (1, -6, 1), (-1, 2), (), (2, -2, 1, 1), (-1, 1), (1, -2, 1)]
"""Turns of the same eight sequences as conversations; a negative length is an observation's."""


def make_model(name: str, folder: Path, tiny: Path, world: World) -> Path:
    """Return a model's folder, equal on all ranks; `tiny` has two heads and one key head, `wide` four and two."""
    torch.manual_seed(3)
    size: dict[str, Any] = {"vocab_size": 38, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    llama = {**size, "intermediate_size": 64, "max_position_embeddings": 64}
    if name == "tiny":
        return tiny / "policy"
    made: dict[str, Callable[[], PreTrainedModel]] = {
        "wide": lambda: LlamaForCausalLM(LlamaConfig(**llama, num_key_value_heads=2)),
        "gpt2": lambda: GPT2LMHeadModel(GPT2Config(vocab_size=38, n_embd=32, n_layer=2, n_head=2, n_positions=64)),
        "window": lambda: MistralForCausalLM(MistralConfig(**llama, num_key_value_heads=2, sliding_window=4)),
        "alibi": lambda: BloomForCausalLM(BloomConfig(vocab_size=38, hidden_size=32, n_layer=2, n_head=2)),
    }
    model = made[name]()
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.data.mul_(8)
    if world.is_main:
        model.save_pretrained(folder / name)
    world.barrier()
    return folder / name


def make_batch(*, has_turns: bool = False) -> TrainBatch:
    """Return the eight sequences, perhaps as conversations, with the fields that an update reads."""
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (p, r) in enumerate(LENGTHS):
        tokens = torch.randint(2, 38, (p + r,), generator=generator).tolist()
        turns = make_turns(*TURNS[i]) if has_turns else ()
        rollouts.append(make_rollout(tokens[:p], tokens[p:], prompt_id=i // 2, sequence_id=i, turns=turns))
    batch = make_train_batch(rollouts)
    mask = batch.response_mask
    fields = torch.where(mask, torch.randn(5, *mask.shape, generator=generator), 0)
    return batch.with_fields(
        old_logprobs=torch.where(mask, fields[0] * 0.3 - 3.6, 0),
        ref_logprobs=torch.where(mask, fields[1] * 0.3 - 3.6, 0),
        advantages=fields[2],
        values=fields[3],
        returns=fields[4],
    )


def run_case(case: Case, world: World, group: World | None, folder: Path, tiny: Path) -> dict[str, Any]:
    """Return a model's outputs for the batch, and its weights and metrics after the updates."""
    data_parallel = world if group is None else world.data_parallel_group(group.size)
    models = ModelsConfig(gradient_checkpointing=case.checkpointing)
    config = UpdateConfig(
        mini_batch_size=4,
        micro_batch_tokens=case.micro_batch_tokens,
        policy_loss=case.policy_loss,
        entropy_coef=0.01,
        clip_high=0.4,
    )
    batch = make_batch(has_turns=case.has_turns)
    packing = Packing(limit=TokenLimit(case.micro_batch_tokens), world=data_parallel)
    options: dict[str, Any] = {"seed": 7, "max_response_tokens": 8}
    if case.role == "critic":
        path = str(tiny / "reward")
        critic = load_value_model(path, models, CPU, field="models.critic")
        critic = enable_sequence_parallel(critic, group, path, field="models.critic")
        engine = DeepSpeedEngine(critic, OPTIMIZER, zero_stage=case.stage, total_steps=9, world=world)
        scores = [token_values(engine.forward, batch, packing), sequence_values(engine.forward, batch, packing)]
        metrics = update_critic(engine, batch, config, data_parallel, **options)
    else:
        path = str(make_model(case.model, folder, tiny, world))
        lora = LoraConfig(rank=case.lora)
        torch.manual_seed(5)  # of the adapters
        actor = enable_sequence_parallel(load_actor(path, models, CPU, lora=lora), group, path, field="models.actor")
        engine = DeepSpeedEngine(actor, OPTIMIZER, zero_stage=case.stage, total_steps=9, world=world)
        scores = [token_logprobs(engine.forward, batch, packing, temperature=0.8)]
        if case.kl:
            options["kl"] = KlInLoss(coef=0.5, estimator="k2", is_unbiased=False)
        if case.ptx:
            texts = [[3, 4, 5], [9, 8, 7, 6, 5], [20, 21], [2, 3, 2, 3]]
            ptx = PtxLoss(texts, PtxConfig(batch_size=3), data_parallel, seed=1)
            options |= {"ptx": ptx.next_batch, "ptx_coef": 0.1}
        metrics = update_actor(engine, batch, config, data_parallel, temperature=0.8, **options)
    with engine.gathered([name for name, _, _ in engine.named_shapes()]) as tensors:
        return {"scores": scores, "metrics": metrics, "weights": {name: t.clone() for name, t in tensors.items()}}


def refusal(model: str, group: World, folder: Path, tiny: Path, **models: Any) -> str:
    """Return the error of a model whose tokens cannot be sliced."""
    path = str(make_model(model, folder, tiny, group))
    try:
        enable_sequence_parallel(load_actor(path, ModelsConfig(**models), CPU), group, path, field="models.actor")
    except ConfigError as error:
        return str(error).replace(path, "FOLDER")
    return ""


def main() -> None:
    """Run as one of the two ranks."""
    root, tiny = map(Path, sys.argv[1:])
    torch.set_num_threads(1)
    world = join_world()
    group = world.model_parallel_group(2, on_device=True)
    found: dict[str, Any] = {name: run_case(case, world, group, root, tiny) for name, case in CASES.items()}
    found["window"] = refusal("window", group, root, tiny)
    found["alibi"] = refusal("alibi", group, root, tiny)
    found["eager"] = refusal("tiny", group, root, tiny, attention="eager")
    found["ranks"] = [(w.rank, w.size) for w in (world.data_parallel_group(1), world.data_parallel_group(2), group)]
    items = [[4.0, 5.0], [6.0]][world.rank]
    found["together"] = apply_together(group, items, lambda everyone: torch.tensor(everyone).cumsum(0))
    torch.save(found, root / f"rank{world.rank}.pt")


@pytest.fixture(scope="module")
def both(on_two_ranks: Callable[[str], list[Any]]) -> list[dict[str, Any]]:
    return on_two_ranks(__file__)


@pytest.fixture(scope="module")
def alone(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """Return a function that runs a case on this rank alone."""
    world, folder = join_world(), tmp_path_factory.mktemp("models")
    return lambda name: run_case(CASES[name], world, None, folder, tiny)


@pytest.mark.parametrize("name", CASES)
def test_two_ranks_train_like_one(both, alone, name):
    """Two steps with a learning rate of 1e-2 change weights by far more than the tolerance."""
    expected = alone(name)
    assert expected["metrics"]["grad_norm"] > 0.05
    for found in (rank[name] for rank in both):
        for scores, wanted in zip(found["scores"], expected["scores"], strict=True):
            torch.testing.assert_close(scores, wanted, atol=2e-5, rtol=0)
        assert found["metrics"] == pytest.approx(expected["metrics"], rel=1e-5, abs=1e-6)
        for key, weight in expected["weights"].items():
            torch.testing.assert_close(
                found["weights"][key], weight, atol=1e-6, rtol=0, msg=lambda m, k=key: f"{k}: {m}"
            )
    first, second = both[0][name], both[1][name]
    assert first["metrics"] == second["metrics"]
    weights: dict[str, Tensor] = second["weights"]
    assert all(torch.equal(weight, weights[key]) for key, weight in first["weights"].items())


def test_models_whose_tokens_cannot_be_sliced_are_refused(both):
    start = "update.sequence_parallel_size = 2: models.actor = FOLDER: "
    for rank in both:
        assert rank["window"] == (
            f"{start}MistralForCausalLM has a sliding window, for which models.attention = sdpa masks only this "
            "rank's tokens; use varlen or flash_attention_2"
        )
        assert (
            rank["alibi"] == f"{start}BloomForCausalLM pads its sequences, and only packed tokens can be sliced; use 1"
        )
        assert rank["eager"] == (
            f"{start}LlamaForCausalLM runs with models.attention = eager; tokens can be sliced with varlen, "
            "flash_attention_2, sdpa"
        )


def test_data_parallel_and_sequence_parallel_ranks(both):
    assert [rank["ranks"] for rank in both] == [[(0, 2), (0, 1), (0, 2)], [(1, 2), (0, 1), (1, 2)]]


def test_items_of_all_ranks_are_computed_in_one_call(both):
    assert [rank["together"].tolist() for rank in both] == [[4, 9], [15]]
    assert apply_together(None, [4.0, 5.0], lambda items: torch.tensor(items).cumsum(0)).tolist() == [4, 9]


@pytest.mark.parametrize(
    "heads, key_heads, size, message",
    [
        (8, 2, 2, None),
        (8, 2, 4, None),
        (8, None, 8, None),
        (6, 2, 4, "must divide the 6 attention heads of models.actor"),
        (12, 3, 2, "must divide the 3 key heads of models.actor, or be a multiple of them"),
    ],
)
def test_attention_heads_must_divide_over_the_ranks(heads, key_heads, size, message):
    config = LlamaConfig(num_attention_heads=heads, num_key_value_heads=key_heads, hidden_size=32 * heads)
    if message is None:
        check_heads(config, size, where="models.actor")
        return
    with pytest.raises(ConfigError) as caught:
        check_heads(config, size, where="models.actor")
    assert str(caught.value) == f"update.sequence_parallel_size = {size}: {message}"


def test_padding_is_one_more_sequence():
    packed = pack(make_batch(), [0, 3, 6], CPU)  # 7, 7 and 3 tokens
    inputs = packed_inputs(packed)
    assert pad_to_ranks(*inputs.values(), 1)[0] is packed.input_ids
    ids, positions, bounds, longest = pad_to_ranks(*inputs.values(), 4)
    assert ids[0].tolist() == [*packed.input_ids[0].tolist(), 0, 0, 0]
    assert positions[0].tolist() == [*range(7), *range(7), *range(3), *range(3)]
    assert bounds.tolist() == [0, 7, 14, 17, 20] and bounds.dtype == torch.int32 and longest == 7
    assert pad_to_ranks(*packed_inputs(pack(make_batch(), [], CPU)).values(), 4)[3] == 3


if __name__ == "__main__":
    main()
