"""A hub of data sets on the loopback interface, for the real client in `datasets`."""

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class Hub(ThreadingHTTPServer):
    """Serves the files of data sets, without a history."""

    def __init__(self, files: Mapping[str, Mapping[str, bytes]]) -> None:
        """Take name of a data set -> name of a file -> content."""
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files = files
        self.paths: list[str] = []
        """Path of every request."""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Hub

    def do_GET(self) -> None:
        path = self.path.split("?")[0]
        self.server.paths.append(path)
        for name, files in self.server.files.items():
            api, content = f"/api/datasets/{name}", f"/datasets/{name}/resolve/"
            if path == api or path.startswith(f"{api}/revision/"):
                siblings = [{"rfilename": file} for file in files]
                return self._send({"id": name, "sha": COMMIT, "siblings": siblings})
            if path.startswith(f"{api}/tree/"):
                return self._send([_entry(file, content) for file, content in files.items()])
            if path.startswith(content):
                file = path.removeprefix(content).split("/", 1)[1]
                return self._send(files[file]) if file in files else self._refuse("EntryNotFound")
        return self._refuse("RepoNotFound")

    do_HEAD = do_GET  # noqa: N815

    def _send(self, content: bytes | Any) -> None:
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(200)
        self._end_headers({"Content-Length": str(len(data)), "ETag": f'"{hashlib.sha1(data).hexdigest()}"'})
        if self.command == "GET":
            self.wfile.write(data)

    def _refuse(self, code: str) -> None:
        self.send_response(404)
        self._end_headers({"Content-Length": "0", "X-Error-Code": code})

    def _end_headers(self, headers: Mapping[str, str]) -> None:
        for name, value in {**headers, "X-Repo-Commit": COMMIT}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def _entry(file: str, content: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(content), "oid": hashlib.sha1(content).hexdigest()}


@contextmanager
def running_hub(files: Mapping[str, Mapping[str, bytes]]) -> Iterator[Hub]:
    """Serve the files in a thread."""
    hub = Hub(files)
    thread = threading.Thread(target=hub.serve_forever)
    thread.start()
    try:
        yield hub
    finally:
        hub.shutdown()
        hub.server_close()
        thread.join()
