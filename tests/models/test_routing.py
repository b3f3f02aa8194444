"""Routing replay makes a mixture compute with given experts, and the load-balancing loss follows its formula."""

from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM

from hybrid_rl.batch import join, make_train_batch, pack
from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import actor_inputs
from hybrid_rl.models.routing import corrections, find_routers, load_balance
from tests.conftest import make_rollout
from tests.models.families import CPU, FAMILIES, save_random

MIXTURES = ["qwen3-moe", "olmoe", "deepseek2", "deepseek3"]


@pytest.fixture(scope="module", params=MIXTURES)
def actor(request, tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    save_random(AutoModelForCausalLM, FAMILIES[request.param](), folder, tiny / "policy")
    return load_actor(str(folder), ModelsConfig(), CPU)


def own_choices(actor, packed) -> torch.Tensor:
    """Return the experts [N, layers, K] that the routers choose, and the first expert K times in layers without any."""
    routers, seen = find_routers(actor.model), {}
    hooks = [
        router.register_forward_hook(lambda m, i, out, layer=layer: seen.update({layer: out[2]}))
        for layer, router in routers.items()
    ]
    with torch.no_grad():
        actor(**actor_inputs(packed), temperature=1.0)
    for hook in hooks:
        hook.remove()
    like = next(iter(seen.values()))
    layers = [seen.get(layer, torch.zeros_like(like)) for layer in range(actor.model.config.num_hidden_layers)]
    return torch.stack(layers, dim=1).to(torch.int16)


def batch_of(experts: list[torch.Tensor] | None = None):
    sequences = [([3, 5, 9], [4, 8]), ([7, 2], [6, 1, 30]), ([11], [12, 13])]
    return make_train_batch(
        [
            replace(make_rollout(prompt, response, prompt_id=i), routed_experts=None if experts is None else experts[i])
            for i, (prompt, response) in enumerate(sequences)
        ]
    )


@torch.no_grad()
def test_replaying_the_own_choices_changes_nothing(actor):
    packed = pack(batch_of(), [0, 1, 2], CPU)
    free = actor(**actor_inputs(packed), temperature=0.8)[0]
    replayed = actor(**actor_inputs(packed), temperature=0.8, routed_experts=own_choices(actor, packed))[0]
    torch.testing.assert_close(replayed, free, atol=1e-6, rtol=0)


@torch.no_grad()
def test_replayed_experts_are_those_that_compute(actor):
    packed = pack(batch_of(), [0, 1, 2], CPU)
    own = own_choices(actor, packed)
    other = (own + 1) % next(iter(find_routers(actor.model).values())).num_experts
    free = actor(**actor_inputs(packed), temperature=0.8)[0]
    changed = actor(**actor_inputs(packed), temperature=0.8, routed_experts=other)[0]
    assert (changed - free).abs().max() > 1e-3
    without = actor(**actor_inputs(packed), temperature=0.8, routed_experts=torch.full_like(other, -1))[0]
    assert torch.equal(without, free)  # -1 leaves the choice to the router
    assert torch.equal(actor(**actor_inputs(packed), temperature=0.8)[0], free)  # and nothing is left over


@torch.no_grad()
def test_a_sequence_replays_its_own_experts_in_any_micro_batch(actor):
    packed = pack(batch_of(), [0, 1, 2], CPU)
    own = own_choices(actor, packed)
    other = ((own + 1) % 4).split([5, 5, 3])
    batch = batch_of([part[:-1] for part in other])
    expected = torch.zeros(batch.response_mask.shape)
    together = pack(batch, [2, 0, 1], CPU)
    assert together.routed_experts[:2].equal(other[2][:2]) and together.routed_experts[2].eq(-1).all()
    together.scatter(actor(**actor_inputs(together), temperature=1.0)[0], expected)
    for row in range(3):
        alone = pack(batch, [row], CPU)
        found = actor(**actor_inputs(alone), temperature=1.0)[0]
        torch.testing.assert_close(found, expected[row][batch.response_mask[row]], atol=1e-5, rtol=0)


def test_experts_stay_with_their_sequences():
    experts = [torch.full((n, 2, 2), i, dtype=torch.int16) for i, n in enumerate((4, 4, 2))]
    batch = batch_of(experts)
    joined = join([batch.select([2]), batch.select([0, 1])])
    assert [int(each[0, 0, 0]) for each in joined.routed_experts] == [2, 0, 1]
    assert [len(each) for each in joined.routed_experts] == [2, 4, 4]
    with pytest.raises(ValueError, match=r"experts for \[4, 4, 3\] tokens, expected \[4, 4, 2\]"):
        batch_of([*experts[:2], torch.zeros(3, 2, 2, dtype=torch.int16)])


def test_the_balance_is_one_for_even_and_larger_for_uneven_choices():
    even = load_balance(torch.zeros(4, 4), torch.tensor([[0, 1], [2, 3], [0, 2], [1, 3]]), torch.ones(4))
    assert float(even) == pytest.approx(1.0)
    # All tokens prefer expert 0, whose probability is 1 / (1 + 3 e**-10): 4 * (1/2 * p0 + 1/2 * p1).
    logits = torch.tensor([[10.0, 0.0, 0.0, 0.0]]).expand(4, 4)
    found = load_balance(logits, torch.tensor([[0, 1]]).expand(4, 2), torch.ones(4))
    p0, p1 = logits[0].softmax(0)[:2].tolist()
    assert float(found) == pytest.approx(2 * (p0 + p1))


def test_tokens_that_are_not_counted_do_not_matter():
    logits, experts = torch.randn(3, 4), torch.tensor([[0], [1], [2]])
    counted = torch.tensor([1.0, 0.0, 1.0])
    alone = load_balance(logits[[0, 2]], experts[[0, 2]], torch.ones(2))
    assert float(load_balance(logits, experts, counted)) == pytest.approx(float(alone))


def test_the_balance_has_a_gradient_in_every_router_with_checkpointing_too(actor):
    packed = pack(batch_of(), [0, 1, 2], CPU)
    found = []
    for checkpointing in (False, True):
        if checkpointing:
            actor.model.gradient_checkpointing_enable({"use_reentrant": False})
        actor.zero_grad()
        logprobs, _ = actor(**actor_inputs(packed), temperature=1.0, measures_balance=True)
        (logprobs.sum() + 3 * actor.balance).backward()
        found.append([router.weight.grad.clone() for router in find_routers(actor.model).values()])
        actor.zero_grad()
        logprobs, _ = actor(**actor_inputs(packed), temperature=1.0)
        logprobs.sum().backward()
        assert actor.balance is None
        for router, grad in zip(find_routers(actor.model).values(), found[-1], strict=True):
            assert (router.weight.grad - grad).abs().max() > 1e-4
    actor.model.gradient_checkpointing_disable()
    for plain, recomputed in zip(*found, strict=True):
        torch.testing.assert_close(plain, recomputed)


def test_corrections_of_routers_are_weights_of_deepseek3_alone(actor):
    names = list(corrections(actor.model))
    is_deepseek3 = actor.model.config.model_type == "deepseek_v3"
    assert names == (["model.layers.1.mlp.gate.e_score_correction_bias"] if is_deepseek3 else [])
