"""The log file of a run: its phases, steps and warnings with their times, and the error that ends it."""

import errno
import logging
import os
import sys
import time
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from hybrid_rl.config import ConfigError
from hybrid_rl.errors import RunError
from hybrid_rl.printable import printable

MAX_BYTES = 10 << 20
"""Size at which a new file begins."""
NUM_OLD = 3
"""Number of full files that stay: log.txt.1 is the newest."""
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Error numbers of a disk, a quota or a file that is full."""
PACKAGE = "hybrid_rl"
"""Logger whose messages the file has."""


class LogFile(RotatingFileHandler):
    """Appends the messages of the package to a file that only its user can read."""

    def __init__(self, path: Path, *, max_bytes: int = MAX_BYTES) -> None:
        """Open the file, whose folder exists; messages below warnings go to the file alone."""
        super().__init__(path, maxBytes=max_bytes, backupCount=NUM_OLD, encoding="utf-8", errors="backslashreplace")
        formatter = logging.Formatter("%(asctime)s %(levelname)s %(message)s", "%Y-%m-%dT%H:%M:%S%z")
        formatter.converter = time.localtime
        self.setFormatter(formatter)
        logger = logging.getLogger(PACKAGE)
        self._former_level = logger.level
        self._console = None if logger.hasHandlers() else logging.lastResort
        self._is_writable = True
        for handler in (self, self._console):
            if handler is not None:
                logger.addHandler(handler)
        logger.setLevel(logging.INFO)

    def _open(self) -> Any:
        def opener(path: str, flags: int) -> int:
            return os.open(path, flags, 0o600)

        return open(self.baseFilename, self.mode, encoding=self.encoding, errors=self.errors, opener=opener)

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of a message, on one line except for a trace, without control characters."""
        return printable(super().format(record))

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Say once that the file cannot be written, unless the disk is full, which ends the run with another file."""
        error = sys.exception()
        if self._is_writable and not (isinstance(error, OSError) and error.errno in FULL):
            print(f"warning: {self.baseFilename} cannot be written: {error}", file=sys.stderr)
            self._is_writable = False

    def end(self, error: BaseException | None) -> None:
        """Write how the run ends to the file alone, with the trace of an unforeseen error, and leave the logger.

        `close` does not leave it: a library that configures its own logging closes the handlers of all others, and the
        next message opens the file again.
        """
        level = logging.INFO if error is None else logging.ERROR
        is_described = error is None or isinstance(error, (RunError, ConfigError, SystemExit))
        trace = None if is_described or error is None else (type(error), error, error.__traceback__)
        text = "the run ends" if error is None else f"the run ends: {type(error).__name__}: {error}"
        self.handle(logging.LogRecord(PACKAGE, level, __file__, 0, text, None, trace))
        logger = logging.getLogger(PACKAGE)
        for handler in (self, self._console):
            if handler is not None:
                logger.removeHandler(handler)
        logger.setLevel(self._former_level)
        self.close()
