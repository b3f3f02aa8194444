"""The Triton kernels on a GPU in bfloat16 at full size: accuracy, memory, and a training step with and without them."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

if torch.cuda.is_available():
    from hybrid_rl_kernels import (
        dispatch,
        fused_logprobs,
        gae,
        gae_kernels,
        gae_with_moments,
        logprobs,
        reference,
        token_loss,
        token_loss_one_pass,
        whiten,
    )
    from hybrid_rl_kernels.reference import LogitTransform

MIB = 2**20
SHAPES = [(8192, 4096, 128256), (16384, 2048, 151936), (16384, 896, 151936), (4096, 1024, 50257), (513, 896, 1003)]
PATHS = ["fused", "chunked"]


def make(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden and weight with gradients, and targets; logits have a standard deviation of 4."""
    T, H, V = shape
    torch.manual_seed(0)
    hidden = torch.randn(T, H, device="cuda").to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(V, H, device="cuda") * 4 * H**-0.5).to(torch.bfloat16).requires_grad_()
    return hidden, weight, torch.randint(0, V, (T,), device="cuda")


def exact(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Return log-probs and entropies of some rows in float64."""
    log_probs = (hidden.double() @ weight.double().t()).log_softmax(1)
    return log_probs.gather(1, targets[:, None])[:, 0], -(log_probs.exp() * log_probs).sum(1)


def extra_mib(function) -> float:
    """Return the MiB at the peak of a run beyond what stays allocated after it."""
    result = function()  # compiles
    del result
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = function()
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - before
    del result
    return (torch.cuda.max_memory_allocated() - before - kept) / MIB


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_logprobs_are_as_good_as_float32(shape, path) -> None:
    hidden, weight, targets = make(shape)
    with torch.no_grad():
        values, entropy = logprobs.fused_logprobs(hidden, weight, targets, path=path)
        rows = torch.cat([torch.arange(256), torch.arange(len(hidden) - 256, len(hidden))])
        wanted, wanted_entropy = exact(hidden[rows], weight, targets[rows])
    error = (values[rows].double() - wanted).abs()
    print(shape, path, "log-prob error: max", float(error.max()), "mean", float(error.mean()))
    assert error.max() <= 1e-3 and error.mean() <= 1e-5
    assert (entropy[rows].double() - wanted_entropy).abs().max() <= 1e-3


@pytest.mark.parametrize("path", PATHS)
def test_gradients_are_as_good_as_bfloat16(path) -> None:
    hidden, weight, targets = make((2048, 896, 50257))
    seeds = torch.randn(2, 2048, device="cuda")
    values, entropy = logprobs.fused_logprobs(hidden, weight, targets, path=path)
    ours = torch.autograd.grad((values * seeds[0] + entropy * seeds[1]).sum(), (hidden, weight))
    doubles = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact_values, exact_entropy = exact(*doubles, targets)
    wanted = torch.autograd.grad((exact_values * seeds[0] + exact_entropy * seeds[1]).sum(), doubles)
    for mine, theirs in zip(ours, wanted, strict=True):
        relative = (mine.double() - theirs).norm() / theirs.norm()
        print(path, "relative error of a gradient", float(relative))
        assert relative < 6e-3  # bfloat16 has 2^-9 = 2e-3


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("entropy_coef", [0.0, 0.1])
def test_one_pass_gives_the_gradients_of_two(path, entropy_coef) -> None:
    shape = (4096, 896, 50257)
    hidden, weight, targets = make(shape)
    targets[::97] = -100
    with torch.no_grad():
        hidden[::97] = torch.nan
    advantages = torch.randn(shape[0], device="cuda")

    def loss(values: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return -advantages[rows] * values - entropy_coef * entropy if entropy_coef else -advantages[rows] * values

    transform = LogitTransform(temperature=0.9, logit_scale=1.0, softcap=None)
    total, values, entropy = token_loss.token_loss(hidden, weight, None, targets, transform, loss, path)
    ours = torch.autograd.grad(total, (hidden, weight))
    kept = [x.detach().float().requires_grad_() for x in (hidden, weight)]
    exact_values, exact_entropy = reference.fused_logprobs(*kept, targets, 0.9)
    wanted = torch.autograd.grad(loss(exact_values, exact_entropy, slice(0, shape[0])).sum(), kept)
    assert (values - exact_values).abs().max() < 1e-3 and (entropy - exact_entropy).abs().max() < 1e-3
    for mine, theirs in zip(ours, wanted, strict=True):
        assert (mine.float() - theirs).norm() < 8e-3 * theirs.norm()


def test_more_numerators_than_32_bits_count(monkeypatch) -> None:
    monkeypatch.setattr(token_loss, "NUMERATOR_BYTES", 5 * 2**30)
    hidden, weight, targets = make((16384, 128, 151936))  # 2.5e9 numerators in one block
    transform = LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)

    def loss(values: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return -values - 0.1 * entropy

    total, _, _ = token_loss.token_loss(hidden, weight, None, targets, transform, loss, "fused")
    (ours,) = torch.autograd.grad(total, hidden)
    kept = hidden[-64:].detach().double().requires_grad_()
    values, entropy = exact(kept, weight.detach(), targets[-64:])
    (wanted,) = torch.autograd.grad(loss(values, entropy, slice(0, 64)).sum(), kept)
    assert (ours[-64:].double() - wanted).norm() < 8e-3 * wanted.norm()


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_workspace_is_bounded(shape, path) -> None:
    hidden, weight, targets = make(shape)
    upstream = torch.randn(shape[0], device="cuda")
    transform = LogitTransform(temperature=1.0, logit_scale=1.0, softcap=None)

    def forward() -> object:
        with torch.no_grad():
            return logprobs.fused_logprobs(hidden, weight, targets, path=path)

    def both() -> object:
        values, _ = logprobs.fused_logprobs(hidden, weight, targets, path=path)
        return torch.autograd.grad(values, (hidden, weight), upstream)

    def one_pass() -> object:
        loss, *_ = token_loss.token_loss(hidden, weight, None, targets, transform, lambda x, *_: x, path)
        return torch.autograd.grad(loss, (hidden, weight))

    found = {"forward": extra_mib(forward), "backward": extra_mib(both), "one pass": extra_mib(one_pass)}
    print(shape, path, found)
    assert found["forward"] <= 64 and found["backward"] <= 600 and found["one pass"] <= 600


class LargestTensor(TorchDispatchMode):
    """Remember the size of the largest tensor that any operation returns."""

    num_elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else [result]:
            if isinstance(tensor, Tensor):
                self.num_elements = max(self.num_elements, tensor.numel())
        return result


def test_all_logits_never_exist() -> None:
    hidden, weight, targets = make((16384, 896, 151936))
    with LargestTensor() as largest:
        values, entropy = fused_logprobs(hidden, weight, targets)
        (values.sum() + entropy.sum()).backward()
        token_loss_one_pass(hidden, weight, targets, 1.0, lambda values, *_: values)
    assert largest.num_elements < 16384 * 151936 / 8


@pytest.mark.parametrize("shape", [(512, 1024), (33, 8191), (4, 100_000)], ids=str)
def test_scan_is_the_loop(shape) -> None:
    torch.manual_seed(0)
    rewards, values = torch.randn(2, *shape, device="cuda")
    mask = torch.rand(shape, device="cuda") < 0.9
    gae_lambda = torch.rand(shape[0], device="cuda")
    exact = [x.cpu() for x in (rewards.double(), values.double(), mask)]
    wanted = reference.gae(*exact, 0.99, gae_lambda.cpu())
    ours = gae(rewards, values, mask, 0.99, gae_lambda)
    assert (ours.double().cpu() - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    options = {"gamma": 0.99, "gae_lambda": gae_lambda, "token_rewards": rewards, "kl": rewards, "kl_coef": 0.0}
    result = gae_with_moments(values, mask, **options)
    assert torch.equal(result.advantages, ours)
    white = whiten(ours, mask, result.moments)[mask].double()
    assert abs(float(white.mean())) < 1e-4 and abs(float(white.square().mean()) - 1) < 1e-4
    assert gae_kernels.merge_moments(result.moments[None]).tolist() == pytest.approx(result.moments.tolist())
    turn_ends = torch.rand(shape, device="cuda") < 0.05
    wanted = reference.gae(*exact, 0.99, gae_lambda.cpu(), turn_ends=turn_ends.cpu(), turn_gamma=0.5)
    by_turn = gae_with_moments(values, mask, turn_ends=turn_ends, turn_gamma=0.5, **options).advantages
    assert (by_turn.double().cpu() - wanted).abs().max() <= 1e-5 * wanted.abs().max()


TRAIN = """
import json, sys, torch
from hybrid_rl_kernels import fused_logprobs, token_loss_one_pass
torch.manual_seed(0)
T, H, V = 8192, 896, 151936
body = torch.nn.Linear(H, H, device="cuda", dtype=torch.bfloat16)
head = torch.nn.Linear(H, V, bias=False, device="cuda", dtype=torch.bfloat16)
optimizer = torch.optim.SGD([*body.parameters(), *head.parameters()], lr=20.0)
x = torch.randn(T, H, device="cuda", dtype=torch.bfloat16)
targets = torch.randint(0, 2000, (T,), device="cuda")
losses = []
for step in range(8):
    if step == 4:
        torch.cuda.synchronize(); torch.cuda.reset_peak_memory_stats(); before = torch.cuda.memory_allocated()
    if sys.argv[1] == "one_pass":
        loss, _, _ = token_loss_one_pass(body(x), head.weight, targets, 1.0, lambda logprobs, *_: -logprobs / T)
    elif sys.argv[1] == "full":
        logits = head(body(x)).float()
        loss = torch.nn.functional.cross_entropy(logits, targets)
    else:
        loss = -fused_logprobs(body(x), head.weight, targets)[0].mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad(); losses.append(float(loss))
print(json.dumps({"losses": losses, "peak": torch.cuda.max_memory_allocated() - before}))
"""


@pytest.fixture(autouse=True)
def triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "SETTING", "triton")


def test_a_training_run_is_the_same_with_the_kernels_on_and_off() -> None:
    import json

    root = Path(__file__).parents[2]
    results = {}
    for name, setting in {"full": "triton", "reference": "reference", "two": "triton", "one_pass": "triton"}.items():
        environment = {**os.environ, "HYBRID_RL_KERNELS": setting, "PYTHONPATH": str(root / "kernels")}
        done = subprocess.run([sys.executable, "-c", TRAIN, name], env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        results[name] = json.loads(done.stdout.splitlines()[-1])
    print(results)
    curve = torch.tensor(results["reference"]["losses"])
    assert curve[-1] < curve[0] - 0.1
    for name in ("two", "one_pass"):
        torch.testing.assert_close(torch.tensor(results[name]["losses"]), curve, rtol=5e-3, atol=5e-3)
    logits_bytes = 8192 * 151936 * 4
    assert results["two"]["peak"] < results["full"]["peak"] - logits_bytes


SANITIZED = """
import os, sys, torch, triton
import triton.language as tl
from hybrid_rl_kernels import gae_with_moments, logprobs, token_loss_one_pass, whiten

@triton.jit
def past_the_end(x, size: tl.constexpr):
    tl.store(x + size + tl.arange(0, 32), 1.0)

device = os.environ["DEVICE"]
if "planted" in sys.argv:
    past_the_end[(1,)](torch.zeros(1000, device=device), 1000)
for T, H, V in ((1, 32, 17), (37, 96, 1003), (130, 72, 2050)):
    hidden = torch.randn(T, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(V, H, device=device, dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, V, (T,), device=device)
    targets[0] = -100
    for path in ("fused", "chunked"):
        values, entropies = logprobs.fused_logprobs(hidden, weight, targets, path=path)
        (values.sum() + entropies.sum()).backward()
    token_loss_one_pass(hidden, weight, targets, 1.0, lambda logprobs, *_: -logprobs)[0].backward()
for B, L in ((1, 1), (3, 257), (5, 4099)):
    rewards, values = torch.randn(2, B, L, device=device)
    mask = torch.rand(B, L, device=device) < 0.9
    for turn_ends in (None, ~mask.roll(-1, 1)):
        found = gae_with_moments(
            values, mask, gamma=0.99, gae_lambda=0.95, token_rewards=rewards, kl=rewards, kl_coef=0.1,
            turn_ends=turn_ends, turn_gamma=0.5,
        )
        whiten(found.advantages, mask, found.moments)
if device == "cuda":
    torch.cuda.synchronize()
"""


@pytest.mark.skipif(not shutil.which("compute-sanitizer"), reason="needs compute-sanitizer on the PATH")
@pytest.mark.parametrize("fault", [(), ("planted",)], ids=["ours", "planted"])
def test_the_sanitizer_finds_only_the_fault_that_was_planted(fault, tmp_path) -> None:
    script = tmp_path / "every_kernel.py"  # Triton reads a kernel's source from its file
    script.write_text(SANITIZED)
    environment = {**os.environ, "HYBRID_RL_KERNELS": "triton", "DEVICE": "cuda"}
    environment |= {"PYTHONPATH": str(Path(__file__).parents[2] / "kernels"), "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    command = ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", sys.executable, str(script)]
    done = subprocess.run([*command, *fault], env=environment, capture_output=True, text=True)
    print(done.stdout[-2000:], done.stderr[-2000:])
    found = re.findall(r"ERROR SUMMARY: (\d+) error", done.stdout)
    assert found and (int(found[-1]) > 0) == bool(fault)
    assert done.returncode == (9 if fault else 0)
