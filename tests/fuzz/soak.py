"""Run many fuzz cases of every subject, and print how many fail, with the numbers that reproduce them.

python -m tests.fuzz.soak --cases 50000 --seed 1 --processes 2
python -m tests.fuzz.soak --subject rows --case 1/4711        one case again, with its traceback
"""

import argparse
import logging
import multiprocessing
import os
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "kernels")]
os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}

from tests.fuzz.cases import Subject, failures, run_case  # noqa: E402
from tests.fuzz.subjects import SUBJECTS  # noqa: E402

logging.disable(logging.WARNING)  # of cases, of which many are damaged on purpose

CHUNK = 25
SHOWN_FAILURES = 20
Result = tuple[str, int, float, list[tuple[str, str, str]]]
"""Subject, number of cases, seconds, and for each failure the case, the error in one line and its traceback."""


def shares(num_cases: int) -> dict[str, int]:
    """Return the number of cases of each subject, in the proportions of the tests and at least num_cases together."""
    total = sum(subject.num_cases for subject in SUBJECTS.values())
    return {name: -(-num_cases * subject.num_cases // total) for name, subject in SUBJECTS.items()}


def run_chunk(work: tuple[str, int, int, int]) -> Result:
    """Run consecutive cases of a subject in a worker process."""
    name, seed, first, number = work
    started = time.monotonic()
    found = [
        (failure.case, f"{type(failure.error).__name__}: {str(failure.error)[:400]}", str(failure))
        for failure in failures(SUBJECTS[name], seed=seed, first=first, num_cases=number)
    ]
    return name, number, time.monotonic() - started, found


def soak(wanted: dict[str, int], *, seed: int, processes: int) -> list[Result]:
    """Run the cases in worker processes, and print failures as they are found."""
    chunks = [
        (name, seed, first, min(CHUNK, number - first))
        for name, number in wanted.items()
        for first in range(0, number, CHUNK)
    ]
    context = multiprocessing.get_context("spawn")
    results = []
    with context.Pool(processes) as pool:
        for result in pool.imap_unordered(run_chunk, chunks):
            results.append(result)
            for case, line, _ in result[3]:
                print(f"FAILED {result[0]} {case}: {line}", flush=True)
    return results


def report(results: list[Result]) -> bool:
    """Print a CSV row per subject, and the tracebacks of some failures; return whether there are failures."""
    print("subject,cases,failures,seconds")
    for name in SUBJECTS:
        own = [result for result in results if result[0] == name]
        if own:
            print(f"{name},{sum(r[1] for r in own)},{sum(len(r[3]) for r in own)},{sum(r[2] for r in own):.0f}")
    found = [failure for result in results for failure in result[3]]
    print(f"total,{sum(r[1] for r in results)},{len(found)},{sum(r[2] for r in results):.0f}")
    for _, _, trace in found[:SHOWN_FAILURES]:
        print(trace)
    return bool(found)


def main() -> None:
    """Exit with code 1 if a case fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", type=int, default=50_000, help="cases of all subjects together")
    parser.add_argument("--seed", type=int, default=1, help="another seed gives other cases; the tests take 0")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--subject", choices=sorted(SUBJECTS), help="this subject alone")
    parser.add_argument("--case", help="run one case of --subject, given as seed/number")
    arguments = parser.parse_args()
    if arguments.case:
        subject: Subject = SUBJECTS[arguments.subject]
        failure = run_case(subject, arguments.case)
        print(failure or "passes")
        sys.exit(failure is not None)
    wanted = {arguments.subject: arguments.cases} if arguments.subject else shares(arguments.cases)
    sys.exit(report(soak(wanted, seed=arguments.seed, processes=arguments.processes)))


if __name__ == "__main__":
    main()
