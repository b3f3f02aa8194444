"""The plan of buckets, the buffer that two processes share, and the checksum of both sides."""

import itertools
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, copy_tensors, open_ipc_bucket, plan_buckets, plan_halves
from hybrid_rl.weights.checksum import checksum

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
INTEGERS = [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool]
CHILD = """
import sys, torch
from hybrid_rl.weights.bucket import open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
bucket = open_ipc_bucket(bytes.fromhex(sys.argv[1]), torch.device("cpu"))
print(checksum(bucket), flush=True)
sys.stdin.readline()                     # the parent has removed the file's name and filled the bucket anew
print(checksum(bucket), flush=True)
bucket[-1] = 99
"""


def test_plan_by_hand():
    plan = plan_buckets(
        [
            ("a", (10,), torch.float32),  # 40 bytes at 0
            ("b", (2, 3), torch.bfloat16),  # 12 bytes, aligned to 256
            ("c", (100,), torch.float32),  # 400 bytes: would end at 912 > 800
            ("d", (1,), torch.float32),
            ("e", (1000,), torch.float32),  # larger than a bucket
            ("f", (), torch.float32),
        ],
        max_bytes=800,
    )
    assert [[(s.name, s.offset, s.nbytes) for s in bucket] for bucket in plan] == [
        [("a", 0, 40), ("b", 256, 12)],
        [("c", 0, 400), ("d", 512, 4)],
        [("e", 0, 4000)],
        [("f", 0, 4)],
    ]
    assert bucket_bytes(plan) == 4000


