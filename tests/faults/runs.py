"""Runs a command, lets one of its processes meet a fault, and reports how it ended."""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from tests.faults import processes
from tests.faults.cases import STALL_TIMEOUT_S, Case, GoesOn, Outcome
from tests.faults.file_cases import NUM_STEPS, FileCase
from tests.faults.processes import BUSY, STARTED_BY_RANK_0, STEP, SUBJECTS, LiveRun, MissedError
from tests.faults.results import differences, results
from tests.faults.services import Site
from tests.faults.traces import Traces
from tests.programs import PATHS, ForkServer, ProgramResult

NUM_TRIES = 5
"""How often a fault that came after its moment is tried again."""
LIMIT_S = 600.0
"""Time after which a run is killed; no run that ends as promised takes so long."""
RANK_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

KINDS: dict[str, tuple[dict[str, Any], list[str]]] = {
    "one rank": ({}, []),
    "two ranks": ({}, ["--num_processes", "2"]),
    "vllm": ({"rollout.engine": "vllm"}, []),
    "vllm, evaluations": ({"rollout.engine": "vllm", "run.eval_every_steps": 1}, []),
    "vllm on two ranks": (
        {"rollout.engine": "vllm", "rollout.tensor_parallel_size": 2},
        ["--num_processes", "2"],
    ),
}
"""Kind of run -> settings that it changes, and further arguments of the command."""


