"""What a compute capability must suffice for."""

from dataclasses import replace

import pytest
import torch

from hybrid_rl.config import ConfigError, ModelsConfig
from hybrid_rl.machine.gpus import check_capability, check_torch_build, has_gpu, runs_on

BFLOAT16 = ModelsConfig(dtype="bfloat16", attention="sdpa")


@pytest.mark.parametrize(
    ("built", "capability", "runs"),
    [
        ("sm_80", (8, 0), True),
        ("sm_80", (8, 6), True),  # machine code runs on later minor versions
        ("sm_86", (8, 0), False),
        ("sm_80", (9, 0), False),
        ("compute_80", (9, 0), True),  # PTX is compiled for later versions
        ("compute_90", (8, 0), False),
        ("sm_90a", (9, 0), True),
        ("sm_100a", (10, 3), False),  # bound to its own version
        ("sm_100f", (10, 3), True),
        ("compute_100f", (12, 0), False),
        ("sm_120", (12, 1), True),
        ("gfx90a", (9, 0), False),
    ],
)
def test_code_runs_on_the_capabilities_that_nvidia_documents(built, capability, runs):
    assert runs_on(built, capability) is runs


def test_a_gpu_that_torch_has_no_kernels_for_is_refused():
    with pytest.raises(ConfigError, match=r"Tesla V100 with compute capability 7\.0: torch .* has no kernels for it"):
        check_capability("Tesla V100", (7, 0), BFLOAT16, ["sm_80", "sm_90", "compute_90"])
    check_capability("H200", (9, 0), BFLOAT16, ["sm_80", "sm_90"])
    check_capability("H200", (9, 0), BFLOAT16, [])


def test_bfloat16_and_flash_attention_need_capability_8():
    with pytest.raises(ConfigError, match=r"models.dtype = bfloat16: bfloat16 needs compute capability 8.0"):
        check_capability("T4", (7, 5), BFLOAT16, [])
    check_capability("T4", (7, 5), replace(BFLOAT16, dtype="float32"), [])
    with pytest.raises(ConfigError, match=r"models.attention = flash_attention_2: flash-attn needs"):
        check_capability("T4", (7, 5), ModelsConfig(dtype="float32", attention="flash_attention_2"), [])


def test_a_container_has_gpus_if_it_has_device_files(tmp_path):
    (tmp_path / "nvidiactl").touch()
    assert not has_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_gpu(tmp_path)


def test_a_cpu_build_of_torch_on_a_machine_with_gpus_is_refused_unless_they_are_hidden(monkeypatch):
    monkeypatch.setattr("hybrid_rl.machine.gpus.has_gpu", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", None)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    check_torch_build()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError, match="is a build for CPUs, but this machine has NVIDIA GPUs"):
        check_torch_build()
