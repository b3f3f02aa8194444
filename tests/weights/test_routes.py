"""Routes of tensors that an engine rearranges while it loads them, on a small model with load_weights."""

import pytest
import torch
from torch import Tensor, nn

from hybrid_rl.weights.bucket import Slot
from hybrid_rl.weights.routes import Routes

HEADS, SIZE, HIDDEN = 2, 2, 3


class Attention(nn.Module):
    """Loads a projection in which each head has its q, k and v, and stores all q, then all k, then all v."""

    def __init__(self, doubled: bool = False) -> None:
        super().__init__()
        self.qkv = nn.Parameter(torch.zeros(3 * HEADS * SIZE, HIDDEN), requires_grad=False)
        self.doubled = doubled

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            sorted_heads = weight.view(HEADS, 3, SIZE, HIDDEN).transpose(0, 1).reshape(weight.shape)
            for part in range(3):  # q, k and v separately, like vLLM
                rows = slice(part * HEADS * SIZE, (part + 1) * HEADS * SIZE)
                self.qkv[rows].copy_((2 * sorted_heads if self.doubled else sorted_heads)[rows])


def make(model: Attention) -> tuple[Tensor, Routes, Slot]:
    shape = tuple(model.qkv.shape)
    slot = Slot(name="qkv", shape=shape, dtype=torch.float32, offset=256)
    bucket = torch.zeros(256 + slot.nbytes, dtype=torch.uint8)
    return slot.view(bucket), Routes(model, bucket), slot


def test_the_copy_of_a_rearranged_tensor_is_repeated_without_the_models_code():
    model = Attention()
    weight, routes, slot = make(model)
    weight.copy_(torch.arange(weight.numel()).view(weight.shape))
    routes.record(slot, copies=True)
    routes.check_complete()
    # Rows of head 0: q 0 1, k 2 3, v 4 5; of head 1: q 6 7 and so on. The first element of row n is 3 n.
    assert model.qkv[:, 0].tolist() == [3 * row for row in (0, 1, 6, 7, 2, 3, 8, 9, 4, 5, 10, 11)]
    wanted = -model.qkv.clone()
    weight.neg_()
    for destination, source in routes.pairs("qkv"):
        destination.copy_(source)
    assert torch.equal(model.qkv, wanted)


def test_each_checksum_belongs_to_a_slice_of_the_trainers_tensor():
    model = Attention()
    weight, routes, slot = make(model)
    weight.copy_(torch.randn(weight.shape))
    routes.record(slot, copies=True)
    before = routes.checksums(["qkv"])["qkv"]
    for part, ((size, stride, offset), _) in enumerate(before):
        sent = weight.flatten().as_strided(size, stride, weight.storage_offset() + offset)
        assert torch.equal(sent.reshape(HEADS * SIZE, HIDDEN), model.qkv[4 * part : 4 * part + 4])
    model.qkv[5, 1] += 1
    assert [a == b for a, b in zip(before, routes.checksums(["qkv"])["qkv"], strict=True)] == [True, False, True]


def test_a_rearranged_tensor_cannot_be_aliased():
    weight, routes, slot = make(Attention())
    weight.copy_(torch.randn(weight.shape))
    routes.record(slot, copies=False)
    with pytest.raises(RuntimeError, match="qkv does not lie in the trainer as in engine parameter qkv"):
        routes.alias()


class Experts(nn.Module):
    """Loads the gates of all experts, then all projections up, into one parameter [expert, gate and up, hidden]."""

    def __init__(self, *, first_expert: int = 0) -> None:
        super().__init__()
        self.w13 = nn.Parameter(torch.zeros(3, 2 * SIZE, HIDDEN), requires_grad=False)
        self.first_expert = first_expert

    def load_weights(self, weights: list[tuple[str, Tensor]]) -> None:
        for _, weight in weights:
            for expert in range(self.first_expert, 3):
                for half in (0, SIZE):
                    self.w13[expert, half : half + SIZE].copy_(weight[expert, half : half + SIZE])


def test_experts_that_follow_each_other_are_one_copy():
    model = Experts()
    slot = Slot(name="experts", shape=(3, 2 * SIZE, HIDDEN), dtype=torch.float32, offset=0)
    bucket = torch.zeros(slot.nbytes, dtype=torch.uint8)
    routes = Routes(model, bucket)
    slot.view(bucket).normal_()
    routes.record(slot, copies=True)
    (pair,) = routes.pairs("experts")
    ((part, _),) = routes.checksums(["experts"])["experts"]
    assert part == ((3 * 2 * SIZE * HIDDEN,), (1,), 0)
    slot.view(bucket).neg_()
    assert not torch.equal(model.w13, slot.view(bucket))
    pair[0].copy_(pair[1])
    assert torch.equal(model.w13, slot.view(bucket))
    routes.check_complete()
    routes.alias()
    assert model.w13.data_ptr() == bucket.data_ptr()


def test_experts_of_another_worker_are_missing():
    model = Experts(first_expert=1)
    slot = Slot(name="experts", shape=(3, 2 * SIZE, HIDDEN), dtype=torch.float32, offset=0)
    routes = Routes(model, torch.zeros(slot.nbytes, dtype=torch.uint8))
    routes.record(slot, copies=True)
    ((part, _),) = routes.checksums(["experts"])["experts"]
    assert part == ((2 * 2 * SIZE * HIDDEN,), (1,), 2 * SIZE * HIDDEN)
    with pytest.raises(RuntimeError, match="engine parameter w13: 24 of 36 elements come from the trainer"):
        routes.check_complete()


def test_a_tensor_that_the_model_computes_with_is_refused():
    weight, routes, slot = make(Attention(doubled=True))
    weight.copy_(torch.randn(weight.shape))
    with pytest.raises(RuntimeError, match="qkv: this vLLM model transforms it"):
        routes.record(slot, copies=True)