def test_large_and_small_tensors_are_copied_each_to_its_place(monkeypatch):
    monkeypatch.setattr("hybrid_rl.weights.bucket._LARGE_BYTES", 100)
    sources = [torch.arange(size, dtype=torch.float32) + size for size in (24, 25, 1, 60)]  # 96, 100, 4 and 240 bytes
    whole = torch.full((12, 8), -1.0)
    targets = [torch.zeros(24), torch.zeros(25), whole[11, :1], whole[:10, :6]]  # two are parts of another tensor
    sources[3] = sources[3].view(10, 6)
    copy_tensors(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert (whole == -1).sum() == 96 - 60 - 1
    copy_tensors(targets[:1], [torch.ones(24, dtype=torch.bfloat16)])
    assert targets[0].tolist() == [1.0] * 24


def test_halves_by_hand():
    """The larger tensors lie in the first half, by turns with the others, whichever order the model has them in."""
    sizes = {"a": 300, "b": 100, "c": 900, "d": 200, "e": 600}  # of a buffer of 1024 bytes, in halves of 512
    plan = plan_halves([(name, (size,), torch.uint8) for name, size in sizes.items()], 1024)
    assert [[(slot.name, slot.offset) for slot in bucket] for bucket in plan] == [
        [("c", 0)],
        [("a", 1024)],  # behind 900 bytes, aligned; b would end at 612 of its half
        [("e", 0)],
        [("b", 1024)],
        [("d", 0)],
    ]
    assert bucket_bytes(plan) == 1324


def test_slot_views_share_memory_in_their_own_dtype():
    (bucket,) = plan_buckets([("a", (3,), torch.float32), ("b", (2, 2), torch.bfloat16)], 1024)
    memory = torch.zeros(1024, dtype=torch.uint8)
    bucket[1].view(memory).copy_(torch.tensor([[1, 2], [3, 4]]))
    assert memory[256:264].view(torch.bfloat16).tolist() == [1, 2, 3, 4]
    assert not memory[:256].any() and not memory[264:].any()


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_empty_tensor_is_refused_by_name(shape):
    with pytest.raises(ValueError, match="tensor lm_head has shape"):
        plan_buckets([("norm", (3,), torch.float32), ("lm_head", shape, torch.float32)], 1024)


def test_double_name_is_refused():
    with pytest.raises(ValueError, match="tensor norm appears twice"):
        plan_buckets([("norm", (3,), torch.float32), ("norm", (4,), torch.float32)], 1024)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1),
    st.integers(1, 2000),
)
def test_plan_keeps_order_and_cap_and_overlaps_nothing(tensors, max_bytes):
    plan = plan_buckets([(str(i), (n,), dtype) for i, (n, dtype) in enumerate(tensors)], max_bytes)
    assert [slot.name for bucket in plan for slot in bucket] == [str(i) for i in range(len(tensors))]
    for bucket in plan:
        assert len(bucket) == 1 or bucket[-1].offset + bucket[-1].nbytes <= max_bytes
        assert all(slot.offset % 256 == 0 for slot in bucket)
        assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(bucket))
    assert bucket_bytes(plan) <= max(max_bytes, max(slot.nbytes for bucket in plan for slot in bucket))


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(1, 2000))
def test_neighbours_never_overlap_and_nothing_is_lost(sizes, num_bytes):
    plan = plan_halves([(str(i), (size,), torch.uint8) for i, size in enumerate(sizes)], num_bytes)
    assert sorted(int(slot.name) for bucket in plan for slot in bucket) == list(range(len(sizes)))
    places = [(min(s.offset for s in bucket), max(s.offset + s.nbytes for s in bucket)) for bucket in plan]
    for (start, end), (next_start, next_end) in itertools.pairwise(places):
        assert end <= next_start or next_end <= start
    assert bucket_bytes(plan) <= 2 * max(num_bytes // 2, *sizes) + 256


def mapped_files() -> set[str]:
    """Return the bucket files that this process maps, those without a name any more as `... (deleted)`."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in lines if "hybrid_rl_" in line.split("/")[-1]}


def test_bucket_is_shared_with_another_process():
    before = mapped_files()
    bucket = IpcBucket(1000, CPU)
    (path,) = mapped_files() - before
    assert path.startswith("/dev/shm/") and Path(path).stat().st_size == 1000
    bucket.tensor.copy_(torch.arange(1000) % 251)
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, bucket.handle().hex()],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )
    try:
        assert int(child.stdout.readline()) == checksum(bucket.tensor)
        bucket.unlink()
        assert not Path(path).exists()
        bucket.tensor.fill_(7)
        child.stdin.write("\n")
        child.stdin.flush()
        assert int(child.stdout.readline()) == checksum(torch.full((1000,), 7, dtype=torch.uint8))
        assert child.wait(timeout=60) == 0
        assert bucket.tensor[-1] == 99
    finally:
        child.kill()
        child.wait()
        child.stdin.close()
        child.stdout.close()
    bucket.unlink()  # a second time does nothing
    del bucket
    assert not mapped_files() - before


def test_bucket_opens_in_its_own_process_too():
    bucket = IpcBucket(16, CPU)
    opened = open_ipc_bucket(bucket.handle(), CPU)
    bucket.unlink()
    opened[3] = 5
    assert bucket.tensor[3] == 5


def random_tensor(dtype: torch.dtype, numel: int = 24) -> torch.Tensor:
    torch.manual_seed(0)
    numbers = torch.randint(0, 256, (numel * dtype.itemsize,), dtype=torch.uint8)
    return numbers.bool()[:numel] if dtype == torch.bool else numbers.view(dtype)  # NaN payloads included


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_checksum_does_not_see_the_layout(dtype):
    x = random_tensor(dtype).view(2, 3, 4)
    wide = torch.zeros(2, 3, 8, dtype=dtype)
    wide[..., ::2] = x
    transposed = x.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    assert not transposed.is_contiguous()
    shifted = torch.cat([x.flatten()[:1], x.flatten()])[1:].view(2, 3, 4)
    assert {checksum(y) for y in (wide[..., ::2], transposed, shifted, x.flatten(), x.clone())} == {checksum(x)}


@pytest.mark.parametrize("dtype", FLOATS + INTEGERS)
def test_checksum_sees_a_single_bit(dtype):
    x = random_tensor(dtype)
    for place in (0, 11, 23):
        for bit in range(1 if dtype == torch.bool else 8 * dtype.itemsize):
            flipped = x.clone()
            flipped.view(torch.uint8)[place * dtype.itemsize + bit // 8] ^= 1 << bit % 8
            assert checksum(flipped) != checksum(x)


def test_checksum_tells_nans_zeros_and_lengths_apart():
    bits = torch.tensor([0x7FC00000, 0x7FC00001, 0x7F800001, -0x400000], dtype=torch.int32)  # four kinds of NaN
    nans = bits.view(torch.float32)
    assert all(math.isnan(value) for value in nans.tolist())
    assert len({checksum(nan) for nan in nans}) == 4
    assert checksum(torch.tensor([0.0])) != checksum(torch.tensor([-0.0]))
    assert checksum(torch.zeros(3)) != checksum(torch.zeros(4))
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_checksum_tells_constants_apart(dtype):
    """The weights of a norm begin as ones; sums of regular factors would vanish modulo 2**64 with many of them."""
    for numel in (256, 4096, 1 << 21):
        values = [torch.full((numel,), value, dtype=dtype) for value in (0.0, 1.0, 2.0, -1.0)]
        assert len({checksum(value) for value in values}) == 4


def test_checksum_sees_rows_that_change_places():
    """More than a million words of 4 bytes stand in rows of their own."""
    x = torch.arange(20 * (1 << 18), dtype=torch.int32)
    y = x.clone()
    y[: 1 << 20], y[1 << 20 : 2 << 20] = x[1 << 20 : 2 << 20], x[: 1 << 20]
    z = x.clone()
    z[9 * (1 << 18)] ^= -(1 << 31)  # a sign
    z[11 * (1 << 18) + 5] ^= -(1 << 31)
    assert len({checksum(x), checksum(y), checksum(z)}) == 3


@given(st.lists(st.integers(0, 255), min_size=2, max_size=50), st.data())
def test_checksum_sees_swapped_elements(numbers, data):
    i, j = data.draw(st.tuples(st.integers(0, len(numbers) - 1), st.integers(0, len(numbers) - 1)))
    x = torch.tensor(numbers, dtype=torch.uint8)
    y = x.clone()
    y[[i, j]] = x[[j, i]]
    assert (checksum(y) == checksum(x)) == (numbers[i] == numbers[j])


@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20), st.lists(st.integers(-(2**63), 2**63 - 1), max_size=20))
def test_checksum_of_different_tensors_differs(a, b):
    same = checksum(torch.tensor(a, dtype=torch.int64)) == checksum(torch.tensor(b, dtype=torch.int64))
    assert same == (a == b)
