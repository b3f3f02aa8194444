"""The one-pass token loss by the Triton kernels, in the interpreter, against autograd through all logits in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from hybrid_rl_kernels import logit_passes, token_loss
from hybrid_rl_kernels.reference import LogitTransform

PATHS = ["fused", "chunked"]
PLAIN = {"temperature": 1.0, "logit_scale": 1.0, "softcap": None}
TRANSFORMS = [PLAIN, {**PLAIN, "temperature": 0.7}, {"temperature": 0.7, "logit_scale": 3.0, "softcap": 2.0}]
N, H, V = 40, 8, 101


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    patch = pytest.MonkeyPatch()
    tiles = logit_passes.Tiles(rows=16, columns=32, k=16, num_warps=1, num_stages=1, group=2)
    patch.setattr(logit_passes, "NUMERATOR_TILES", tiles)
    patch.setattr(logit_passes, "CHUNK_ROWS", 32)
    patch.setattr(logit_passes, "CHUNK_COLUMNS", 64)
    patch.setattr(logit_passes, "ROW_TILE", (8, 32))
    yield
    patch.undo()


def random_case(spread: float = 1.0, dtype: torch.dtype = torch.float32, rows: int = N) -> tuple[Tensor, ...]:
    """Return hidden, weight and bias with gradients, and targets; spread scales the logits."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight, bias = (torch.randn(*shape, generator=generator) for shape in ((rows, H), (V, H), (V,)))
    inputs = ((hidden * spread).to(dtype), weight.to(dtype), bias.to(dtype))
    return *(x.requires_grad_() for x in inputs), torch.randint(0, V, (rows,), generator=generator)


def clipped(old: Tensor, advantages: Tensor, entropy_coef: float):
    """Return PPO's objective as the function of a slice that the kernels take."""

    def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        ratio = (logprobs - old[rows].to(logprobs)).exp()
        signs = advantages[rows].to(logprobs)
        objective = torch.minimum(ratio * signs, ratio.clamp(0.8, 1.2) * signs)
        return -objective - entropy_coef * entropy if entropy_coef else -objective

    return loss


