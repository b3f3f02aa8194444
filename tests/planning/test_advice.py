"""Runs that do not fit, and the changes of settings or GPUs that the planner suggests for them."""

from dataclasses import replace

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.models.sequence_parallel import check_head_counts
from hybrid_rl.planning.advice import Alternative, find_fitting_alternative, larger_micro_batches
from hybrid_rl.planning.plan import GIB, Machine
from hybrid_rl.planning.planner import make_plan
from hybrid_rl.planning.shapes import read_shapes
from hybrid_rl.planning.startup import check_plan

LONG_RESPONSES = {"rollout": {"max_response_tokens": 48 * 1024 - 256}, "update": {"micro_batch_tokens": 48 * 1024}}


def machine(gib: float = 80, num_gpus: int = 1) -> Machine:
    return Machine(gpu_memory_bytes=int(gib * GIB), num_gpus=num_gpus, backend="reference")


@pytest.mark.parametrize(
    "name, sections, gib, first",
    [
        ("1b", {"update": {"micro_batch_tokens": 65536}}, 80, "--update.micro_batch_tokens 16384"),
        ("1b", {"rollout": {"kv_cache_memory_bytes": 70 * GIB}}, 80, "--rollout.kv_cache_memory_bytes null"),
        ("1b", {"memory": {"swap": "off"}, "update": {"micro_batch_tokens": 1024}}, 32, "--memory.swap auto"),
        ("7b", {}, 80, "--gpus"),
    ],
)
def test_the_suggested_alternative_fits_and_is_named_in_the_error(make_config, name, sections, gib, first):
    config = make_config(name, **sections)
    shapes = read_shapes(config)
    found = make_plan(config, machine(gib), shapes)
    assert found.missing_bytes > 0
    suggested = find_fitting_alternative(config, machine(gib), shapes)
    assert first in str(suggested), str(suggested)
    assert make_plan(suggested.config, suggested.machine, shapes).missing_bytes == 0
    with pytest.raises(ConfigError) as error:
        check_plan(found, config, shapes)
    numbers = (f"{found.peak(found.fullest_phase):,}", f"{machine(gib).budget_bytes:,}")
    for part in (found.fullest_phase.value, *numbers, str(suggested)):
        assert part in str(error.value)


@pytest.mark.parametrize("group_size, tokens", [(1, [16384, 32768]), (2, [16384, 32768, 65536])])
def test_larger_micro_batches_end_at_the_tokens_of_a_mini_batch_per_group(make_config, group_size, tokens):
    """128 sequences of 1024 tokens over 4 ranks: 32768 per rank, 65536 per group of two sequence-parallel ranks."""
    config = make_config("1b", update={"sequence_parallel_size": group_size})
    found = larger_micro_batches(Alternative(config=config, machine=machine(num_gpus=4)))
    assert [larger.config.update.micro_batch_tokens for larger in found] == tokens


@pytest.mark.parametrize("num_gpus, is_parallel", [(1, False), (2, True)])
def test_sequence_parallelism_is_suggested_for_long_responses_on_two_gpus(make_config, num_gpus, is_parallel):
    config, gpus = make_config("1b", **LONG_RESPONSES), machine(80, num_gpus)
    shapes = read_shapes(config)
    assert make_plan(config, gpus, shapes).missing_bytes > 0
    found = find_fitting_alternative(config, gpus, shapes)
    assert found and (str(found) == "--update.sequence_parallel_size 2") == is_parallel, str(found)


@pytest.mark.parametrize("num_gpus", [2, 8])
def test_sequence_parallelism_is_not_suggested_for_heads_that_do_not_divide(make_config, num_gpus):
    """With three heads instead of 32, the suggestion of the test above is not possible."""
    odd = replace(read_shapes(make_config("1b")).actor, num_heads=3, query_size=2049, key_size=683)
    config = make_config("1b", **LONG_RESPONSES)
    shapes = replace(read_shapes(config), actor=odd)
    assert "sequence_parallel" not in str(find_fitting_alternative(config, machine(80, num_gpus), shapes))


def test_sizes_that_divide_28_heads_and_4_key_heads(make_config):
    shape = read_shapes(make_config("7b")).actor

    def can_divide(size: int) -> bool:
        try:
            check_head_counts(shape.num_heads, shape.key_size // shape.head_size, size, where="a model")
        except ConfigError:
            return False
        return True

    assert [size for size in range(1, 29) if can_divide(size)] == [1, 2, 4, 28]


def test_the_error_says_that_no_alternative_fits(make_config):
    config = make_config("7b")
    shapes = read_shapes(config)
    assert find_fitting_alternative(config, machine(4), shapes) is None
    with pytest.raises(ConfigError, match="nothing that is known here would fit on up to 64 GPUs"):
        check_plan(make_plan(config, machine(4), shapes), config, shapes)
