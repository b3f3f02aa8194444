"""The settings files of this package, by the names under which `--config` and `hybrid-rl configs` know them."""

from pathlib import Path

FOLDER = Path(__file__).parent / "configs"


def configurations() -> dict[str, Path]:
    """Return name -> file; the name is the path in FOLDER without its suffix."""
    files = sorted(FOLDER.rglob("*.yaml"))
    return {file.relative_to(FOLDER).as_posix().removesuffix(".yaml"): file for file in files}


def title(file: Path) -> str:
    """Return the first line of a settings file, which says what it trains."""
    return file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("#").strip()
