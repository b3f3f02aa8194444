"""The page on architecture lists exactly the families whose weights the engine can alias."""

import re

from hybrid_rl.weights.layout import KNOWN
from tests.programs import ROOT


def test_the_table_of_families_names_every_architecture_that_can_be_aliased():
    page = (ROOT / "docs" / "architecture.md").read_text()
    table = page.split("### Families of models")[1].split("\n**")[0]
    assert sorted(re.findall(r"`(\w+For\w+)`", table)) == sorted(KNOWN)
