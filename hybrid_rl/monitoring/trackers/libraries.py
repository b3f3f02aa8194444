"""The libraries of run.trackers that run in processes of their own. Imports neither torch nor one of them."""

from collections.abc import Iterable, Mapping
from importlib.metadata import PackageNotFoundError, version
from types import MappingProxyType

from packaging.version import Version

from hybrid_rl.config import Findings, check

REQUIRED: Mapping[str, tuple[tuple[str, str], ...]] = MappingProxyType(
    {
        "wandb": (("wandb", "0.21"),),
        "trackio": (("trackio", "0.20"),),
        "mlflow": (("mlflow-skinny", "3.5"),),
    }
)
"""Name in run.trackers -> packages that it needs, each with its lowest version; mlflow itself needs mlflow-skinny."""


def check_trackers(names: Iterable[str]) -> None:
    """Check that the libraries of run.trackers are installed; none is imported.

    Raises:
        ConfigError: one sentence for each that is missing or too old.
    """
    findings = Findings()
    for name in names:
        findings.run(lambda name=name: _check_tracker(name))  # type: ignore[misc]
    findings.raise_any()


def _check_tracker(name: str) -> None:
    for package, lowest in REQUIRED.get(name, ()):
        try:
            found = version(package)
        except PackageNotFoundError:
            found = None
        remedy = f"run `pip install 'hybrid_rl[{name}]'`, or take {name} out of the list"
        check(found is not None, f"run.trackers: {name} needs the package {package}, which is not installed: {remedy}")
        check(
            found is None or Version(found) >= Version(lowest),
            f"run.trackers: {name} needs {package} {lowest} or newer, and {found} is installed: {remedy}",
        )
