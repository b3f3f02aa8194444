"""Models that are not trained: their host copies, and bit-for-bit restores."""

import pytest
import torch

from hybrid_rl.memory.tenants import FrozenModule

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_module_is_restored_bit_for_bit(device):
    module = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.BatchNorm1d(64)).to(device)
    before = {name: t.clone().cpu() for name, t in module.state_dict().items()}
    tenant = FrozenModule(module)
    num_bytes = sum(t.nbytes for t in [*module.parameters(), *module.buffers()])
    assert not any(p.requires_grad for p in module.parameters())
    for expected_copied in (num_bytes, 0):
        assert tenant.release() == expected_copied
        assert all(p.numel() == 0 for p in module.parameters()) and not tenant.is_resident
        assert tenant.restore() == num_bytes
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor.cpu(), before[name])


@pytest.mark.parametrize("device", DEVICES)
def test_frozen_module_is_copied_to_the_host_again_after_a_change(device):
    module = torch.nn.Linear(2, 1).to(device)
    tenant = FrozenModule(module)
    for value, expected_copied in ((1.0, 12), (2.0, 12), (2.0, 0)):
        if expected_copied:
            torch.nn.init.constant_(module.weight, value)
        assert tenant.parameters()["weight"].data_ptr() == module.weight.data_ptr()
        assert tenant.release() == expected_copied
        assert tenant.parameters()["weight"].tolist() == [[value, value]]
        assert tenant.parameters().keys() == {"weight", "bias"} and module.weight.numel() == 0
        tenant.restore()
        assert module.weight.tolist() == [[value, value]]
    tenant.release()
    tenant.parameters()["weight"].fill_(5.0)  # like a checkpoint loaded while the module is released
    tenant.restore()
    assert module.weight.tolist() == [[5.0, 5.0]]