def settings_of(site: Site, kind: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a run of PPO with four models, a reward file, a reward service and evaluations."""
    flat = {
        "run.name": "run",
        "run.num_steps": 3,
        "run.eval_every_steps": 2,
        "run.stall_timeout_s": STALL_TIMEOUT_S,
        "models.actor": str(site.folder / "policy"),
        "models.reward": str(site.folder / "reward"),
        "prompts.path": str(site.folder / "prompts.jsonl"),
        "prompts.eval_path": str(site.folder / "heldout.jsonl"),
        "prompts.max_prompt_tokens": 8,
        "rollout.engine": "hf",
        "rollout.rollout_batch_size": 4,
        "rollout.group_size": 2,
        "rollout.max_response_tokens": 48,
        "rollout.kv_cache_memory_bytes": 64 << 20,
        "rollout.max_num_seqs": 16,
        "reward.functions": [f"{site.folder / 'scorer.py'}:judged"],
        "reward.timeout_s": 4.0,
        "reward.num_workers": 1,
        "reward.remote_urls": [site.url],
        "reward.remote_timeout_s": 4.0,
        "reward.remote_retries": 1,
        "run.eval_function": "exact_match",
        "advantage.kl_coef": 0.05,
        "update.mini_batch_size": 4,
        "update.micro_batch_tokens": 64,
        "update.actor.lr": 1e-3,
        "update.critic.lr": 1e-3,
        "sync.bucket_bytes": 16 << 10,
        "checkpoint.every_steps": 1,
        "checkpoint.phase_log": True,
    }
    nested: dict[str, Any] = {}
    for name, value in {**flat, **KINDS[kind][0], **changes}.items():
        *sections, field = name.split(".")
        section = nested
        for part in sections:
            section = section.setdefault(part, {})
        section[field] = value
    return nested


class FaultyRuns:
    """Runs cases one after the other, on one fork server and one site."""

    def __init__(self, folder: Path, server: ForkServer) -> None:
        """Make a site in a folder."""
        self._folder, self._server = folder, server
        self._site = Site(folder)
        self._expected: dict[tuple[str, int], dict[str, Any]] = {}
        self._finished: dict[tuple[str, int], Path] = {}
        self._num_runs = 0

    def close(self) -> None:
        """End the reward service."""
        self._site.close()

    def run(self, case: Case) -> Outcome:
        """Run a case, again where its moment was missed.

        Raises:
            MissedError: the moment was missed in every try.
        """
        expected = self.undisturbed(case.run)
        for left in reversed(range(NUM_TRIES)):
            folder = self._new_folder()
            try:
                return self._run_once(case, folder, expected)
            except MissedError:
                if not left:
                    raise
            finally:
                shutil.rmtree(folder)
        raise AssertionError("unreachable")

    def run_damaged(self, case: FileCase) -> Outcome:
        """Continue a copy of a finished run in which a file is damaged, for one more step."""
        expected = self.undisturbed("one rank", NUM_STEPS + 1)
        self.undisturbed("one rank", NUM_STEPS)
        folder = self._new_folder()
        shutil.copytree(self._finished["one rank", NUM_STEPS], folder / "run")
        case.apply(folder / "run")
        started = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="faults") as temporary:
            self._start("one rank", folder, {"run.num_steps": NUM_STEPS + 1}, Path(temporary))
            traces = Traces(self._server.program(), Path(temporary))
            ended = self._server.wait(LIMIT_S)
            left = traces.leftovers()
            traces.close()
        is_same = isinstance(case.expected, GoesOn) and case.expected.is_same
        found = differences(folder / "run", expected) if is_same else []
        shutil.rmtree(folder)
        return Outcome(
            seconds=time.monotonic() - started,
            code=ended.code,
            output=ended.output,
            leftovers=left,
            open_ports=traces.open_ports(),
            differences=found,
        )

    def undisturbed(self, kind: str, num_steps: int = 3) -> dict[str, Any]:
        """Return the results of a run without a fault."""
        if (kind, num_steps) not in self._expected:
            folder = self._new_folder()
            ended = self._complete(kind, folder, {"run.num_steps": num_steps})
            assert ended.code == 0, ended.output
            self._finished[kind, num_steps] = folder / "run"
            self._expected[kind, num_steps] = results(folder / "run")
        return self._expected[kind, num_steps]

    def _run_once(self, case: Case, folder: Path, expected: dict[str, Any]) -> Outcome:
        self._site.start_service()
        with tempfile.TemporaryDirectory(prefix="faults") as temporary:
            self._start(case.run, folder, case.settings, Path(temporary))
            run = LiveRun(folder / "run", self._server.program(), self._site)
            traces = Traces(run.program, Path(temporary))
            try:
                self._inject(case, run)
                started = time.monotonic()
                ended = self._server.wait(LIMIT_S)
                seconds = time.monotonic() - started
                self._let_service_go_on()
                left = traces.leftovers()
                found = self._find_differences(case, folder, expected)
            except BaseException:
                with suppress(ProcessLookupError):
                    os.kill(run.program.pid, signal.SIGKILL)
                print(self._server.wait(LIMIT_S).output[-3000:])
                raise
            finally:
                traces.close()
        return Outcome(
            seconds=seconds,
            code=ended.code,
            output=ended.output,
            leftovers=left,
            open_ports=traces.open_ports(),
            differences=found,
        )

    def _find_differences(self, case: Case, folder: Path, expected: dict[str, Any]) -> list[str]:
        """Return what differs from an undisturbed run; a run that has ended is first continued."""
        if isinstance(case.expected, GoesOn):
            return differences(folder / "run", expected) if case.expected.is_same else []
        self._site.start_service()
        ended = self._complete(case.run, folder, case.settings)
        failed = [] if ended.code == 0 else [f"to continue it ends with {ended.code}: {ended.output[-300:]!r}"]
        return failed or differences(folder / "run", expected)

    def _inject(self, case: Case, run: LiveRun) -> None:
        if case.subject in BUSY:
            run.wait_for(lambda: run.place() == (STEP, case.phase), f"phase {case.phase}")
            processes.send(case.fault, SUBJECTS[case.subject](run))
            return
        if case.phase == "start" and case.subject in STARTED_BY_RANK_0:
            SUBJECTS[case.subject](run)
        with run.held_in(case.phase):
            pid = SUBJECTS[case.subject](run)
            is_held = pid == run.rank_pid()
            if not is_held:
                processes.send(case.fault, pid)
            elif case.fault.startswith("SIGSTOP for"):
                time.sleep(2.0)
            else:
                (number, pause_s), *others = processes.FAULTS[case.fault]
                os.kill(pid, number)
        if is_held and case.fault.startswith("two"):
            time.sleep(pause_s)
            os.kill(pid, others[0][0])

    def _let_service_go_on(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self._site.service_pid, signal.SIGCONT)

    def _complete(self, kind: str, folder: Path, changes: Mapping[str, Any]) -> ProgramResult:
        """Run the command to its end, without a fault."""
        with tempfile.TemporaryDirectory(prefix="faults") as temporary:
            self._start(kind, folder, changes, Path(temporary))
            return self._server.wait(LIMIT_S)

    def _start(self, kind: str, folder: Path, changes: Mapping[str, Any], temporary: Path) -> None:
        settings = settings_of(self._site, kind, {"run.dir": str(folder), **changes})
        (folder / "settings.yaml").write_text(yaml.safe_dump(settings))
        inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
        environment = {**inherited, **PATHS, "OMP_NUM_THREADS": "1", "TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1"}
        command = ["launch/colocated.py", "--config", str(folder / "settings.yaml"), *KINDS[kind][1]]
        self._server.start(*command, environment=environment)

    def _new_folder(self) -> Path:
        self._num_runs += 1
        folder = self._folder / f"run_{self._num_runs}"
        folder.mkdir()
        return folder
