"""Plans of buckets, and the buffer that two processes map."""

import itertools
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hybrid_rl.errors import OutOfMemoryError
from hybrid_rl.weights.bucket import IpcBucket, bucket_bytes, copy_tensors, open_ipc_bucket, plan_buckets, plan_halves
from hybrid_rl.weights.checksum import checksum

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[2]
CHILD = """
import sys, torch
from hybrid_rl.weights.bucket import open_ipc_bucket
from hybrid_rl.weights.checksum import checksum
bucket = open_ipc_bucket(bytes.fromhex(sys.argv[1]), torch.device("cpu"))
print(checksum(bucket), flush=True)
sys.stdin.readline()  # the parent has filled the bucket anew
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


def test_large_and_small_tensors_are_all_copied(monkeypatch):
    monkeypatch.setattr("hybrid_rl.weights.bucket._LARGE_BYTES", 100)
    sources = [torch.arange(size, dtype=torch.float32) + size for size in (24, 25, 1, 60)]  # 96, 100, 4 and 240 bytes
    whole = torch.full((12, 8), -1.0)
    targets = [torch.zeros(24), torch.zeros(25), whole[11, :1], whole[:10, :6]]  # two are slices of another tensor
    sources[3] = sources[3].view(10, 6)
    copy_tensors(targets, sources)
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))
    assert (whole == -1).sum() == 96 - 60 - 1
    copy_tensors(targets[:1], [torch.ones(24, dtype=torch.bfloat16)])
    assert targets[0].tolist() == [1.0] * 24


def test_halves_by_hand():
    """Tensors larger than a half are in the first half, in turn with the others, in any order of the model."""
    sizes = {"a": 300, "b": 100, "c": 900, "d": 200, "e": 600}  # of a buffer of 1024 bytes, in halves of 512
    plan = plan_halves([(name, (size,), torch.uint8) for name, size in sizes.items()], 1024)
    assert [[(slot.name, slot.offset) for slot in bucket] for bucket in plan] == [
        [("c", 0)],
        [("a", 1024)],  # after 900 bytes, aligned; b would end at 612 of its half
        [("e", 0)],
        [("b", 1024)],
        [("d", 0)],
    ]
    assert bucket_bytes(plan) == 1324


def test_slots_are_views_of_the_bucket_in_their_own_dtype():
    (bucket,) = plan_buckets([("a", (3,), torch.float32), ("b", (2, 2), torch.bfloat16)], 1024)
    memory = torch.zeros(1024, dtype=torch.uint8)
    bucket[1].view(memory).copy_(torch.tensor([[1, 2], [3, 4]]))
    assert memory[256:264].view(torch.bfloat16).tolist() == [1, 2, 3, 4]
    assert not memory[:256].any() and not memory[264:].any()


@pytest.mark.parametrize("shape", [(0,), (3, 0)])
def test_an_empty_tensor_is_refused_by_name(shape):
    with pytest.raises(ValueError, match="tensor lm_head has shape"):
        plan_buckets([("norm", (3,), torch.float32), ("lm_head", shape, torch.float32)], 1024)


def test_a_name_that_appears_twice_is_refused():
    with pytest.raises(ValueError, match="tensor norm appears twice"):
        plan_buckets([("norm", (3,), torch.float32), ("norm", (4,), torch.float32)], 1024)


@given(
    st.lists(st.tuples(st.integers(1, 300), st.sampled_from([torch.float32, torch.bfloat16])), min_size=1),
    st.integers(1, 2000),
)
def test_a_plan_keeps_order_and_cap_without_overlaps(tensors, max_bytes):
    plan = plan_buckets([(str(i), (n,), dtype) for i, (n, dtype) in enumerate(tensors)], max_bytes)
    assert [slot.name for bucket in plan for slot in bucket] == [str(i) for i in range(len(tensors))]
    for bucket in plan:
        assert len(bucket) == 1 or bucket[-1].offset + bucket[-1].nbytes <= max_bytes
        assert all(slot.offset % 256 == 0 for slot in bucket)
        assert all(a.offset + a.nbytes <= b.offset for a, b in itertools.pairwise(bucket))
    assert bucket_bytes(plan) <= max(max_bytes, max(slot.nbytes for bucket in plan for slot in bucket))


@given(st.lists(st.integers(1, 300), min_size=1), st.integers(1, 2000))
def test_successive_buckets_never_overlap_and_no_tensor_is_lost(sizes, num_bytes):
    plan = plan_halves([(str(i), (size,), torch.uint8) for i, size in enumerate(sizes)], num_bytes)
    assert sorted(int(slot.name) for bucket in plan for slot in bucket) == list(range(len(sizes)))
    places = [(min(s.offset for s in bucket), max(s.offset + s.nbytes for s in bucket)) for bucket in plan]
    for (start, end), (next_start, next_end) in itertools.pairwise(places):
        assert end <= next_start or next_end <= start
    assert bucket_bytes(plan) <= 2 * max(num_bytes // 2, *sizes) + 256


def mapped_files() -> set[str]:
    """Return the inodes of the files in /dev/shm that this process maps."""
    rows = [line.split(maxsplit=5) for line in Path("/proc/self/maps").read_text().splitlines()]
    return {row[4] for row in rows if row[-1].startswith("/dev/shm/")}


def test_a_bucket_is_opened_by_another_process():
    before = mapped_files()
    bucket = IpcBucket(1000, CPU)
    assert len(mapped_files() - before) == 1
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
    del bucket
    assert not mapped_files() - before


def test_a_bucket_opens_in_its_own_process_too():
    bucket = IpcBucket(16, CPU)
    opened = open_ipc_bucket(bucket.handle(), CPU)
    opened[3] = 5
    assert bucket.tensor[3] == 5


def test_a_bucket_has_no_name_that_a_killed_process_could_leave():
    before = set(os.listdir("/dev/shm"))
    bucket = IpcBucket(1000, CPU)
    assert set(os.listdir("/dev/shm")) - before == set()
    assert bucket.tensor.sum() == 0


def test_the_memory_of_a_bucket_is_reserved():
    """A page that /dev/shm cannot hold would end a later write in SIGBUS."""
    before = mapped_files()
    bucket = IpcBucket(1 << 20, CPU)
    (inode,) = mapped_files() - before
    (path,) = [path for path in Path("/proc/self/fd").iterdir() if path.exists() and str(path.stat().st_ino) == inode]
    assert path.stat().st_blocks * 512 >= len(bucket.tensor)


def test_a_bucket_without_room_is_one_sentence():
    with pytest.raises(OutOfMemoryError, match=r"the bucket .* needs [\d,]+ bytes of shared memory, but /dev/shm has"):
        IpcBucket(1 << 50, CPU)
