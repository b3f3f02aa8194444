"""Files of a run whose reward functions and service say when they work, so that a fault can meet them at that time."""

import json
import socket
import subprocess
import sys
import time
from pathlib import Path

from tests.conftest import write_tiny

SCORER = '''
import os
import time
from pathlib import Path

def judged(prompt, response):
    """Return a score that depends on the response alone; a file shows which process works."""
    folder = Path(__file__).parent
    (folder / "scorer_pid").write_text(str(os.getpid()))
    mark = folder / f"scoring_{os.getpid()}"
    mark.touch()
    time.sleep(0.1)
    mark.unlink()
    return float(len(response) % 3)
'''

SERVICE = """
import json
import sys
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.0"

    def do_POST(self):
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
        mark = Path(__file__).parent / "serving"
        mark.touch()
        time.sleep(0.3)
        mark.unlink(missing_ok=True)
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": [len(text) % 5 for text in texts]}).encode())

    def log_message(self, *_):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


class Site:
    """A folder with tiny models, data, a reward file, and a reward service that can be started again."""

    def __init__(self, folder: Path) -> None:
        """Write the files, and start the service."""
        self.folder = folder
        write_tiny(folder)
        (folder / "scorer.py").write_text(SCORER)
        (folder / "service.py").write_text(SERVICE)
        with socket.create_server(("127.0.0.1", 0)) as free:
            self._port = free.getsockname()[1]
        self._service: subprocess.Popen[bytes] | None = None
        self.start_service()

    @property
    def url(self) -> str:
        """URL of the service."""
        return f"http://127.0.0.1:{self._port}/rewards"

    @property
    def service_pid(self) -> int:
        """Process id of the service."""
        assert self._service is not None
        return self._service.pid

    def start_service(self) -> None:
        """Start the service where it does not run, and remove the marks of processes that were killed at work."""
        for mark in (*self.folder.glob("scoring_*"), *self.folder.glob("serving")):
            mark.unlink()
        self.close()
        command = [sys.executable, str(self.folder / "service.py"), str(self._port)]
        self._service = subprocess.Popen(command, stderr=subprocess.DEVNULL)  # it reports clients that went away
        deadline = time.monotonic() + 30
        while True:
            try:
                socket.create_connection(("127.0.0.1", self._port)).close()
                return
            except ConnectionRefusedError:
                assert time.monotonic() < deadline, "the reward service does not start"
                time.sleep(0.02)

    def scoring_pids(self) -> list[int]:
        """Return the ids of the scorers that work at the moment."""
        return [int(mark.name.partition("_")[2]) for mark in self.folder.glob("scoring_*")]

    def last_scorer(self) -> int:
        """Return the process that worked on the last response."""
        return int((self.folder / "scorer_pid").read_text())

    def is_serving(self) -> bool:
        """Return whether the service works at the moment."""
        return (self.folder / "serving").exists()

    def close(self) -> None:
        """End the service."""
        if self._service is not None:
            self._service.kill()
            self._service.wait()


def heartbeat(run_dir: Path, rank: int = 0) -> dict:
    """Return the content of the heartbeat of a rank; {} before there is one."""
    name = f"heartbeat_rank{rank}.json" if rank else "heartbeat.json"
    try:
        return json.loads((run_dir / name).read_text())
    except FileNotFoundError:
        return {}
