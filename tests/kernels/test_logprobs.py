"""Log-probs by the Triton kernels, in the interpreter, against numbers by hand and torch's distributions in float64.

bfloat16 goes through the chunked path alone: the interpreter multiplies no bfloat16 tiles.
"""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from hybrid_rl_kernels import logit_passes, logprobs
from hybrid_rl_kernels.logprobs import fused_logprobs

GARBAGE = [math.nan, math.inf, -math.inf, 3e38]
PATHS = ["fused", "chunked"]
TRANSFORMS = [{}, {"temperature": 0.7, "bias": True}, {"logit_scale": 3.0, "softcap": 2.0, "bias": True}]


@pytest.fixture(autouse=True, scope="module")
def small_tiles():
    """Tiles of which even a small case has several, with a rest in every direction."""
    patch = pytest.MonkeyPatch()
    tiles = logit_passes.Tiles(rows=16, columns=32, k=16, num_warps=1, num_stages=1, group=2)
    patch.setattr(logit_passes, "STATS_TILES", tiles)
    patch.setattr(logit_passes, "GRADIENT_TILES", tiles)
    patch.setattr(logit_passes, "CHUNK_ROWS", 16)
    patch.setattr(logit_passes, "CHUNK_COLUMNS", 64)
    patch.setattr(logit_passes, "ROW_TILE", (8, 32))
    yield
    patch.undo()


