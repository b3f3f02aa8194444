"""A thousand random cases: no traceback for a user's mistake, and no number that an independent source denies."""

import pytest

from tests.fuzz.cases import failures
from tests.fuzz.subjects import SUBJECTS


def test_a_run_takes_a_thousand_cases():
    assert sum(subject.num_cases for subject in SUBJECTS.values()) >= 1000


@pytest.mark.parametrize("name", SUBJECTS)
def test_no_case_fails(name):
    found = list(failures(SUBJECTS[name]))
    assert not found, f"{len(found)} of {SUBJECTS[name].num_cases}, the first: {found[0]}"
