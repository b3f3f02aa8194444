"""Packed forwards in bfloat16 on a GPU, with every attention implementation that is installed."""

import importlib.util
from pathlib import Path

import pytest
import torch

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import ModelsConfig
from hybrid_rl.models.loading import load_actor
from hybrid_rl.models.packed import packed_inputs
from hybrid_rl_kernels import fused_logprobs
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]
HAS_FLASH = importlib.util.find_spec("flash_attn") is not None


def make_batch(lengths: list[tuple[int, int]]):
    generator = torch.Generator().manual_seed(0)
    rollouts = []
    for i, (prompt_length, response_length) in enumerate(lengths):
        ids = torch.randint(1, 32_000, (prompt_length + response_length,), generator=generator).tolist()
        rollouts.append(make_rollout(ids[:prompt_length], ids[prompt_length:], prompt_id=i))
    return make_train_batch(rollouts)


def logprobs(actor, batch, pieces: list[list[int]]) -> torch.Tensor:
    result = torch.zeros(batch.response_mask.shape)
    for rows in pieces:
        packed = pack(batch, rows, torch.device("cuda"))
        values, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=0.7)
        packed.scatter(values, result)
    return result


@pytest.mark.parametrize("attention", ["varlen", "sdpa", "flash_attention_2"])
def test_packed_equals_alone_and_float32(small: Path, attention: str) -> None:
    if attention == "flash_attention_2" and not HAS_FLASH:
        pytest.skip("flash-attn is not installed")
    batch = make_batch([(5, 20), (60, 3), (1, 64), (17, 31), (33, 1)])
    device = torch.device("cuda")
    with torch.no_grad():
        actor = load_actor(str(small / "policy"), ModelsConfig(attention=attention), device)
        packed = logprobs(actor, batch, [[0, 1, 2, 3, 4]])
        alone = logprobs(actor, batch, [[i] for i in range(5)])
        exact_actor = load_actor(str(small / "policy"), ModelsConfig(attention="sdpa", dtype="float32"), device)
        exact = logprobs(exact_actor, batch, [[i] for i in range(5)])
    mask = batch.response_mask
    noise = (alone - exact)[mask].abs().mean()
    print(attention, "bf16 noise", float(noise), "packed against alone", float((packed - alone)[mask].abs().mean()))
    assert (packed - alone)[mask].abs().mean() <= 1.5 * noise + 1e-6
    assert noise < 0.02


def test_gradients_of_packed_sequences_do_not_mix(small: Path) -> None:
    batch = make_batch([(5, 20), (7, 30)])
    actor = load_actor(str(small / "policy"), ModelsConfig(), torch.device("cuda"))
    embeddings = actor.model.get_input_embeddings()
    packed = pack(batch, [0, 1], torch.device("cuda"))
    captured = []
    handle = embeddings.register_forward_hook(lambda m, i, o: captured.append(o.requires_grad_().retain_grad() or o))
    values, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)
    handle.remove()
    values[:20].sum().backward()
    grad = captured[0].grad[0].float().norm(dim=-1)
    assert (grad[:24] > 0).all()
    assert (grad[25:] == 0).all()


def test_a_micro_batch_never_waits_for_the_gpu(small: Path) -> None:
    """From packing to the end of backward, nothing synchronizes the host with the GPU."""
    batch = make_batch([(5, 20), (7, 30)])
    batch = batch.with_fields(old_logprobs=torch.zeros(batch.response_mask.shape))
    actor = load_actor(str(small / "policy"), ModelsConfig(attention="varlen"), torch.device("cuda"))

    def micro_batch() -> torch.Tensor:
        packed = pack(batch, [1, 0], torch.device("cuda"))
        values, _ = actor(**packed_inputs(packed), index=packed.response_index, targets=packed.targets, temperature=1.0)
        loss = (values - packed.gather(batch.old_logprobs)).sum()
        loss.backward()
        return loss.detach()

    first = micro_batch()  # compiles kernels
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = micro_batch()
        with pytest.raises(RuntimeError, match="synchronizing"):
            float(second)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert float(second) == pytest.approx(float(first), rel=1e-3)


def test_fused_logprobs_accumulates_bfloat16_in_float32() -> None:
    torch.manual_seed(0)
    hidden = torch.randn(257, 512, device="cuda", dtype=torch.bfloat16)
    weight = (torch.randn(50257, 512, device="cuda") * 0.05).to(torch.bfloat16)
    targets = torch.randint(0, 50257, (257,), device="cuda")
    got, entropy = fused_logprobs(hidden, weight, targets, 0.7)
    exact = (hidden.double() @ weight.double().T / 0.7).log_softmax(-1)
    assert (got.double() - exact.gather(-1, targets[:, None]).squeeze(-1)).abs().max() < 1e-3
    assert (entropy.double() + (exact.exp() * exact).sum(-1)).abs().max() < 1e-3
