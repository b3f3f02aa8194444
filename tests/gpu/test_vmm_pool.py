"""The pool on a GPU: contents, addresses, physical memory, and DeepSpeed's steps while optimizer states move.

The library is built by `pip install -e .`, or by `cmake -S . -B build && cmake --build build` in the checkout.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from hybrid_rl.batch import make_train_batch, pack
from hybrid_rl.config import Config, MemoryConfig, ModelsConfig, OptimizerConfig
from hybrid_rl.memory.tenants import PooledModule, PooledTenant, rehome
from hybrid_rl_kernels.vmm_pool import Region, VmmOutOfMemoryError, VmmPool, pool_of, released_bytes, why_unavailable
from tests.conftest import make_rollout

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

MIB = 1 << 20
SIZE = 600 * MIB  # several chunks, the last one smaller


@pytest.fixture(scope="module")
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture(scope="module")
def pool(device: torch.device) -> VmmPool:
    assert why_unavailable() == ""
    return pool_of(device)


def free_bytes() -> int:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info()[0]


def filled(region: Region, num_bytes: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return a tensor of random bytes in the region, and a copy on the host."""
    expected = torch.randint(0, 256, (num_bytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    with region:
        tensor = torch.empty(num_bytes, dtype=torch.uint8, device="cuda")
    return tensor.copy_(expected), expected


@pytest.mark.parametrize("policy, copied", [("copy", [1, 1, 1]), ("copy_once", [1, 0, 0]), ("drop", [0, 0, 0])])
def test_contents_addresses_and_physical_memory(pool: VmmPool, policy: str, copied: list[int]) -> None:
    region = pool.region("optimizer", policy=policy)
    before = free_bytes()
    (large, expected), (small, _) = filled(region, SIZE, 1), filled(region, 1000, 2)
    address, taken = large.data_ptr(), region.num_bytes
    assert taken >= SIZE + 1000 and before - free_bytes() == pytest.approx(taken, abs=8 * MIB)
    reserved = torch.cuda.memory_reserved()
    for expected_copy in copied:
        away = released_bytes()
        assert region.release() == expected_copy * taken
        assert released_bytes() - away == taken and torch.cuda.memory_reserved() == reserved
        assert free_bytes() == pytest.approx(before, abs=8 * MIB) and not region.is_resident
        assert region.restore() == (taken if policy != "drop" else 0)
        assert large.data_ptr() == address and region.is_resident
        if policy != "drop":
            assert torch.equal(large.cpu(), expected)
        large.copy_(expected)  # dropped memory can be written too
    assert torch.equal(large.cpu(), expected) and small.numel() == 1000


def test_a_release_waits_for_kernels_on_other_streams(pool: VmmPool) -> None:
    region = pool.region("busy")
    with region:
        tensor = torch.zeros(SIZE // 4, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(200_000_000)
        tensor.add_(1.0)
    region.release()
    region.restore()
    assert bool((tensor == 1.0).all())


def test_views_follow_their_storage_into_a_region(pool: VmmPool) -> None:
    flat = torch.arange(SIZE // 8, dtype=torch.float32, device="cuda")
    view, expected = flat[7:19].view(3, 4).T, flat.cpu()
    region, before = pool.region("rehomed"), free_bytes()
    rehome([flat, view], region)
    assert region.num_bytes == pytest.approx(flat.nbytes, abs=2 * MIB)
    assert free_bytes() == pytest.approx(before, abs=8 * MIB)  # moved, not copied
    assert view.untyped_storage().data_ptr() == flat.data_ptr()
    region.release()
    assert free_bytes() - before == pytest.approx(region.num_bytes, abs=8 * MIB)
    region.restore()
    assert torch.equal(flat.cpu(), expected) and torch.equal(view.cpu(), expected[7:19].view(3, 4).T)


def test_releases_use_the_reserved_host_memory(pool: VmmPool) -> None:
    region = pool.region("reserved")
    tensor, expected = filled(region, SIZE, 6)
    if pool.reserve.num_bytes:
        pytest.skip("this process has reserved host memory before")
    pool.reserve_host(SIZE)
    assert region.release() == region.num_bytes  # waits until the memory is pinned
    assert pool.reserve.taken_bytes == region.num_bytes
    assert region.restore() == region.num_bytes
    assert torch.equal(tensor.cpu(), expected)


@pytest.fixture
def crowded() -> Iterator[list[Tensor]]:
    hog: list[Tensor] = []
    yield hog
    hog.clear()
    torch.cuda.empty_cache()


def test_out_of_memory_in_a_restore_rolls_back(pool: VmmPool, crowded: list[Tensor]) -> None:
    region = pool.region("actor_optimizer")
    tensor, expected = filled(region, SIZE, 3)
    region.release()
    crowded.append(torch.empty(free_bytes() - SIZE // 2, dtype=torch.uint8, device="cuda"))
    left = torch.cuda.mem_get_info()[0]
    with pytest.raises(VmmOutOfMemoryError, match=r"region actor_optimizer.* bytes of GPU memory wanted") as caught:
        region.restore()
    assert caught.value.wanted_bytes == region.num_bytes and caught.value.free_bytes < SIZE
    assert torch.cuda.mem_get_info()[0] == pytest.approx(left, abs=4 * MIB) and not region.is_resident
    crowded.clear()
    torch.cuda.empty_cache()
    assert region.restore() == region.num_bytes
    assert torch.equal(tensor.cpu(), expected)


def test_out_of_memory_of_an_allocation_names_the_region(pool: VmmPool) -> None:
    region = pool.region("too large")
    with pytest.raises(VmmOutOfMemoryError, match="region too large"), region:
        torch.empty(torch.cuda.mem_get_info()[1], dtype=torch.uint8, device="cuda")
    assert region.num_bytes == 0
    assert torch.empty(4, device="cuda").fill_(1.0).sum().item() == 4.0  # outside, PyTorch's own allocator serves


def test_an_exchange_moves_both_ways_within_the_larger_of_the_two(pool: VmmPool, crowded: list[Tensor]) -> None:
    critic, actor = pool.region("critic"), pool.region("actor")
    theirs, expected_theirs = filled(critic, SIZE, 4)
    critic.release()
    ours, expected_ours = filled(actor, SIZE + 300 * MIB, 5)
    actor.release()
    critic.restore()
    crowded.append(torch.empty(free_bytes() - 310 * MIB, dtype=torch.uint8, device="cuda"))
    assert pool.exchange(critic, actor) == (critic.num_bytes, actor.num_bytes)
    assert torch.equal(ours.cpu(), expected_ours)
    assert pool.exchange(actor, critic) == (actor.num_bytes, critic.num_bytes)
    assert torch.equal(theirs.cpu(), expected_theirs)


def test_memory_use_is_constant_over_twenty_cycles(pool: VmmPool) -> None:
    regions = [pool.region(f"cycle {policy}", policy=policy) for policy in ("copy", "copy_once", "drop")]
    tensors = [filled(region, SIZE, seed) for seed, region in enumerate(regions)]
    here, away = [], []
    for _ in range(20):
        for region in regions:
            region.release()
        away.append(free_bytes())
        for region in regions:
            region.restore()
        here.append(free_bytes())
    for series in (away[2:], here[2:]):
        assert max(series) - min(series) <= 64 * MIB, series
    assert all(torch.equal(tensor.cpu(), expected) for tensor, expected in tensors[:2])


def test_a_frozen_module_computes_the_same(pool: VmmPool) -> None:
    module = torch.nn.Sequential(torch.nn.Linear(512, 2048), torch.nn.GELU(), torch.nn.Linear(2048, 512)).cuda()
    inputs = torch.randn(16, 512, device="cuda")
    expected, weight = module(inputs), module[0].weight.detach().cpu()
    tenant = PooledModule(pool, "reference", module)
    num_bytes = tenant.kept.num_bytes
    for copied in (num_bytes, 0, 0):
        assert tenant.release() == copied
        assert tenant.restore() == num_bytes
        assert torch.equal(module(inputs), expected)
    tenant.release()
    assert torch.equal(tenant.parameters()["0.weight"], weight)
    tenant.parameters()["2.bias"].fill_(7.0)  # the host copy is what comes back
    tenant.restore()
    assert bool((module[2].bias == 7.0).all())


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_deepspeed_takes_the_same_steps_when_optimizer_states_move(
    small: Path, pool: VmmPool, device: torch.device, stage: int
) -> None:
    expected = train(small, device, stage, moves=False)
    assert train(small, device, stage, moves=False) == expected  # the GPU itself is deterministic
    assert train(small, device, stage, moves=True) == expected


def train(small: Path, device: torch.device, stage: int, *, moves: bool) -> list[object]:
    """Take three steps, optionally with releases in between; return gradient norms and checksums of the snapshot."""
    from hybrid_rl.distributed import join_world
    from hybrid_rl.engines.deepspeed.engine import DeepSpeedEngine
    from hybrid_rl.engines.tenants import Tenants
    from hybrid_rl.models.loading import load_actor
    from hybrid_rl.models.packed import packed_inputs
    from hybrid_rl.weights.checksum import checksum

    world = join_world()
    torch.manual_seed(0)
    models = ModelsConfig(actor=str(small / "policy"), dtype="bfloat16", attention="sdpa")
    actor = load_actor(models.actor, models, device)
    engine = DeepSpeedEngine(actor, OptimizerConfig(lr=1e-3), zero_stage=stage, total_steps=3, world=world)
    makes = Tenants(Config(memory=MemoryConfig(swap="vmm")), device)
    parts: list[PooledTenant] = []
    if moves:
        for tenant in (makes.optimizer("actor", engine), makes.parameters("actor", engine, is_aliased=False)):
            assert isinstance(tenant, PooledTenant)
            parts.append(tenant)
    sequences = [list(range(3 + i, 60 + 7 * i)) for i in range(2)]
    rollouts = [make_rollout(ids[:8], ids[8:]) for ids in sequences]
    packed = pack(make_train_batch(rollouts), [0, 1], device)
    index = {"index": packed.response_index, "targets": packed.targets, "temperature": 1.0}
    found: list[object] = []
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        for _ in range(3):
            for part in parts:
                part.release()
            torch.cuda.empty_cache()
            for part in parts:
                part.restore()
            logprobs, _ = engine.forward(**packed_inputs(packed), **index)
            engine.backward(-logprobs.mean(), is_last=True)
            found.append(engine.step())
    found += [(name, checksum(tensor)) for name, tensor in sorted(engine.snapshot().tensors.items())]
    return found