def exact(inputs, targets: Tensor, options: dict, loss) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return loss and gradients in float64 from all logits at once."""
    hidden, weight, bias = (x.detach().double().requires_grad_() for x in inputs)
    logits = (hidden @ weight.t() + bias) * options["logit_scale"]
    if options["softcap"] is not None:
        logits = options["softcap"] * torch.tanh(logits / options["softcap"])
    distribution = torch.distributions.Categorical(logits=logits / options["temperature"])
    total = loss(distribution.log_prob(targets), distribution.entropy(), slice(0, len(targets))).sum()
    return total, torch.autograd.grad(total, (hidden, weight, bias))


@pytest.mark.parametrize("transform", TRANSFORMS, ids=str)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
@pytest.mark.parametrize(
    "path, dtype, tolerance", [("fused", torch.float32, 1e-5), ("chunked", torch.bfloat16, 2e-2)], ids=str
)
def test_loss_and_gradients_match_float64(path, dtype, tolerance, entropy_coef, transform):
    *inputs, targets = random_case(dtype=dtype)
    old, advantages = torch.randn(2, N, generator=torch.Generator().manual_seed(1))
    loss = clipped(old - 3, advantages, entropy_coef)
    ours, logprobs, entropy = token_loss.token_loss(*inputs, targets, LogitTransform(**transform), loss, path)
    gradients = torch.autograd.grad(2 * ours, inputs)

    wanted, exact_gradients = exact(inputs, targets, transform, loss)
    assert ours.item() == pytest.approx(wanted.item(), rel=1e-4, abs=1e-4)
    assert not logprobs.requires_grad and not entropy.requires_grad
    recomputed = loss(logprobs, entropy, slice(0, N)).sum()
    assert recomputed.item() == pytest.approx(ours.item(), rel=1e-5, abs=1e-5)
    for mine, theirs in zip(gradients, exact_gradients, strict=True):
        assert mine.dtype == dtype
        scale = 2 * theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), 2 * theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("path, dtype, tolerance", [("fused", torch.float32, 1e-3), ("chunked", torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("entropy_coef", [0.0, 0.3])
def test_targets_without_any_share(path, dtype, tolerance, entropy_coef):
    # Log-probs below -500, far beyond what the numerators of a row reach: such rows take another way. Float32 logits
    # of 1000 are good to 1e-4 at best.
    *inputs, targets = random_case(60.0, dtype)

    def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return logprobs - entropy_coef * entropy if entropy_coef else logprobs

    ours, logprobs, _ = token_loss.token_loss(*inputs, targets, LogitTransform(**PLAIN), loss, path)
    assert logprobs.min() < -500
    _, exact_gradients = exact(inputs, targets, PLAIN, loss)
    for mine, theirs in zip(torch.autograd.grad(ours, inputs), exact_gradients, strict=True):
        scale = theirs.abs().max().item()
        torch.testing.assert_close(mine.double(), theirs, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize("path", PATHS)
def test_strides_do_not_show(path):
    hidden, weight, bias, targets = random_case()
    columns = torch.randn(N, 2, generator=torch.Generator().manual_seed(1))
    apart = (torch.stack([x, x.flip(0)], dim=-1)[..., 0] for x in (hidden, weight, bias))  # every second element
    results = []
    for inputs, labels, view in (
        ((hidden, weight, bias), targets, lambda x: x[:, None] * columns[:, :1]),
        (tuple(apart), torch.stack([targets, targets.flip(0)], 1)[:, 0], lambda x: torch.stack([x, x], 1) * columns),
    ):

        def loss(logprobs: Tensor, entropy: Tensor, rows: slice, view=view) -> Tensor:
            return view(logprobs)[:, 0]  # the second gradient is a column of a matrix

        total, logprobs, _ = token_loss.token_loss(*inputs, labels, LogitTransform(**PLAIN), loss, path)
        results.append((total, logprobs, *torch.autograd.grad(total, (hidden, weight, bias))))
    for place, (plain, apart_from_each_other) in enumerate(zip(*results, strict=True)):
        # The total is PyTorch's sum of the losses, whose order is another for strided ones on some processors.
        torch.testing.assert_close(plain, apart_from_each_other, rtol=0 if place else 1e-6, atol=0)


@pytest.mark.slow
@settings(max_examples=5, deadline=None)
@given(
    st.lists(st.booleans(), min_size=N, max_size=N),
    st.sampled_from([math.nan, math.inf, -math.inf, 3e38]),
    st.sampled_from(PATHS),
    st.sampled_from([0.0, 0.3]),
)
def test_ignored_rows_change_no_bit(ignored, garbage, path, entropy_coef):
    hidden, weight, bias, targets = random_case()
    is_ignored = torch.tensor(ignored)
    targets[is_ignored] = -100

    runs = []
    for content in (0.0, garbage):
        filled = torch.where(is_ignored[:, None], content, hidden.detach()).requires_grad_()

        def loss(logprobs: Tensor, entropy: Tensor, rows: slice, content: float = content) -> Tensor:
            # The gradient that the loss sends to an ignored row may be anything as well.
            return torch.where(is_ignored[rows], content, 1.0) * logprobs - entropy_coef * entropy

        results = token_loss.token_loss(filled, weight, bias, targets, LogitTransform(**PLAIN), loss, path)
        gradients = torch.autograd.grad(results[0], (filled, weight, bias))
        runs.append((*results[1:], *gradients))

    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    assert not runs[1][2][is_ignored].any()


def test_blocks_do_not_show(monkeypatch):
    *inputs, targets = random_case(rows=270)
    loss = clipped(torch.full((270,), -4.0), torch.linspace(-1, 1, 270), 0.0)
    slices = []

    def seen(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        slices.append((rows.start, rows.stop))
        return loss(logprobs, entropy, rows)

    results = []
    for size in (token_loss.NUMERATOR_BYTES, 128 * 4 * V):
        monkeypatch.setattr(token_loss, "NUMERATOR_BYTES", size)
        total, *rest = token_loss.token_loss(*inputs, targets, LogitTransform(**PLAIN), seen, "fused")
        results.append((total, *rest, *torch.autograd.grad(total, inputs)))
    assert slices == [(0, 270), (0, 128), (128, 256), (256, 270)]
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_no_tokens():
    *inputs, targets = random_case(rows=0)
    loss, logprobs, entropy = token_loss.token_loss(
        *inputs, targets, LogitTransform(**PLAIN), lambda logprobs, *_: logprobs, "fused"
    )
    assert loss.item() == 0 and logprobs.shape == entropy.shape == (0,)
    loss.backward()
    assert inputs[0].grad.shape == (0, H) and not inputs[1].grad.any()


def test_backward_runs_once():
    *inputs, targets = random_case(rows=3)
    loss, _, _ = token_loss.token_loss(
        *inputs, targets, LogitTransform(**PLAIN), lambda logprobs, *_: logprobs, "fused"
    )
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        loss.backward()


@pytest.mark.parametrize("factor", [1.0, -3.0])
def test_a_factor_on_the_loss_is_a_factor_on_the_gradients(factor):
    hidden, weight, _, targets = random_case()
    transform = LogitTransform(**PLAIN)
    gradients = []
    for scale in (1.0, factor):
        inputs = [x.detach().requires_grad_() for x in (hidden, weight)]
        loss, _, _ = token_loss.token_loss(*inputs, None, targets, transform, lambda x, *_: -x, "fused")
        gradients.append(torch.autograd.grad(scale * loss, inputs))
    for plain, scaled in zip(*gradients, strict=True):
        torch.testing.assert_close(scaled, factor * plain, rtol=1e-6, atol=0)
