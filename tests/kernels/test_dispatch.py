"""The public functions on a CPU, where all of them are PyTorch."""

import math
import subprocess
import sys

import pytest
import torch

import hybrid_rl_kernels
from hybrid_rl_kernels import fused_logprobs, gae_with_moments, merge_moments, token_loss_one_pass, whiten


def test_token_loss_by_hand():
    # Logits 2 1 0 and target 1: log-prob 1 - 2.407606, probability 0.244728. The loss is -3 log-prob.
    hidden, weight = torch.ones(1, 1, requires_grad=True), torch.tensor([[2.0], [1.0], [0.0]], requires_grad=True)
    loss, logprobs, entropy = token_loss_one_pass(
        hidden, weight, torch.tensor([1]), 1.0, lambda logprobs, entropy, rows: -3 * logprobs
    )
    assert loss.item() == pytest.approx(3 * 1.407606, abs=1e-5)
    assert logprobs.item() == pytest.approx(-1.407606, abs=1e-6)
    assert not logprobs.requires_grad and not entropy.requires_grad
    loss.backward()
    assert weight.grad[1].item() == pytest.approx(-3 * (1 - 0.244728), abs=1e-5)


def test_token_loss_reaches_hidden_weight_and_bias_like_its_parts():
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(*s, generator=generator).requires_grad_() for s in ((9, 4), (11, 4), (11,))]
    targets = torch.randint(0, 11, (9,), generator=generator)
    targets[4] = -100
    weights = torch.linspace(-1, 1, 9)

    def loss(logprobs, entropy, rows):
        return weights[rows] * logprobs.exp() + 0.1 * entropy

    ours, _, _ = token_loss_one_pass(inputs[0], inputs[1], targets, 0.7, loss, inputs[2], logit_scale=0.5, softcap=3.0)
    logprobs, entropy = fused_logprobs(inputs[0], inputs[1], targets, 0.7, inputs[2], logit_scale=0.5, softcap=3.0)
    wanted = loss(logprobs, entropy, slice(0, 9)).sum()
    for a, b in zip(torch.autograd.grad(ours, inputs), torch.autograd.grad(wanted, inputs), strict=True):
        torch.testing.assert_close(a, b)
    with torch.no_grad():
        assert not token_loss_one_pass(inputs[0], inputs[1], targets, 0.7, loss)[0].requires_grad


def test_shaped_and_whitened_by_hand():
    mask = torch.tensor([[True, True, False], [True, False, False]])
    result = gae_with_moments(
        torch.tensor([[1.0, 2, math.nan], [0, 9, 9]]),
        mask,
        gamma=1.0,
        gae_lambda=1.0,
        scores=torch.tensor([4.0, 1]),
        kl=torch.tensor([[1.0, 2, math.nan], [0, 0, 0]]),
        kl_coef=0.5,
    )
    # Rewards -0.5 and 4 - 1 = 3 in row 0; what is to come, 2.5 and 3, less the values 1 and 2. Row 1: 1 - 0.
    assert result.advantages.tolist() == [[1.5, 1, 0], [1, 0, 0]]
    assert result.returns.tolist() == [[2.5, 3, 0], [1, 0, 0]]
    # Mean 3.5 / 3 of 1.5 1 1, squared deviations 1/9 + 2/36.
    assert result.moments.tolist() == pytest.approx([3, 3.5 / 3, 1 / 6], rel=1e-6)
    deviation = math.sqrt(1 / 18)
    wanted = [[(1.5 - 3.5 / 3) / deviation, (1 - 3.5 / 3) / deviation, 0], [(1 - 3.5 / 3) / deviation, 0, 0]]
    torch.testing.assert_close(whiten(result.advantages, mask, result.moments), torch.tensor(wanted))


def test_moments_of_two_ranks_are_those_of_both():
    x = torch.arange(10.0)
    mask = torch.ones(1, 10, dtype=torch.bool)

    def moments(part: torch.Tensor) -> torch.Tensor:
        own = torch.ones(1, len(part), dtype=torch.bool)
        return gae_with_moments(None, own, gamma=0.0, gae_lambda=1.0, token_rewards=part[None]).moments

    merged = merge_moments(torch.stack([moments(x[:3]), moments(x[3:])]))
    # 0 to 9: mean 4.5, squared deviations 2 (0.25 + 2.25 + 6.25 + 12.25 + 20.25).
    assert merged.tolist() == pytest.approx([10, 4.5, 82.5])
    torch.testing.assert_close(whiten(x[None], mask, merged)[0, 9].item(), 4.5 / math.sqrt(8.25))


def test_what_does_not_fit_is_refused():
    x, mask = torch.ones(2, 3), torch.ones(2, 3, dtype=torch.bool)
    options = {"gamma": 1.0, "gae_lambda": 1.0}
    with pytest.raises(ValueError, match=r"values \[2, 1\]"):
        gae_with_moments(torch.ones(2, 1), mask, **options)
    with pytest.raises(ValueError, match="scores must be"):
        gae_with_moments(x, mask, scores=torch.ones(3), **options)
    with pytest.raises(ValueError, match=r"turn_ends \[2, 1\]"):
        gae_with_moments(x, mask, turn_ends=mask[:, :1], turn_gamma=0.5, **options)
    with pytest.raises(ValueError, match="response_mask must be"):
        gae_with_moments(x, mask, cu_seqlens=torch.tensor([0, 3]), **options)
    with pytest.raises(ValueError, match="mask"):
        whiten(x, mask[:1], torch.zeros(3))


@pytest.mark.parametrize("setting, code", [("reference", 0), ("triton", 0), ("cuda", 1)])
def test_the_setting_is_read_at_import(setting, code):
    done = subprocess.run(
        [sys.executable, "-c", "import hybrid_rl_kernels"],
        env={"HYBRID_RL_KERNELS": setting, "PYTHONPATH": f"{hybrid_rl_kernels.__path__[0]}/.."},
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert "HYBRID_RL_KERNELS must be triton or reference, got 'cuda'" in done.stderr


def test_a_cpu_loads_no_triton_kernel():
    program = (
        "import sys, torch; from hybrid_rl_kernels import fused_logprobs, gae;"
        "x = torch.ones(1, 2); gae(x, x, x, 1, 1);"
        "fused_logprobs(x, x, torch.zeros(1, dtype=torch.int64));"
        "assert not [m for m in sys.modules if m.startswith('hybrid_rl_kernels.') and m.endswith('_kernels')]"
    )
    subprocess.run(
        [sys.executable, "-c", program], env={"PYTHONPATH": f"{hybrid_rl_kernels.__path__[0]}/.."}, check=True
    )
