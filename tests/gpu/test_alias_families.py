"""On a GPU, engines that alias the trainer's weights equal those with copies, bit for bit, for every known family."""

from pathlib import Path

import pytest
import torch

from tests.weights.alias_families import FAMILIES
from tests.weights.family_programs import run_families
from tests.weights.test_alias_families import PROGRAM, check_family

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


def test_engines_with_aliases_equal_those_with_copies(tmp_path: Path) -> None:
    for name, found in run_families(PROGRAM, str(tmp_path), *FAMILIES, timeout_s=400).items():
        check_family(found, tmp_path / name, torch.device("cuda"), largest_gap=0.05)
