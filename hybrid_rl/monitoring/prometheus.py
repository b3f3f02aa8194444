"""The metrics of the last step at a port of the loopback interface, in the text format of Prometheus."""

import re
from collections.abc import Mapping

from prometheus_client import CollectorRegistry, Gauge, start_http_server

from hybrid_rl.config import ConfigError

PREFIX = "hybrid_rl_"
"""Start of the name of every metric."""


class MetricsServer:
    """Answers GET /metrics until `close`."""

    def __init__(self, port: int) -> None:
        """Listen on 127.0.0.1.

        Raises:
            ConfigError: the port cannot be opened.
        """
        self._registry = CollectorRegistry()
        self._gauges: dict[str, Gauge] = {}
        self._phase = Gauge(f"{PREFIX}phase", "1 for the current phase", ["phase"], registry=self._registry)
        try:
            self._server, self._thread = start_http_server(port, addr="127.0.0.1", registry=self._registry)
        except OSError as error:
            raise ConfigError(
                f"run.prometheus_port = {port}: 127.0.0.1 cannot listen on it ({error.strerror}); give a port that no "
                "other program uses, or null"
            ) from error

    def show_phase(self, phase: str, step: int) -> None:
        """Show the current step and phase."""
        self._phase.clear()
        self._phase.labels(phase).set(1)
        self._set("current_step", step)

    def show_step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Show the row of a finished step; a metric that a step lacks keeps its value."""
        for name, value in {"step": step, **metrics}.items():
            self._set(name, value)

    def close(self) -> None:
        """Close the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def _set(self, name: str, value: float) -> None:
        key = PREFIX + re.sub(r"\W", "_", name, flags=re.ASCII)
        if key not in self._gauges:
            self._gauges[key] = Gauge(key, f"{name} of metrics.jsonl", registry=self._registry)
        self._gauges[key].set(value)
