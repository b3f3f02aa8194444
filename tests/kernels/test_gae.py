"""GAE by the Triton scan, in the interpreter: by hand, against the loop of the reference, and what it must not read."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl_kernels import gae_kernels, gae_reference, reference
from hybrid_rl_kernels.gae_reference import Rows

GARBAGE = [math.nan, math.inf, -math.inf, 3e38, -7.5]


@pytest.fixture(autouse=True, scope="module")
def small_blocks():
    """Blocks of 32 tokens, so that rows of 40 have two."""
    patch = pytest.MonkeyPatch()
    patch.setattr(gae_kernels, "MAX_BLOCK", 32)
    yield
    patch.undo()


def advantages(rows: Rows, gamma: float, gae_lambda: float | Tensor) -> Tensor:
    return gae_kernels.scan(rows, gamma, gae_lambda, has_moments=False, has_returns=False)[0]


def test_by_hand():
    rewards, values = torch.tensor([[0.0, 0, 1]]), torch.tensor([[0.5, 1, 2]])
    rows = Rows(mask=torch.ones(1, 3, dtype=torch.bool), values=values, token_rewards=rewards)
    # gamma = lambda = 0.5. t=2: 1 - 2 = -1. t=1: 0.5*2 - 1 = 0, + 0.25*-1. t=0: 0.5*1 - 0.5 = 0, + 0.25*-0.25
    assert advantages(rows, 0.5, 0.5).tolist() == [[-0.0625, -0.25, -1]]
    # The same reward as a score, and a KL of 2 at a coefficient of 0.25 on each token: 0.5 less reward everywhere.
    shaped = replace(rows, token_rewards=None, scores=torch.ones(1), kl=torch.full((1, 3), 2.0), kl_coef=0.25)
    # t=2: 0.5 - 2 = -1.5. t=1: -0.5 + 0.25*-1.5 = -0.875. t=0: -0.5 + 0.25*-0.875
    assert advantages(shaped, 0.5, 0.5).tolist() == [[-0.71875, -0.875, -1.5]]


def test_a_gap_by_hand():
    rewards, values = torch.tensor([[0.0, 9, 1, 9]]), torch.tensor([[0.5, 9, 2, 9]])
    rows = Rows(mask=torch.tensor([[1, 0, 1, 0]]), values=values, token_rewards=rewards)
    # t=2: 1 - 2 = -1. t=0 is followed by t=2: 0 + 0.5*2 - 0.5 = 0.5, + 0.25*-1
    assert advantages(rows, 0.5, 0.5).tolist() == [[0.25, 0, -1, 0]]
    # The bootstrap belongs to the last sampled token, behind which only padding lies: t=2: 1 + 0.5*4 - 2 = 1.
    bootstrapped = replace(rows, bootstrap_values=torch.tensor([4.0]))
    assert advantages(bootstrapped, 0.5, 0.5).tolist() == [[0.5 + 0.25, 0, 1, 0]]


def test_a_discount_from_turn_to_turn_by_hand():
    rewards, values = torch.tensor([[1.0, 9, 0, 1]]), torch.tensor([[0.5, 9, 1, 2]])
    ends = torch.tensor([[True, True, False, False]])  # the gap's entry is not read
    rows = Rows(mask=torch.tensor([[1, 0, 1, 1]]), values=values, token_rewards=rewards, turn_ends=ends, turn_gamma=0.5)
    # t=3: 1 - 2 = -1. t=2: 0.5*2 - 1 = 0, + 0.25*-1. t=0, where gamma is 0.5*0.5: 1 + 0.25*1 - 0.5, + 0.125*-0.25
    assert advantages(rows, 0.5, 0.5).tolist() == [[0.75 - 0.03125, 0, -0.25, -1]]
    # The same with a gap of more than two blocks of 32 tokens.
    gap = torch.full((1, 69), 9.0)
    parts = {name: getattr(rows, name) for name in ("mask", "values", "token_rewards", "turn_ends")}
    far = {name: torch.cat([x[:, :1], gap.to(x.dtype) * (name != "mask"), x[:, 2:]], 1) for name, x in parts.items()}
    assert advantages(replace(rows, **far), 0.5, 0.5)[0, [0, 70, 71]].tolist() == [0.75 - 0.03125, -0.25, -1]


@st.composite
def cases(draw) -> Rows:
    """Return rows with gaps, some longer than a block and some without any token."""
    B, T = draw(st.integers(1, 3)), draw(st.sampled_from([1, 5, 32, 33, 70]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    share = draw(st.sampled_from([0.0, 0.1, 0.6, 1.0]))
    mask = torch.rand(B, T, generator=generator) < share
    rewards, values, kl = torch.randn(3, B, T, generator=generator)
    scores, bootstrap = torch.randn(2, B, generator=generator)
    turn_ends = torch.rand(B, T, generator=generator) < 0.2 if draw(st.booleans()) else None
    return Rows(mask=mask, values=values, token_rewards=rewards, kl=kl, kl_coef=0.3, scores=scores,
                bootstrap_values=bootstrap, turn_ends=turn_ends, turn_gamma=0.6)  # fmt: skip


def close(a: Tensor, b: Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cases(), st.sampled_from([(0.97, 0.9), (1.0, 1.0), (0.9, 0.0)]), st.booleans())
def test_the_scan_is_the_loop(rows, coefficients, is_per_row):
    gamma, gae_lambda = coefficients
    decay = gae_lambda * torch.linspace(0.5, 1, len(rows.mask)) if is_per_row else gae_lambda
    ours = gae_kernels.scan(rows, gamma, decay, has_moments=True, has_returns=True)
    num_left = rows.mask.flip(1).cumsum(1).flip(1)
    rewards = rows.token_rewards - 0.3 * rows.kl + torch.where(num_left == 1, rows.scores[:, None], 0)
    wanted = reference.gae(
        rewards.double(),
        rows.values.double(),
        rows.mask,
        gamma,
        decay,
        rows.bootstrap_values.double(),
        turn_ends=rows.turn_ends,
        turn_gamma=rows.turn_gamma,
    )
    close(ours[0], wanted.float())
    close(ours[1], ((wanted + rows.values) * rows.mask).float())
    for b, keep in enumerate(rows.mask):
        counted = wanted[b, keep]
        spread = (counted - counted.mean()).square().sum() if len(counted) else 0.0
        close(ours[2][b], torch.tensor([float(len(counted)), counted.mean() if len(counted) else 0.0, spread]).float())


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(cases(), st.sampled_from(GARBAGE))
def test_masked_slots_change_no_bit(rows, garbage):
    wanted = gae_kernels.scan(rows, 0.9, 0.8, has_moments=True, has_returns=True)
    empty = ~rows.mask.any(1)
    filled = {name: torch.where(rows.mask, getattr(rows, name), garbage) for name in ("values", "token_rewards", "kl")}
    filled |= {name: torch.where(empty, garbage, getattr(rows, name)) for name in ("scores", "bootstrap_values")}
    if rows.turn_ends is not None:
        filled["turn_ends"] = rows.turn_ends | ~rows.mask
    ours = gae_kernels.scan(replace(rows, **filled), 0.9, 0.8, has_moments=True, has_returns=True)
    assert all(torch.equal(a, b) for a, b in zip(ours, wanted, strict=True))
    assert not ours[0][~rows.mask].any()


@pytest.mark.parametrize("module", [gae_kernels, gae_reference])
def test_packed_is_padded(module):
    lengths = [40, 0, 3, 64, 1]
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([0, *lengths]).cumsum(0).int()
    tokens = int(bounds[-1])
    rewards, values, kl = torch.randn(3, tokens, generator=generator)
    mask, turn_ends = torch.rand(2, tokens, generator=generator) < torch.tensor([[0.7], [0.2]])
    scores, bootstrap, gae_lambda = torch.rand(3, len(lengths), generator=generator)
    packed = Rows(mask=mask, values=values, token_rewards=rewards, kl=kl, kl_coef=0.1, scores=scores,
                  bootstrap_values=bootstrap, turn_ends=turn_ends, turn_gamma=0.5, cu_seqlens=bounds)  # fmt: skip
    together = module.scan(packed, 0.97, gae_lambda, has_moments=True, has_returns=True)
    for b, length in enumerate(lengths):
        here = slice(int(bounds[b]), int(bounds[b]) + length)
        alone = Rows(mask=mask[None, here], values=values[None, here], token_rewards=rewards[None, here],
                     kl=kl[None, here], kl_coef=0.1, scores=scores[b, None],
                     bootstrap_values=bootstrap[b, None], turn_ends=turn_ends[None, here],
                     turn_gamma=0.5)  # fmt: skip
        wanted = module.scan(alone, 0.97, gae_lambda[b, None], has_moments=True, has_returns=True)
        close(together[0][here], wanted[0][0])
        close(together[1][here], wanted[1][0])
        close(together[2][b], wanted[2][0])


def test_strides_do_not_show():
    mask, (values, rewards) = torch.rand(9) < 0.7, torch.randn(2, 9)
    fields = (mask, values, rewards, torch.tensor([0, 4, 9]))
    apart = (torch.stack([x, x.flip(0)], dim=-1)[..., 0] for x in (mask.int(), *fields[1:]))
    ours, theirs = (
        advantages(Rows(mask=m, values=v, token_rewards=r, cu_seqlens=bounds), 0.9, 0.8)
        for m, v, r, bounds in (fields, tuple(apart))
    )
    assert torch.equal(ours, theirs)


@settings(max_examples=20, deadline=None)
@given(cases())
def test_without_values_it_is_what_is_still_to_come(rows):
    plain = Rows(mask=rows.mask, token_rewards=rows.token_rewards)
    to_come = (rows.token_rewards * rows.mask).flip(1).cumsum(1).flip(1) * rows.mask
    close(advantages(plain, 1.0, 1.0), to_come)


@pytest.mark.parametrize("module", [gae_kernels, gae_reference])
@pytest.mark.parametrize("num_rows", [1, 3, 1500])
def test_moments_merge_to_those_of_all(module, num_rows):
    generator = torch.Generator().manual_seed(0)
    # A large mean beside a small spread is what a sum of squares loses.
    x = 1000 + torch.randn(num_rows, 20, generator=generator)
    mask = torch.rand(num_rows, 20, generator=generator) < 0.5
    count = mask.sum(1)
    mean = (x.double() * mask).sum(1) / count.clamp_min(1)
    squares = (((x.double() - mean[:, None]) * mask) ** 2).sum(1)
    merged = module.merge_moments(torch.stack([count, mean, squares], 1).float())
    counted = x[mask].double()
    assert merged.dtype == torch.float64
    assert merged[0] == len(counted)
    assert merged[1].item() == pytest.approx(counted.mean().item(), rel=1e-6)
    assert merged[2].item() == pytest.approx((counted - counted.mean()).square().sum().item(), rel=1e-3)


@pytest.mark.parametrize("module", [gae_kernels, gae_reference])
def test_whitening_by_hand(module):
    # 1 3 5 7 without the 7: mean 3, population deviation sqrt(8 / 3).
    x, mask = torch.tensor([[1.0, 3], [5, math.nan]]), torch.tensor([[True, True], [True, False]])
    moments = torch.tensor([3.0, 3, 8], dtype=torch.float64)
    unit = 2 / math.sqrt(8 / 3)
    close(module.whiten(x, mask, moments, 1e-6), torch.tensor([[-unit, 0], [unit, 0]]))
    equal = torch.tensor([3.0, 5, 1e-12], dtype=torch.float64)
    assert not module.whiten(torch.full((2, 2), 5.0), mask, equal, 1e-6).any()
    alone = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    assert not module.whiten(torch.zeros(2, 2), mask, alone, 1e-6).any()


def test_nothing():
    for shape in ((2, 0), (0, 3)):
        rows = Rows(mask=torch.ones(shape, dtype=torch.bool), values=torch.ones(shape))
        found, _, moments = gae_kernels.scan(rows, 1.0, 1.0, has_moments=True, has_returns=False)
        assert found.shape == shape and not moments.any()
