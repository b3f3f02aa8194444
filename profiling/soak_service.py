"""A reward service for soak.py on the port of the first argument: the share of letters in each response."""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Handler(BaseHTTPRequestHandler):
    """Answers requests in the protocol of OpenRLHF's remote reward models."""

    def do_POST(self) -> None:
        """Send one reward per response."""
        texts = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["responses"]
        rewards = [sum(c.isalpha() for c in text) / max(1, len(text)) for text in texts]
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"rewards": rewards}).encode())

    def log_message(self, *_: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
