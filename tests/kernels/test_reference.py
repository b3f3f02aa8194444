"""The PyTorch reference, which is the oracle of all kernels, against numbers by hand and torch's own functions."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rl_kernels import fused_logprobs, gae, reference

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]


def random_case(N: int, H: int, V: int, dtype: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden [N, H] and weight [V, H] with gradients, and targets [N] with both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(N, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(V, H, generator=generator).to(dtype).requires_grad_()
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])[:N]
    return hidden, weight, targets


def oracle(hidden: Tensor, weight: Tensor, targets: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies by torch, in float64 and from all logits at once."""
    distribution = torch.distributions.Categorical(logits=hidden.double() @ weight.double().t() / temperature)
    return distribution.log_prob(targets), distribution.entropy()


def test_logprobs_by_hand():
    # Logits 2 1 0: at temperature 1, 1 - ln(e^2 + e + 1) = 1 - 2.407606; at 0.5 they are 4 2 0: 2 - 4.142932.
    hidden, weight, target = torch.ones(1, 1), torch.tensor([[2.0], [1.0], [0.0]]), torch.tensor([1])
    assert fused_logprobs(hidden, weight, target)[0].item() == pytest.approx(-1.407606, abs=1e-6)
    assert fused_logprobs(hidden, weight, target, 0.5)[0].item() == pytest.approx(-2.142932, abs=1e-6)
    bias = torch.tensor([-2.0, -1.0, 0.0])  # makes all logits equal
    assert fused_logprobs(hidden, weight, target, 1.0, bias)[0].item() == pytest.approx(-math.log(3), abs=1e-6)


@pytest.mark.parametrize("V", [1003, 50257, 129920])
def test_equal_logits_are_a_uniform_distribution(V):
    logprobs, entropy = fused_logprobs(torch.ones(3, 2), torch.full((V, 2), 0.25), torch.tensor([0, V - 1, -100]))
    expected = torch.tensor([math.log(V), math.log(V), 0])
    torch.testing.assert_close(logprobs, -expected, rtol=1e-6, atol=0)
    torch.testing.assert_close(entropy, expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("N, H, V", [(1025, 8, 61), (3, 5, 1003), (3, 4, 129920), (1, 1, 1)])
@pytest.mark.parametrize("dtype, rtol", [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)])
def test_matches_torch_on_upcast_logits(N, H, V, dtype, rtol):
    hidden, weight, targets = random_case(N, H, V, dtype)
    seeds = torch.randn(2, N, generator=torch.Generator().manual_seed(1))

    results, gradients = [], []
    for function in (fused_logprobs, oracle):
        logprobs, entropy = function(hidden, weight, targets, 0.7)
        results.append((logprobs, entropy))
        gradients.append(torch.autograd.grad((logprobs * seeds[0] + entropy * seeds[1]).sum(), (hidden, weight)))

    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours, expected.float(), rtol=1e-5, atol=1e-6)  # float32 whatever the inputs
    for ours, expected in zip(*gradients, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours, expected, rtol=rtol, atol=rtol * expected.abs().max().item())


def test_scaled_and_capped_logits_by_hand():
    # Logits 4 2 0, halved: 2 1 0 as in the test above; at temperature 0.5 again 4 2 0.
    hidden, weight, target = torch.ones(1, 1), torch.tensor([[4.0], [2.0], [0.0]]), torch.tensor([1])
    assert fused_logprobs(hidden, weight, target, logit_scale=0.5)[0].item() == pytest.approx(-1.407606, abs=1e-6)
    assert fused_logprobs(hidden, weight, target, 0.5, logit_scale=0.5)[0].item() == pytest.approx(-2.142932, abs=1e-6)
    # Capped at 2 after halving: 2 tanh 1 = 1.523188, 2 tanh 0.5 = 0.924234, 0; then over the temperature of 2:
    # 0.761594 0.462117 0, whose exponentials sum to 2.141687 + 1.587431 + 1 = 4.729118, ln 1.553739.
    capped, entropy = fused_logprobs(hidden, weight, target, 2.0, logit_scale=0.5, softcap=2.0)
    assert capped.item() == pytest.approx(0.462117 - 1.553739, abs=1e-5)
    expected = 1.553739 - (2.141687 * 0.761594 + 1.587431 * 0.462117) / 4.729118
    assert entropy.item() == pytest.approx(expected, abs=1e-5)


