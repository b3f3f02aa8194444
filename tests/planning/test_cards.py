"""Facts of the table of cards, the names under which drivers list them, and rates that are scaled between cards."""

import pytest

from hybrid_rl.planning.cards import CARDS, find_card
from hybrid_rl.planning.rates import Rates, rates_of


def test_every_card_that_people_name_is_known():
    assert list(CARDS) == ["rtx4090", "a10", "l40s", "a100-40", "a100-80", "h100", "h200", "b200"]
    assert all(card.name == name and card.source for name, card in CARDS.items())


@pytest.mark.parametrize("name", CARDS)
def test_the_listed_memory_is_a_little_less_than_what_the_card_is_sold_with(name):
    """With GDDR6, ECC takes a sixteenth."""
    sold = CARDS[name].sold_as_gb << 30
    assert 0.935 * sold < CARDS[name].memory_bytes <= sold


@pytest.mark.parametrize(
    "driver_name, name",
    [
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA A10", "a10"),
        ("NVIDIA A10G", None),
        ("NVIDIA L40S", "l40s"),
        ("NVIDIA L40", None),
        ("NVIDIA A100-SXM4-40GB", "a100-40"),
        ("NVIDIA A100-SXM4-80GB", "a100-80"),
        ("NVIDIA A100-SXM4-40GB MIG 3g.20gb", None),
        ("NVIDIA A100 80GB PCIe", None),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H200", "h200"),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA B200", "b200"),
        ("Tesla T4", None),
    ],
)
def test_a_driver_name_is_one_card_or_unknown(driver_name, name):
    found = find_card(driver_name)
    assert (found.name if found else None) == name


def test_fused_logprobs_need_the_shared_memory_of_hopper_or_blackwell():
    assert [name for name, card in CARDS.items() if card.has_fused_logprobs] == ["h100", "h200", "b200"]


def test_the_rates_of_an_h200_are_the_measured_ones():
    assert rates_of(CARDS["h200"]) == Rates()


def test_rates_of_other_cards_scale_with_the_peak_that_limits_them():
    """165.2 of 989.5 TFLOP/s, 1008 of 4800 GB/s, PCIe 4 instead of 5, and no NVLink."""
    found = rates_of(CARDS["rtx4090"])
    assert found.matmul_flops == pytest.approx(790e12 * 165.2 / 989.5)
    assert found.memory_bytes_per_s == pytest.approx(4.21e12 * 1008 / 4800)
    assert found.bus_out_bytes_per_s == found.bus_in_bytes_per_s == pytest.approx(55.1e9 / 2)
    assert found.node_bytes_per_s == pytest.approx(55.1e9 / 2)
    assert (found.host_s_per_step, found.launch_s, found.network_bytes_per_s) == (2.4e-3, 1.6e-3, 40e9)
    a100 = rates_of(CARDS["a100-80"])
    assert a100.node_bytes_per_s == pytest.approx(260e9 * 300 / 450)
