"""Damages of the files of a finished run that is then continued, and what each must lead to; written by hand."""

from dataclasses import dataclass
from pathlib import Path

from tests.faults.cases import Ends, GoesOn

NUM_STEPS = 3
"""Steps of the finished run; the run that continues has one more."""
NEWEST, OLDER = f"checkpoints/step_{NUM_STEPS:06d}", f"checkpoints/step_{NUM_STEPS - 1:06d}"
DAMAGES = ("truncated", "one bit flipped", "missing")


@dataclass(frozen=True, kw_only=True)
class FileCase:
    """A file, what happens to it, and how the run that continues must end."""

    subject: str
    """Relative to the run's folder; the only match of a pattern."""
    fault: str
    """One of DAMAGES."""
    expected: Ends | GoesOn

    @property
    def name(self) -> str:
        """Name that no other case has."""
        return f"files: {self.subject} {self.fault}"

    @property
    def row(self) -> dict[str, str]:
        """Columns of the CSV that describe the case."""
        return {"run": "one rank", "subject": self.subject, "phase": "continue", "fault": self.fault, "settings": ""}

    def apply(self, run_dir: Path) -> None:
        """Damage the file."""
        (path,) = run_dir.glob(self.subject)
        content = path.read_bytes()
        if self.fault == "missing":
            path.unlink()
        elif self.fault == "truncated":
            path.write_bytes(content[: len(content) // 2])
        else:
            middle = len(content) // 2
            path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


def _goes_back(name: str) -> GoesOn:
    """Expect that the newest checkpoint is not used, with a warning that names its damaged file."""
    return GoesOn(warning=rf"step_000003: {name}.*\. The run goes on from step 2; 1 steps are lost")


def _cases() -> list[FileCase]:
    found = []
    for name in ("actor/part_00000.safetensors", "critic/part_00000.safetensors", "state.json", "manifest.json"):
        for damage in DAMAGES:
            found.append(FileCase(subject=f"{NEWEST}/{name}", fault=damage, expected=_goes_back(name)))
            found.append(FileCase(subject=f"{OLDER}/{name}", fault=damage, expected=GoesOn()))
    for damage in DAMAGES:
        path = "random_state/part_00000.safetensors"
        found.append(FileCase(subject=f"{NEWEST}/{path}", fault=damage, expected=_goes_back(path)))
    # The pointer is not needed to find the newest whole checkpoint.
    for damage in DAMAGES:
        warning = "" if damage == "missing" else "the file latest "
        found.append(FileCase(subject="latest", fault=damage, expected=GoesOn(warning=warning)))
    # Rows of metrics.jsonl cannot be made again; the damaged file is kept.
    found.append(FileCase(subject="metrics.jsonl", fault="truncated", expected=GoesOn(is_same=False)))
    found.append(FileCase(subject="metrics.jsonl", fault="missing", expected=GoesOn(is_same=False)))
    # The settings of the earlier start are in every checkpoint, too.
    for name in ("config.yaml", "run.json", "history.jsonl", "phase_log/key"):
        found += [FileCase(subject=name, fault=damage, expected=GoesOn()) for damage in DAMAGES]
    # A run that continues reads none of these.
    for name in ("environment.json", "summary.json", "timeline.json", "heartbeat.json", "log.txt", "lock"):
        found += [FileCase(subject=name, fault=damage, expected=GoesOn()) for damage in DAMAGES]
    for name in ("export/model.safetensors", "export/config.json", "tensorboard/events*"):
        found += [FileCase(subject=name, fault=damage, expected=GoesOn()) for damage in DAMAGES]
    return found


CASES = {case.name: case for case in _cases()}
"""All cases by their names."""
QUICK = (
    f"files: {NEWEST}/actor/part_00000.safetensors one bit flipped",
    f"files: {NEWEST}/manifest.json truncated",
    "files: latest truncated",
    "files: run.json missing",
)
"""Names of the cases that `make test-slow` runs."""
