"""The environment variables that decide which devices a run gets, checked before CUDA reads them."""

from collections.abc import Mapping
from functools import partial

from hybrid_rl.config import Findings
from hybrid_rl.machine.allocator import check_allocator
from hybrid_rl.machine.gpus import driver_uuids
from hybrid_rl.machine.network import check_rendezvous
from hybrid_rl.machine.visible_devices import check_names


def check_environment(environment: Mapping[str, str]) -> None:
    """Check the variables of CUDA, of PyTorch's allocator and of torch's launchers.

    Raises:
        ConfigError: everything that was found.
    """
    findings = Findings()
    findings.run(lambda: check_names(environment, driver_uuids()))
    for checked in (check_allocator, check_rendezvous):
        findings.run(partial(checked, environment))
    findings.raise_any()
