"""Settings of PyTorch's allocator."""

import pytest
import torch

from hybrid_rl.memory.device import grow_segments


@pytest.mark.parametrize(
    "name, value, kept",
    [
        ("PYTORCH_ALLOC_CONF", "", ""),
        ("PYTORCH_ALLOC_CONF", "expandable_segments:False,max_split_size_mb:512", "max_split_size_mb:512,"),
        ("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:512, expandable_segments:True", "max_split_size_mb:512,"),
    ],
)
def test_expandable_segments_keep_the_users_allocator_settings(monkeypatch, name, value, kept):
    given: list[str] = []
    take = torch._C._accelerator_setAllocatorSettings
    monkeypatch.setattr(torch._C, "_accelerator_setAllocatorSettings", lambda text: (take(text), given.append(text)))
    for other in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(other, raising=False)
    monkeypatch.setenv(name, value)
    grow_segments(torch.device("cpu"), is_on=True)
    assert given == []
    for is_on in (True, False):
        grow_segments(torch.device("cuda"), is_on=is_on)
    assert given == [f"{kept}expandable_segments:True", f"{kept}expandable_segments:False"]
