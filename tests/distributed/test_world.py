"""Collectives between two ranks deliver every item unchanged."""

import sys
import warnings
from pathlib import Path
from typing import Any

import torch

from hybrid_rl.distributed import World, join_world


def item(sender: int, receiver: int) -> dict[str, Any]:
    """Return the item that one rank sends another; each has another size."""
    number = 10 * sender + receiver
    return {
        "table": torch.arange(number + 1, dtype=torch.float32)[:, None].expand(-1, 3),
        "is_late": torch.tensor([True, False]),
        "weight": torch.full((2, number), 0.5, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 4, dtype=torch.int64),
        "words": [f"from {sender}", None, (1, 2.5)],
    }


def assert_is(found: dict[str, Any], sender: int, receiver: int) -> None:
    expected = item(sender, receiver)
    assert found.keys() == expected.keys() and found["words"] == expected["words"]
    for name in ("table", "is_late", "weight", "nothing"):
        assert found[name].dtype == expected[name].dtype
        assert torch.equal(found[name], expected[name]), name


def main() -> None:
    """Run as one of two ranks and save the items that it received."""
    world = join_world()
    warnings.simplefilter("error")  # PyTorch warns about tensors of read-only memory
    received = world.all_to_all([item(world.rank, receiver) for receiver in range(world.size)])
    torch.save(received, Path(sys.argv[1]) / f"rank{world.rank}.pt")


def test_all_to_all_delivers_each_item_unchanged(on_two_ranks):
    for receiver, received in enumerate(on_two_ranks(__file__)):
        assert len(received) == 2
        for sender, found in enumerate(received):
            assert_is(found, sender, receiver)


def test_a_single_rank_keeps_its_own_item():
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"))
    words = ["mine"]
    assert world.all_to_all([words])[0] is words


if __name__ == "__main__":
    main()