def random_case(N: int, H: int, V: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, ...]:
    """Return hidden [N, H], weight [V, H] and bias [V] with gradients, and targets with both ends of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    hidden, weight, bias = (
        torch.randn(*shape, generator=generator).to(dtype).requires_grad_() for shape in ((N, H), (V, H), (V,))
    )
    targets = torch.randint(0, V, (N,), generator=generator)
    targets[:2] = torch.tensor([0, V - 1])[:N]
    return hidden, weight, bias, targets


def oracle(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, temperature=1.0, logit_scale=1.0, softcap=None
) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t() + (0 if bias is None else bias)
    logits = logits * logit_scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    distribution = torch.distributions.Categorical(logits=logits / temperature)
    return distribution.log_prob(targets), distribution.entropy()


@pytest.mark.parametrize("path", PATHS)
def test_by_hand(path):
    # Logits 2 1 0: 1 - ln(e^2 + e + 1) = 1 - 2.407606; entropy 2.407606 - (2 e^2 + e) / 11.107338.
    hidden, weight = torch.ones(1, 4), torch.tensor([[2.0], [1.0], [0.0]]) * torch.tensor([1.0, 0, 0, 0])
    logprob, entropy = fused_logprobs(hidden, weight, torch.tensor([1]), path=path)
    assert logprob.item() == pytest.approx(1 - 2.407606, abs=1e-6)
    assert entropy.item() == pytest.approx(2.407606 - (2 * 7.389056 + 2.718282) / 11.107338, abs=1e-6)
    assert fused_logprobs(hidden, weight, torch.tensor([1]), 0.5, path=path)[0].item() == pytest.approx(
        2 - 4.142932, abs=1e-6
    )


@pytest.mark.parametrize(
    "shape, transform",
    [((37, 24, 101), transform) for transform in TRANSFORMS]
    + [(shape, TRANSFORMS[-1]) for shape in ((1, 8, 7), (3, 8, 1003))],
    ids=str,
)
@pytest.mark.parametrize(
    "path, dtype, tolerance",
    [
        ("fused", torch.float32, 1e-5),
        ("chunked", torch.float32, 1e-5),
        ("fused", torch.float16, 3e-3),
        ("chunked", torch.bfloat16, 2e-2),
    ],
    ids=str,
)
def test_values_and_gradients_match_float64(path, dtype, tolerance, shape, transform):
    *inputs, targets = random_case(*shape, dtype)
    options = {key: value for key, value in transform.items() if key != "bias"}
    if "bias" not in transform:
        inputs.pop()
    seeds = torch.randn(2, shape[0], generator=torch.Generator().manual_seed(1))
    bias = inputs[2] if len(inputs) > 2 else None
    results = fused_logprobs(*inputs[:2], targets, bias=bias, path=path, **options)
    gradients = torch.autograd.grad((results[0] * seeds[0] + results[1] * seeds[1]).sum(), inputs)

    exact = [x.detach().double().requires_grad_() for x in inputs]
    expected = oracle(*exact[:2], exact[2] if len(exact) > 2 else None, targets, **options)
    exact_gradients = torch.autograd.grad((expected[0] * seeds[0] + expected[1] * seeds[1]).sum(), exact)

    for ours, wanted in zip(results, expected, strict=True):
        assert ours.dtype == torch.float32
        torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)  # whatever the inputs' dtype
    for ours, wanted in zip(gradients, exact_gradients, strict=True):
        assert ours.dtype == dtype
        torch.testing.assert_close(ours.double(), wanted, rtol=tolerance, atol=tolerance * wanted.abs().max().item())


@pytest.mark.parametrize("path", PATHS)
def test_gradient_of_the_entropy_alone(path):
    hidden, weight, _, targets = random_case(5, 8, 40)
    _, entropy = fused_logprobs(hidden, weight, targets, path=path)
    exact = hidden.detach().double().requires_grad_()
    wanted = torch.autograd.grad(oracle(exact, weight.double(), None, targets)[1].sum(), exact)[0]
    ours = torch.autograd.grad(entropy.sum(), hidden)[0]
    torch.testing.assert_close(ours.double(), wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("path", PATHS)
def test_strides_do_not_show(path):
    hidden, weight, bias, targets = random_case(20, 8, 50)
    apart = (torch.stack([x, x.flip(0)], dim=-1)[..., 0] for x in (hidden, weight, targets, bias))
    results = []
    for one, two, labels, three in ((hidden, weight, targets, bias), tuple(apart)):
        logprobs, entropy = fused_logprobs(one, two, labels, bias=three, path=path)
        gradients = torch.autograd.grad(logprobs.sum() + entropy.sum(), (hidden, weight, bias))
        results.append((logprobs, entropy, *gradients))
    for plain, apart_from_each_other in zip(*results, strict=True):
        torch.testing.assert_close(plain, apart_from_each_other, rtol=0, atol=0)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.booleans(), min_size=1, max_size=20),
    st.sampled_from(GARBAGE),
    st.integers(0, 99),
    st.sampled_from(PATHS),
)
def test_ignored_rows_change_no_bit(ignored, garbage, seed, path):
    hidden, weight, bias, targets = random_case(len(ignored), 8, 40, seed=seed)
    is_ignored = torch.tensor(ignored)
    targets[is_ignored] = -100

    runs = []
    for content in (0.0, garbage):
        filled = torch.where(is_ignored[:, None], content, hidden.detach()).requires_grad_()
        results = fused_logprobs(filled, weight, targets, bias=bias, path=path)
        upstream = torch.where(is_ignored, content, 1.0)
        runs.append((*results, *torch.autograd.grad(results, (filled, weight, bias), (upstream, upstream))))

    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))
    values, entropy, grad_hidden, _, _ = runs[1]
    assert not values[is_ignored].any() and not entropy[is_ignored].any() and not grad_hidden[is_ignored].any()


@pytest.mark.parametrize("path", PATHS)
def test_nan_in_a_kept_row_is_visible_there_alone(path):
    hidden, weight, _, targets = random_case(20, 8, 40)
    broken = torch.where(torch.arange(20)[:, None] == 17, torch.nan, hidden)
    for result in fused_logprobs(broken, weight, targets, path=path):
        assert result.isnan().nonzero().flatten().tolist() == [17]


@pytest.mark.parametrize("path", PATHS)
def test_forbidden_words_have_no_share(path):
    # Two words left of 103, with equal logits: ln 2. A whole tile of forbidden words changes nothing.
    bias = torch.full((103,), -math.inf)
    bias[[3, 102]] = 0
    hidden, weight = torch.ones(2, 4, requires_grad=True), torch.full((103, 4), 0.5, requires_grad=True)
    values, entropy = fused_logprobs(hidden, weight, torch.tensor([102, 0]), bias=bias, path=path)
    assert values[0].item() == pytest.approx(-math.log(2), abs=1e-6)
    assert values[1] < -1e28
    assert entropy.tolist() == pytest.approx([math.log(2)] * 2, abs=1e-6)
    (values[0] + entropy.sum()).backward()
    assert weight.grad[[102, 3], 0].tolist() == pytest.approx([0.5, -0.5])
    assert weight.grad[4:102].count_nonzero() == 0


@pytest.mark.parametrize("path", PATHS)
def test_extreme_logits(path):
    hidden = torch.ones(2, 4, requires_grad=True)
    weight = torch.zeros(103, 4)
    weight[5, 0] = 1e4
    values, entropy = fused_logprobs(hidden, weight, torch.tensor([5, 102]), path=path)
    assert values.tolist() == pytest.approx([0, -1e4])
    assert entropy.tolist() == pytest.approx([0, 0], abs=1e-6)
    (values.sum() + entropy.sum()).backward()
    assert hidden.grad[:, 0].tolist() == pytest.approx([0, -1e4])  # of row 1: w[102] - w[5]


@pytest.mark.parametrize("path", PATHS)
def test_no_rows(path):
    hidden, weight, bias, targets = random_case(0, 8, 7)
    values, entropy = fused_logprobs(hidden, weight, targets, bias=bias, path=path)
    assert values.shape == entropy.shape == (0,)
    (values.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 8)
    assert not weight.grad.any() and not bias.grad.any()


@pytest.mark.parametrize("path", PATHS)
def test_blocks_do_not_show(path, monkeypatch):
    for name, size in {"CHUNK_ROWS": 64, "CHUNK_COLUMNS": 128, "ROW_TILE": (64, 64)}.items():
        monkeypatch.setattr(logit_passes, name, size)  # an interpreter takes a tile as quickly as a small one
    for name in ("STATS_TILES", "GRADIENT_TILES"):
        monkeypatch.setattr(logit_passes, name, replace(getattr(logit_passes, name), rows=64, columns=64))
    hidden, weight, bias, targets = random_case(140, 8, 300)

    def gradients() -> tuple[Tensor, ...]:
        values, entropy = fused_logprobs(hidden, weight, targets, bias=bias, path=path)
        return torch.autograd.grad(values.sum() + entropy.sum(), (hidden, weight, bias))

    whole = gradients()
    monkeypatch.setattr(logprobs, "HIDDEN_BYTES", 128 * 4 * 8)  # 2 blocks of rows, each with
    monkeypatch.setattr(logprobs, "GRADIENT_BYTES", 128 * 4 * 256)  # 2 slices of words
    for ours, wanted in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(ours, wanted, rtol=1e-5, atol=1e-5)


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor) and tensor.is_floating_point():  # the interpreter also looks at bytes
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_all_logits_never_exist(monkeypatch):
    monkeypatch.setattr(logprobs, "GRADIENT_BYTES", 40 * 4 * 256)
    hidden, weight, _, targets = random_case(40, 8, 1003)
    with LargestTensor() as largest:
        values, entropy = fused_logprobs(hidden, weight, targets, path="fused")
        (values.sum() + entropy.sum()).backward()
    assert largest.num_elements == 40 * 256  # a slice's gradients, of 40 * 1003


def test_frozen_weight_gets_no_gradient():
    hidden, weight, _, targets = random_case(4, 8, 40)
    fused_logprobs(hidden, weight.detach(), targets, path="fused")[0].sum().backward()
    assert hidden.grad is not None and weight.grad is None


def test_backward_reads_the_parameter_and_not_its_old_storage():
    # ZeRO-3 frees param.data after forward and gathers it again, elsewhere, before backward.
    hidden, weight, _, targets = random_case(4, 8, 40)
    (wanted,) = torch.autograd.grad(fused_logprobs(hidden, weight, targets, path="fused")[0].sum(), hidden)
    parameter = torch.nn.Parameter(weight.detach().clone())
    values, _ = fused_logprobs(hidden, parameter, targets, path="fused")
    gathered = parameter.data.clone()
    parameter.data.fill_(torch.nan)
    parameter.data = torch.empty(0)
    parameter.data = gathered
    assert torch.equal(torch.autograd.grad(values.sum(), hidden)[0], wanted)


@settings(deadline=None)
@given(st.integers(1, 70_000), st.integers(1, 2000), st.integers(1, 264))
def test_programs_are_enough_and_their_states_fit(num_rows, num_tiles, num_slots):
    num_row_tiles = -(-num_rows // 128)
    size = logit_passes.tiles_per_program(num_rows, num_row_tiles, num_tiles, num_slots)
    splits = -(-num_tiles // size)
    assert 1 <= size <= num_tiles
    assert splits * 16 * num_rows <= logit_passes.STATE_BYTES or splits <= logit_passes.MIN_SPLITS


def test_programs_fill_the_card():
    # 128 row tiles x 594 column tiles on 132 processors: 33 programs a row, 18 tiles each, are 32 full rounds.
    assert logit_passes.tiles_per_program(16384, 128, 594, 132) == 18
    assert logit_passes.tiles_per_program(128, 1, 594, 132) == 5  # one row tile: 119 programs in one round


@settings(deadline=None)
@given(st.integers(0, 400), st.integers(1, 300), st.sampled_from([1, 16]))
def test_blocks_cover_everything_once(total, size, multiple):
    found = list(logit_passes.blocks(total, size * multiple, multiple=multiple))
    assert [i for block in found for i in range(block.start, block.stop)] == list(range(total))
    assert all(block.stop - block.start <= size * multiple and block.start % multiple == 0 for block in found)


def test_the_fused_path_gets_only_rows_that_it_can_load():
    def path(num_hidden: int, first: int) -> str:
        weight = torch.zeros(5 * num_hidden + first, dtype=torch.bfloat16)[first:].view(5, num_hidden)
        return logit_passes.choose_path(torch.zeros(3, num_hidden, dtype=torch.bfloat16), weight)

    assert [path(896, 0), path(896, 8), path(896, 4), path(900, 0)] == ["fused", "fused", "chunked", "chunked"]


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"weight": torch.ones(7, 5)}, r"\[2, 3\] and \[7, 5\]"),
        ({"targets": torch.zeros(1, dtype=torch.int64)}, "targets must be"),
        ({"bias": torch.zeros(1, 7)}, "bias must be"),
        ({"temperature": 0.0}, "temperature must be"),
    ],
)
def test_what_does_not_fit_is_refused(changes, message):
    good = {"hidden": torch.ones(2, 3), "weight": torch.ones(7, 3), "targets": torch.zeros(2, dtype=torch.int64)}
    with pytest.raises(ValueError, match=message):
        fused_logprobs(**{**good, **changes})
