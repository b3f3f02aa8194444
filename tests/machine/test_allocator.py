"""Settings of PyTorch's allocator in environment variables."""

import pytest

from hybrid_rl.config import ConfigError
from hybrid_rl.machine.allocator import check_allocator

OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"


@pytest.mark.parametrize(
    "environment",
    [
        {},
        {OLD: ""},
        {NEW: "max_split_size_mb:128, expandable_segments:True"},
        {OLD: "expandable_segments:True", NEW: "expandable_segments:False"},
        {OLD: "max_split_size_mb:128,expandable_segments:True", NEW: "max_split_size_mb:128"},
        {NEW: "roundup_power2_divisions:[256:1,512:2,>:4],backend:native"},
    ],
)
def test_settings_that_a_run_can_use_are_accepted(environment):
    check_allocator(environment)


@pytest.mark.parametrize(
    ("environment", "sentence"),
    [
        ({NEW: "max_split_size_mb=128"}, "'max_split_size_mb=128' is not key:value"),
        ({OLD: "max_split_size_mb:"}, "'max_split_size_mb:' is not key:value"),
        ({OLD: "backend:cudaMallocAsync"}, "cannot open memory of the backend cudaMallocAsync"),
        ({OLD: "max_split_size_mb:128", NEW: "max_split_size_mb:256"}, "disagree, and PyTorch reads one of them only"),
    ],
)
def test_settings_that_break_a_run_are_refused(environment, sentence):
    with pytest.raises(ConfigError) as error:
        check_allocator(environment)
    (message,) = error.value.messages
    assert sentence in message and all(f"{name} = {value}" in message for name, value in environment.items())


def test_both_variables_are_reported():
    with pytest.raises(ConfigError) as error:
        check_allocator({OLD: "a", NEW: "backend:cudaMallocAsync"})
    assert [message.split(" = ")[0] for message in error.value.messages] == [OLD, NEW]
