"""The GPUs that are known: memory, peak rates, links and compute capability, from their maker's data sheets."""

import re
from dataclasses import dataclass

MIB = 1 << 20
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Card:
    """A model of GPU. Rates are peaks that no program reaches; links count one direction."""

    name: str
    """Value of --gpu."""
    sold_as_gb: int
    """Memory in the data sheet."""
    listed_mib: int
    """Memory that nvidia-smi lists, in MiB: without what the driver reserves, and with GDDR6 without what ECC takes."""
    bf16_flops: float
    """Dense bfloat16 operations per second with float32 sums; the data sheets of most cards print twice as many, with
    sparsity."""
    memory_bytes_per_s: float
    bus_bytes_per_s: float
    """PCIe, host to device or back: 32 GB/s for 16 lanes of version 4, 64 GB/s for version 5."""
    nvlink_bytes_per_s: float | None
    """To the other GPUs of a node; None for a card without NVLink, which reaches them through the bus."""
    capability: tuple[int, int]
    """Compute capability, major and minor."""
    driver_names: str
    """Regular expression of the names under which the driver lists the card."""
    source: str
    """Title of the data sheet."""

    @property
    def memory_bytes(self) -> int:
        """Bytes of memory that nvidia-smi lists."""
        return self.listed_mib * MIB

    @property
    def has_fused_logprobs(self) -> bool:
        """Whether a multiprocessor has the shared memory for the fused log-prob kernels; others take chunks of logits.

        Compute capabilities 9.0 and 10.0 have 227 KiB, 8.0 has 163, 8.6 and 8.9 have 99; the kernels take 216.

        Source: CUDA C++ Programming Guide, technical specifications per compute capability.
        """
        return self.capability in ((9, 0), (10, 0))


CARDS = {
    card.name: card
    for card in (
        Card(
            name="rtx4090",
            sold_as_gb=24,
            listed_mib=24564,
            bf16_flops=165.2e12,
            memory_bytes_per_s=1008 * GB,
            bus_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=None,
            capability=(8, 9),
            driver_names=r"NVIDIA GeForce RTX 4090",
            source="NVIDIA Ada GPU Architecture, version 2, appendix A",
        ),
        Card(
            name="a10",
            sold_as_gb=24,
            listed_mib=23028,
            bf16_flops=125e12,
            memory_bytes_per_s=600 * GB,
            bus_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=None,
            capability=(8, 6),
            driver_names=r"NVIDIA A10",
            source="NVIDIA A10 Tensor Core GPU data sheet",
        ),
        Card(
            name="l40s",
            sold_as_gb=48,
            listed_mib=46068,
            bf16_flops=362.05e12,
            memory_bytes_per_s=864 * GB,
            bus_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=None,
            capability=(8, 9),
            driver_names=r"NVIDIA L40S",
            source="NVIDIA L40S data sheet",
        ),
        Card(
            name="a100-40",
            sold_as_gb=40,
            listed_mib=40960,
            bf16_flops=312e12,
            memory_bytes_per_s=1555 * GB,
            bus_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=300 * GB,
            capability=(8, 0),
            driver_names=r"(NVIDIA )?A100-SXM4-40GB",
            source="NVIDIA A100 Tensor Core GPU data sheet, 40 GB SXM",
        ),
        Card(
            name="a100-80",
            sold_as_gb=80,
            listed_mib=81920,
            bf16_flops=312e12,
            memory_bytes_per_s=2039 * GB,
            bus_bytes_per_s=32 * GB,
            nvlink_bytes_per_s=300 * GB,
            capability=(8, 0),
            driver_names=r"(NVIDIA )?A100-SXM4-80GB",
            source="NVIDIA A100 Tensor Core GPU data sheet, 80 GB SXM",
        ),
        Card(
            name="h100",
            sold_as_gb=80,
            listed_mib=81559,
            bf16_flops=989.5e12,
            memory_bytes_per_s=3350 * GB,
            bus_bytes_per_s=64 * GB,
            nvlink_bytes_per_s=450 * GB,
            capability=(9, 0),
            driver_names=r"NVIDIA H100 80GB HBM3",
            source="NVIDIA H100 Tensor Core GPU data sheet, SXM",
        ),
        Card(
            name="h200",
            sold_as_gb=141,
            listed_mib=143771,
            bf16_flops=989.5e12,
            memory_bytes_per_s=4800 * GB,
            bus_bytes_per_s=64 * GB,
            nvlink_bytes_per_s=450 * GB,
            capability=(9, 0),
            driver_names=r"NVIDIA H200",
            source="NVIDIA H200 Tensor Core GPU data sheet, SXM",
        ),
        Card(
            name="b200",
            sold_as_gb=180,
            listed_mib=183359,
            bf16_flops=2250e12,
            memory_bytes_per_s=8000 * GB,
            bus_bytes_per_s=64 * GB,
            nvlink_bytes_per_s=900 * GB,
            capability=(10, 0),
            driver_names=r"NVIDIA B200",
            source="NVIDIA DGX B200 data sheet, an eighth of the system, whose hosts have PCIe 5.0",
        ),
    )
}
"""Name -> card."""


def find_card(driver_name: str) -> Card | None:
    """Return the card that the driver lists under a name; None for a card that is not known, or a part of one."""
    return next((card for card in CARDS.values() if re.fullmatch(card.driver_names, driver_name)), None)
