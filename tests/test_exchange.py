"""Two ranks exchange values of every kind, and no rank runs what another one sends."""

import pickle
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hybrid_rl import errors
from hybrid_rl.config import ConfigError
from hybrid_rl.distributed import join_world
from hybrid_rl.exchange import describe_error, make_error


@dataclass(frozen=True)
class Part:
    """What a rank sends."""

    rank: int
    rows: tuple[list[int], ...]


class Opens:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def raised(call: Any) -> Any:
    """Return class and sentences of the error that a call raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, error.args
    return None


def fail(error: Exception) -> None:
    raise error


def send_pickle(path: Path) -> None:
    """Send what all_gather sends, with a pickle in place of a serialized value."""
    content = torch.frombuffer(bytearray(pickle.dumps(Opens(path))), dtype=torch.uint8)
    dist.all_gather([torch.zeros(1, dtype=torch.int64) for _ in range(2)], torch.tensor([len(content)]))
    dist.all_gather([torch.empty_like(content) for _ in range(2)], content)


def main() -> None:
    """Run as one of two ranks and save what each collective returned."""
    folder, world = Path(sys.argv[1]), join_world()
    found: dict[str, Any] = {}
    part = Part(rank=world.rank, rows=([world.rank] * 3, []) if world.rank else ())
    gathered = world.all_gather((part, {1: None}), Part)
    found["gathered"] = [(type(item) is Part, vars(item), other) for item, other in gathered]
    found["nothing"] = world.all_gather(None)
    found["main"] = [vars(item) for item in world.run_on_main(lambda: [part], Part)]
    found["config"] = raised(lambda: world.run_on_main(lambda: fail(ConfigError("one", "two"))))
    found["lost"] = raised(lambda: world.run_on_main(lambda: fail(errors.EngineLostError("the engine has ended"))))
    if world.rank == 1:
        send_pickle(folder / "ran")
    else:
        found["pickle"] = raised(lambda: world.all_gather("a"))
    world.barrier()
    torch.save(found | {"ran": (folder / "ran").exists()}, folder / f"rank{world.rank}.pt")


@pytest.fixture(scope="module")
def both(on_two_ranks) -> list[dict[str, Any]]:
    return on_two_ranks(__file__)


def test_every_rank_gets_the_values_of_all_ranks(both):
    first, second = {"rank": 0, "rows": ()}, {"rank": 1, "rows": ([1, 1, 1], [])}
    for rank in both:
        assert rank["gathered"] == [(True, first, {1: None}), (True, second, {1: None})]
        assert rank["nothing"] == [None, None] and rank["main"] == [first]


def test_errors_that_end_a_run_reach_every_rank_as_what_they_are(both):
    for rank in both:
        assert rank["config"] == ("ConfigError", ("one", "two"))
        assert rank["lost"] == ("EngineLostError", ("the engine has ended",))


def test_a_pickle_from_another_rank_runs_no_code(both):
    name, (sentence,) = both[0]["pickle"]
    assert name == "ValueError" and sentence.startswith("cannot be decoded")
    assert [rank["ran"] for rank in both] == [False, False]


@pytest.mark.parametrize("kind", [errors.RunError, *errors.RunError.__subclasses__()], ids=lambda kind: kind.__name__)
def test_each_error_with_an_exit_code_keeps_it_on_other_ranks(kind):
    error = make_error(*describe_error(kind("a sentence")))
    assert type(error) is kind and str(error) == "a sentence" and error.exit_code == kind.exit_code


def test_an_error_of_another_class_keeps_its_name_in_the_sentence():
    class EngineLostError(Exception):
        """Has the name of an error that ends a run."""

    error = make_error(*describe_error(EngineLostError("odd")))
    assert type(error) is RuntimeError and str(error) == "EngineLostError: odd"


if __name__ == "__main__":
    main()
