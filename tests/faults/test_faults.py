"""A run whose process is killed, stopped or asked to end does so as promised, or goes on."""

import pytest

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
