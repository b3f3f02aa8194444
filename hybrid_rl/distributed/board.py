"""Where each rank writes what it does and the others read it: a folder within one node, a store across nodes."""

import contextlib
import json
import os
import shutil
import socket
import threading
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

import torch.distributed as dist

from hybrid_rl.printable import hide_passwords, printable
from hybrid_rl.processes import machine_id, read_state

INTERVAL_S = 1.0
"""Seconds between two notes of a rank."""


@dataclass(frozen=True, kw_only=True)
class Note:
    """What a rank writes about itself."""

    pid: int
    host: str
    machine: str
    """See processes.machine_id."""
    started: int
    """See ProcessState.started."""
    count: int
    """Number of notes that it has written; 0 in the note of a launcher about a rank that it has started."""
    work: str
    """What it does, such as `rollout of step 3`."""


def own_note(pid: int, *, count: int, work: str) -> Note:
    """Return a note about a process of this machine."""
    state = read_state(pid)
    started = state.started if state else 0
    return Note(pid=pid, host=socket.gethostname(), machine=machine_id(), started=started, count=count, work=work)


def parse_note(text: str) -> Note | None:
    """Return the note in a text; None if it holds none."""
    try:
        return Note(**json.loads(text))
    except (ValueError, TypeError):
        return None


def runs(note: Note) -> bool:
    """Return whether the process of a note of this machine runs."""
    state = read_state(note.pid)
    return state is not None and state.started == note.started and not state.has_ended


def print_errors(messages: Sequence[str]) -> None:
    """Print to stderr without Python's buffer, which another thread may hold."""
    with contextlib.suppress(OSError):  # the exit code says the same where nobody reads the output
        os.write(2, "".join(f"error: {printable(hide_passwords(message))}\n" for message in messages).encode())


class Board(Protocol):
    """Notes of all ranks. No method waits for another process."""

    def write(self, rank: int, note: Note) -> None:
        """Replace the note of a rank."""
        ...

    def read(self, rank: int) -> Note | None:
        """Return the last note of a rank; None if there is none."""
        ...

    def end_of(self, rank: int) -> str | None:
        """Return how the process of a rank has ended, in words after its subject; None if the board does not know."""
        ...

    def failure(self) -> str | None:
        """Return why the board cannot be reached, in a clause; None if it can."""
        ...

    def report(self, rank: int, messages: Sequence[str], code: int) -> None:
        """Report the error that ends a rank, from any thread.

        Args:
            rank: this rank.
            messages: a sentence for each finding.
            code: exit code of the rank.
        """
        ...


class FolderBoard:
    """Notes in the private folder of a launcher, which writes how ranks have ended and prints their errors.

    The launcher is the parent of all ranks.
    """

    def __init__(self, folder: Path) -> None:
        """Use a folder that exists."""
        self._folder = folder
        self._parent = os.getppid()

    def write(self, rank: int, note: Note) -> None:
        """See Board."""
        self._replace(f"rank{rank}.json", json.dumps(asdict(note)))

    def read(self, rank: int) -> Note | None:
        """See Board."""
        return parse_note(self._read(f"rank{rank}.json"))

    def end_of(self, rank: int) -> str | None:
        """See Board."""
        return self._read(f"end{rank}") or None

    def write_end(self, rank: int, end: str) -> None:
        """Let `end_of` return how a rank has ended."""
        self._replace(f"end{rank}", end)

    def failure(self) -> str | None:
        """See Board."""
        return None if os.getppid() == self._parent else f"the launcher (pid {self._parent}) has ended"

    def report(self, rank: int, messages: Sequence[str], code: int) -> None:
        """Keep the error for the launcher; without one, rank 0 prints it, and the folder is deleted."""
        if self.failure():
            if rank == 0:
                print_errors(messages)
            self.remove_abandoned()
            return
        self._replace(f"error{rank}.json", json.dumps({"messages": list(messages), "code": code}))

    def remove_abandoned(self) -> None:
        """Delete the folder if the launcher has ended, which would do it otherwise."""
        if self.failure():
            shutil.rmtree(self._folder, ignore_errors=True)

    def write_launcher(self) -> None:
        """Write the note of this process, the launcher."""
        self._replace("launcher.json", json.dumps(asdict(own_note(os.getpid(), count=0, work="wait for the ranks"))))

    def is_dead(self) -> bool:
        """Return whether launcher and ranks are known to have ended; not where the folder is of another machine."""
        names = ["launcher.json", *(path.name for path in self._folder.glob("rank*.json"))]
        notes = [parse_note(self._read(name)) for name in names]
        return all(note and note.machine == machine_id() and not runs(note) for note in notes)

    def reported(self, rank: int) -> tuple[list[str], int] | None:
        """Return messages and exit code of the error that a rank has reported; None if there is none."""
        text = self._read(f"error{rank}.json")
        if not text:
            return None
        content = json.loads(text)
        return content["messages"], content["code"]

    def _read(self, name: str) -> str:
        try:
            return (self._folder / name).read_text(errors="replace")
        except OSError:
            return ""

    def _replace(self, name: str, text: str) -> None:
        path = self._folder / f"{name}.{threading.get_ident()}"
        try:
            path.write_text(text)
            os.replace(path, self._folder / name)
        except FileNotFoundError:  # the launcher has ended, which the watch notices
            pass


class StoreBoard:
    """Notes in a store that another process may serve: a thread of its own waits for the answers."""

    def __init__(self, store: dist.Store, size: int, *, address: str) -> None:
        """Start to exchange notes.

        Args:
            store: a connection that nothing else uses, because a wait in one thread blocks the others.
            size: number of ranks.
            address: of the store, for messages.
        """
        self._store = store
        self._address = address
        self._own: dict[str, str] = {}
        self._texts: dict[str, str] = {}
        self._names = [f"hybrid_rl/rank{rank}" for rank in range(size)]
        self._failure: str | None = None
        threading.Thread(target=self._exchange, name="rank_notes", daemon=True).start()

    def write(self, rank: int, note: Note) -> None:
        """See Board."""
        self._own[self._names[rank]] = json.dumps(asdict(note))

    def read(self, rank: int) -> Note | None:
        """See Board."""
        return parse_note(self._texts.get(self._names[rank], ""))

    def end_of(self, rank: int) -> str | None:
        """See Board."""
        return None

    def failure(self) -> str | None:
        """See Board."""
        return self._failure

    def report(self, rank: int, messages: Sequence[str], code: int) -> None:
        """Print the error."""
        print_errors(messages)

    def _exchange(self) -> None:
        pause = threading.Event()
        try:
            while not pause.wait(INTERVAL_S):
                for name, text in list(self._own.items()):
                    self._store.set(name, text)
                known = [name for name in self._names if name in self._texts or self._store.check([name])]
                if known:
                    values = self._store.multi_get(known)
                    texts = [value.decode(errors="replace") for value in values]
                    self._texts |= dict(zip(known, texts, strict=True))
        except RuntimeError as error:
            self._failure = f"the store of the ranks at {self._address} is closed ({str(error).splitlines()[0]})"
