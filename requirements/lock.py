"""Write a lock file from pip's own resolver: `python requirements/lock.py cpu` (or gpu), with the Python it is for.

The lock is installed with `--no-deps`. Packages in UNWANTED are asked for by vLLM's metadata but not needed to serve
text; next to torch+cpu their PyPI builds fail to import, which breaks transformers' probing of them.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

UNWANTED = {"torchvision", "torchaudio", "torchcodec"}


def resolve(requirements: pathlib.Path) -> list[str]:
    """Return `name==version` for everything the requirements need, as pip resolves it for this interpreter."""
    with tempfile.NamedTemporaryFile(suffix=".json") as report:
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--quiet", "--quiet", "--ignore-installed"]
        subprocess.run([*command, "--report", report.name, "-r", str(requirements)], check=True)
        items = [item["metadata"] for item in json.load(report)["install"]]
    return sorted((f"{m['name']}=={m['version']}" for m in items if m["name"].lower() not in UNWANTED), key=str.lower)


def main() -> None:
    """Resolve `<name>.in` and write `<name>.txt` beside it."""
    source = pathlib.Path(__file__).with_name(f"{sys.argv[1]}.in")
    python = ".".join(map(str, sys.version_info[:2]))
    header = f"# From {source.name} by lock.py under Python {python}; install with --no-deps.\n"
    source.with_suffix(".txt").write_text(header + "\n".join(resolve(source)) + "\n")


if __name__ == "__main__":
    main()