def test_capped_logits_do_not_differ_by_more_than_twice_the_cap():
    hidden = torch.ones(1, 1, requires_grad=True)
    weight = torch.tensor([[1e6], [-1e6], [-1e6]])
    logprobs, _ = fused_logprobs(hidden, weight, torch.tensor([1]), softcap=3.0)
    assert logprobs.item() == pytest.approx(-6 - math.log1p(2 * math.exp(-6)), abs=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.item() == 0  # flat there


@pytest.mark.parametrize("transform", [{}, {"logit_scale": 0.3}, {"softcap": 2.0}, {"logit_scale": 3, "softcap": 1.5}])
@pytest.mark.parametrize("outputs", [(0,), (1,), (0, 1)])
def test_gradcheck(outputs, transform, monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ROWS", 3)
    hidden, weight, targets = random_case(7, 4, 11, torch.float64)
    targets[2] = -100
    bias = torch.linspace(-1, 1, 11, dtype=torch.float64, requires_grad=True)

    def run(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, ...]:
        results = fused_logprobs(hidden, weight, targets, 0.7, bias, **transform)
        return tuple(results[i] for i in outputs)

    assert torch.autograd.gradcheck(run, (hidden, weight, bias))


def test_extreme_logits():
    # Targets at the top and below it: 0 and -1e4. All mass on one word: no entropy, gradient 0 at the top.
    hidden = torch.ones(2, 1, requires_grad=True)
    weight = torch.zeros(1003, 1)
    weight[5] = 1e4
    logprobs, entropy = fused_logprobs(hidden, weight, torch.tensor([5, 1002]))
    assert logprobs.tolist() == [0, -1e4]
    assert entropy.tolist() == [0, 0]
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.tolist() == [[0], [-1e4]]  # of row 1: w[1002] - w[5] = 0 - 1e4


def test_forbidden_words_have_no_share():
    # Two words left of 1003, with equal logits: ln 2; the others' -inf makes no 0 * inf.
    bias = torch.full((1003,), -math.inf)
    bias[[3, 1002]] = 0
    hidden = torch.ones(2, 1, requires_grad=True)
    weight = torch.full((1003, 1), 0.5, requires_grad=True)
    logprobs, entropy = fused_logprobs(hidden, weight, torch.tensor([1002, 0]), bias=bias)
    assert logprobs.tolist() == pytest.approx([-math.log(2), -math.inf])
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2)
    (logprobs[0] + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()
    assert weight.grad[[1002, 3]].flatten().tolist() == [0.5, -0.5]
    assert weight.grad[:3].count_nonzero() == 0


@settings(max_examples=40, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from(GARBAGE), st.integers(0, 99))
def test_ignored_rows_change_no_bit(ignored, garbage, seed):
    hidden, weight, targets = random_case(len(ignored), 3, 13, torch.float32, seed)
    is_ignored = torch.tensor(ignored)
    targets[is_ignored] = -100

    runs = []
    for content in (0.0, garbage):
        filled = torch.where(is_ignored[:, None], content, hidden.detach()).requires_grad_()
        logprobs, entropy = fused_logprobs(filled, weight, targets)
        # The caller's gradient of an ignored row may be anything as well.
        upstream = torch.where(is_ignored, content, 1.0)
        gradients = torch.autograd.grad((logprobs, entropy), (filled, weight), (upstream, upstream))
        runs.append((logprobs, entropy, *gradients))

    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    logprobs, entropy, grad_hidden, _ = runs[1]
    assert not logprobs[is_ignored].any() and not entropy[is_ignored].any() and not grad_hidden[is_ignored].any()


def test_nan_in_a_kept_row_is_visible():
    hidden, weight, targets = random_case(3, 2, 5, torch.float32)
    broken = torch.where(torch.tensor([[False], [True], [False]]), torch.nan, hidden)
    logprobs, entropy = fused_logprobs(broken, weight, targets)
    assert logprobs.isnan().tolist() == entropy.isnan().tolist() == [False, True, False]


def test_no_rows():
    hidden, weight, targets = random_case(0, 3, 7, torch.bfloat16)
    logprobs, entropy = fused_logprobs(hidden, weight, targets)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 3)
    assert not weight.grad.any()


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_all_logits_never_exist(monkeypatch):
    monkeypatch.setattr(reference, "CHUNK_ROWS", 4)
    hidden, weight, targets = random_case(40, 3, 101, torch.float32)
    with LargestTensor() as largest:
        logprobs, entropy = fused_logprobs(hidden, weight, targets)
        (logprobs.sum() + entropy.sum()).backward()
    assert largest.num_elements == 4 * 101  # a chunk's, out of 40 * 101


def test_chunks_do_not_show(monkeypatch):
    hidden, weight, targets = random_case(10, 3, 17, torch.float32)
    whole = fused_logprobs(hidden, weight, targets)
    monkeypatch.setattr(reference, "CHUNK_ROWS", 3)
    for ours, expected in zip(fused_logprobs(hidden, weight, targets), whole, strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-6, atol=1e-6)


def test_weight_gradient_is_summed_in_float32(monkeypatch):
    # 1000 equal rows, one per chunk: a bfloat16 sum of equal addends stops growing at 256 of them.
    monkeypatch.setattr(reference, "CHUNK_ROWS", 1)
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    logprobs, _ = fused_logprobs(
        torch.ones(1000, 1, dtype=torch.bfloat16), weight, torch.zeros(1000, dtype=torch.int64)
    )
    logprobs.sum().backward()
    assert weight.grad.tolist() == [[500], [-500]]  # each row gives 1 - p = 0.5


def test_backward_reads_the_parameter_and_not_its_old_storage():
    # ZeRO-3 frees param.data after forward and gathers it again, elsewhere, before backward.
    hidden, weight, targets = random_case(4, 3, 7, torch.float32)
    (expected,) = torch.autograd.grad(fused_logprobs(hidden, weight, targets)[0].sum(), hidden)
    parameter = torch.nn.Parameter(weight.detach().clone())
    logprobs, _ = fused_logprobs(hidden, parameter, targets)
    gathered = parameter.data.clone()
    parameter.data.fill_(torch.nan)
    parameter.data = torch.empty(0)
    parameter.data = gathered
    assert torch.equal(torch.autograd.grad(logprobs.sum(), hidden)[0], expected)


def test_autocast_does_not_round():
    hidden, weight, targets = random_case(4, 3, 7, torch.float32)
    expected = fused_logprobs(hidden, weight, targets)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert all(torch.equal(a, b) for a, b in zip(fused_logprobs(hidden, weight, targets), expected, strict=True))


def test_frozen_weight_gets_no_gradient():
    hidden, weight, targets = random_case(4, 3, 7, torch.float32)
    fused_logprobs(hidden, weight.detach(), targets)[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"hidden": torch.ones(2, 3, 4)}, "hidden must be"),
        ({"weight": torch.ones(7, 5)}, r"\[2, 3\] and \[7, 5\]"),
        ({"targets": torch.zeros(1, dtype=torch.int64)}, "targets must be"),
        ({"bias": torch.zeros(1, 7)}, "bias must be"),
        ({"temperature": 0.0}, "temperature must be"),
    ],
)
def test_logprobs_refuse_what_does_not_fit(changes, message):
    good = {"hidden": torch.ones(2, 3), "weight": torch.ones(7, 3), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        fused_logprobs(**{**good, **changes})


def row(*values: float) -> Tensor:
    return torch.tensor([values])


def test_gae_by_hand():
    rewards, values, mask = row(0, 0, 1), row(0.5, 1, 2), torch.ones(1, 3, dtype=torch.bool)
    # gamma = lambda = 0.5. t=2: 1 - 2 = -1. t=1: 0.5*2 - 1 = 0, + 0.25*-1. t=0: 0.5*1 - 0.5 = 0, + 0.25*-0.25
    assert gae(rewards, values, mask, 0.5, 0.5).tolist() == [[-0.0625, -0.25, -1]]
    # A value of 4 after the end. t=2: 1 + 0.5*4 - 2 = 1. t=1: 0 + 0.25*1. t=0: 0 + 0.25*0.25
    assert gae(rewards, values, mask, 0.5, 0.5, bootstrap_values=torch.tensor([4.0])).tolist() == [[0.0625, 0.25, 1]]


def test_gae_skips_a_gap_by_hand():
    rewards, values, mask = row(0, 9, 1, 9), row(0.5, 9, 2, 9), torch.tensor([[1, 0, 1, 0]])
    # t=2: 1 - 2 = -1. t=0 is followed by t=2: 0 + 0.5*2 - 0.5 = 0.5, + 0.25*-1.
    assert gae(rewards, values, mask, 0.5, 0.5).tolist() == [[0.25, 0, -1, 0]]
    # The bootstrap belongs to the last sampled token, behind which only padding lies: t=2: 1 + 0.5*4 - 2 = 1.
    assert gae(rewards, values, mask, 0.5, 0.5, torch.tensor([4.0])).tolist() == [[0.5 + 0.25, 0, 1, 0]]


def test_gae_discounts_from_turn_to_turn_by_hand():
    rewards, values, mask = row(1, 9, 0, 1), row(0.5, 9, 1, 2), torch.tensor([[1, 0, 1, 1]])
    ends = torch.tensor([[1, 1, 0, 0]])  # the gap's entry is not read
    # t=3: 1 - 2 = -1. t=2: 0.5*2 - 1 = 0, + 0.25*-1. t=0, where gamma is 0.5*0.5: 1 + 0.25*1 - 0.5 = 0.75,
    # + 0.25*0.5*-0.25.
    found = gae(rewards, values, mask, 0.5, 0.5, turn_ends=ends, turn_gamma=0.5)
    assert found.tolist() == [[0.75 - 0.03125, 0, -0.25, -1]]
    # Nothing passes from a turn to the one before it.
    found = gae(rewards, values, mask, 0.5, 0.5, turn_ends=ends, turn_gamma=0.0)
    assert found.tolist() == [[1 - 0.5, 0, -0.25, -1]]


@st.composite
def gae_cases(draw) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return rewards, values, a mask with gaps and empty rows, and bootstrap values."""
    B, T = draw(st.integers(1, 4)), draw(st.integers(1, 9))
    mask = draw(st.lists(st.lists(st.booleans(), min_size=T, max_size=T), min_size=B, max_size=B))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    rewards, values = torch.randn(2, B, T, generator=generator)
    return rewards, values, torch.tensor(mask), torch.randn(B, generator=generator)


@settings(max_examples=60, deadline=None)
@given(gae_cases(), st.sampled_from(GARBAGE))
def test_gae_reads_nothing_outside_the_mask(case, garbage):
    rewards, values, mask, bootstrap = case
    expected = gae(rewards, values, mask, 0.9, 0.8, bootstrap)
    rewards, values = (torch.where(mask, x, garbage) for x in (rewards, values))
    bootstrap = torch.where(mask.any(1), bootstrap, garbage)
    assert torch.equal(gae(rewards, values, mask, 0.9, 0.8, bootstrap), expected)
    assert not expected[~mask].any()


@settings(max_examples=60, deadline=None)
@given(gae_cases())
def test_gae_of_a_row_is_gae_of_the_row_without_its_gaps(case):
    rewards, values, mask, bootstrap = case
    ends = rewards > 0.5
    advantages = gae(rewards, values, mask, 0.9, 0.8, bootstrap, turn_ends=ends, turn_gamma=0.7)
    for b, keep in enumerate(mask):
        *alone, own_ends = (x[b, keep][None] for x in (rewards, values, mask, ends))
        expected = gae(*alone, 0.9, 0.8, bootstrap[b, None], turn_ends=own_ends, turn_gamma=0.7)
        assert torch.equal(advantages[b, keep], expected[0])


@settings(max_examples=60, deadline=None)
@given(gae_cases())
def test_undiscounted_advantage_is_what_is_still_to_come_less_the_value(case):
    rewards, values, mask, bootstrap = case
    advantages = gae(rewards, values, mask, 1, 1, bootstrap)
    to_come = (rewards * mask).flip(1).cumsum(1).flip(1) + bootstrap[:, None]
    torch.testing.assert_close(advantages, (to_come - values) * mask, rtol=1e-5, atol=1e-5)


def test_gae_with_a_lambda_per_row_by_hand():
    rewards, values, mask = torch.zeros(2, 3), torch.zeros(2, 3), torch.tensor([[1, 1, 1], [1, 0, 1]])
    rewards[:, 2] = 1
    # Each step back multiplies by gamma * lambda: 0.5 * 0.5 in row 0, 0.5 * 1 in row 1, whose gap is no step.
    gae_lambda = torch.tensor([0.5, 1])
    assert gae(rewards, values, mask, 0.5, gae_lambda).tolist() == [[0.0625, 0.25, 1], [0.5, 0, 1]]


@settings(max_examples=60, deadline=None)
@given(gae_cases(), st.data())
def test_each_row_decays_by_its_own_lambda(case, data):
    rewards, values, mask, bootstrap = case
    lambdas = data.draw(st.lists(st.floats(0, 1), min_size=len(mask), max_size=len(mask)))
    per_row = torch.tensor(lambdas, dtype=torch.float64)
    advantages = gae(rewards, values, mask, 0.97, per_row, bootstrap)
    for b, gae_lambda in enumerate(lambdas):
        assert torch.equal(advantages[b], gae(rewards, values, mask, 0.97, gae_lambda, bootstrap)[b])


def test_one_step_advantage_is_the_temporal_difference():
    rewards, values = torch.randn(2, 3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    advantages = gae(rewards, values, torch.ones(3, 7), 0.9, 0)
    assert advantages.dtype == torch.float64
    for t, following in pairwise(range(7)):
        torch.testing.assert_close(advantages[:, t], rewards[:, t] + 0.9 * values[:, following] - values[:, t])


def test_gae_of_nothing():
    assert gae(torch.ones(2, 0), torch.ones(2, 0), torch.ones(2, 0), 1, 1).shape == (2, 0)
    assert gae(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3), 1, 1).shape == (0, 3)


def test_gae_refuses_what_does_not_fit():
    x = torch.ones(2, 3)
    with pytest.raises(ValueError, match=r"values \[2, 1\]"):
        gae(x, torch.ones(2, 1), x, 1, 1)
    with pytest.raises(ValueError, match="bootstrap_values"):
        gae(x, x, x, 1, 1, bootstrap_values=torch.ones(3))
    for gae_lambda in (torch.ones(3), torch.ones(2, 1), torch.tensor(1.0)):
        with pytest.raises(ValueError, match="gae_lambda"):
            gae(x, x, x, 1, gae_lambda)
    with pytest.raises(ValueError, match=r"turn_ends \[2, 1\]"):
        gae(x, x, x, 1, 1, turn_ends=torch.ones(2, 1))
