"""Watches what the processes of a run open, and counts what is left of it after the end."""

import itertools
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil

from hybrid_rl.processes import families

PATIENCE_S = 15.0
"""Time after the end of a run in which its processes may still end and remove their files."""
_INTERVAL_S = 0.1
_FILES_EVERY = 5
"""Number of intervals between two looks at open files and ports, which take longer."""


class Traces:
    """The processes of a run, the files of /dev/shm that they use and the addresses at which they listen.

    A thread looks for them until `close`, so that a process whose parent ends is still known.
    """

    def __init__(self, program: psutil.Process, temporary: Path) -> None:
        """Start to watch a program and all that it starts; `temporary` is its TMPDIR."""
        self._temporary = temporary
        self._processes = {program}
        self._shared: set[Path] = set()
        self._addresses: set[str] = set()
        self._is_closed = False
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def open_ports(self) -> list[str]:
        """Return the addresses, other than loopback, at which a process listened."""
        return sorted(each for each in self._addresses if not each.startswith(("127.", "::1 ", "::ffff:127.")))

    def leftovers(self) -> list[str]:
        """Return what is left when PATIENCE_S are over, or as soon as nothing is."""
        deadline = time.monotonic() + PATIENCE_S
        while (left := [*self._left()]) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def close(self) -> None:
        """End the thread, and kill and remove what is left."""
        self._is_closed = True
        self._thread.join()
        for process in self._processes:
            with suppress(psutil.Error):
                process.kill()
        for path in self._shared:
            path.unlink(missing_ok=True)

    def _watch(self) -> None:
        for look in itertools.count():
            if self._is_closed:
                return
            self._look_at_processes()
            if look % _FILES_EVERY == 0:
                self._look_at_files()
            time.sleep(_INTERVAL_S)

    def _look_at_processes(self) -> None:
        known = {process.pid for process in self._processes if process.is_running()}
        for pid in {state.pid for family in families([*known]) for state in family} - known:
            with suppress(psutil.Error):
                self._processes.add(psutil.Process(pid))

    def _look_at_files(self) -> None:
        for process in list(self._processes):
            with suppress(psutil.Error, OSError):
                self._shared.update(_shared_memory(process.pid))
                for connection in process.net_connections(kind="inet"):
                    if connection.status == psutil.CONN_LISTEN:
                        self._addresses.add(f"{connection.laddr.ip} port of {process.name()}")

    def _left(self) -> Iterator[str]:
        for process in list(self._processes):
            with suppress(psutil.Error):
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield f"the process {process.pid} {' '.join(process.cmdline())[:80]}"
                    for connection in process.net_connections(kind="inet"):
                        if connection.status == psutil.CONN_LISTEN:
                            yield f"port {connection.laddr.port}"
        yield from (str(path) for path in self._shared if path.exists())
        yield from (str(path) for path in self._temporary.iterdir())


def _shared_memory(pid: int) -> Iterator[Path]:
    """Yield the files of /dev/shm that a process has mapped or opened, and that have a name."""
    paths = set(re.findall(r"/dev/shm/.*", Path(f"/proc/{pid}/maps").read_text()))
    for entry in os.scandir(f"/proc/{pid}/fd"):
        with suppress(OSError):
            paths.add(os.readlink(entry.path))
    yield from (Path(path) for path in paths if path.startswith("/dev/shm/") and not path.endswith(" (deleted)"))
