"""A run whose process is killed, stopped or asked to end, or whose file is damaged, ends as promised or goes on."""

import pytest

from tests.faults import file_cases
from tests.faults.judging import faults_of
from tests.faults.process_cases import CASES
from tests.faults.runs import FaultyRuns


@pytest.fixture(scope="module")
def faulty_runs(fork_servers, tmp_path_factory):
    runs = FaultyRuns(tmp_path_factory.mktemp("faults"), fork_servers[0])
    yield runs
    runs.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.is_in_test_slow])
def test_a_run_ends_as_promised_or_goes_on(faulty_runs, name):
    outcome = faulty_runs.run(CASES[name])
    assert faults_of(outcome, CASES[name].expected) == [], outcome.output


@pytest.mark.slow
@pytest.mark.parametrize("name", file_cases.QUICK)
def test_a_run_with_a_damaged_file_ends_as_promised_or_goes_on(faulty_runs, name):
    case = file_cases.CASES[name]
    outcome = faulty_runs.run_damaged(case)
    assert faults_of(outcome, case.expected) == [], outcome.output
