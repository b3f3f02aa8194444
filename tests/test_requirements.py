"""The locks have hashes of all that is installed, and uv gets pip's sources."""

import re
from pathlib import Path

import pytest

from requirements import uv

FOLDER = Path(uv.__file__).parent


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_locked_package_has_a_version_and_a_hash(name):
    entries = re.split(r"\n(?=\S)", (FOLDER / f"{name}.txt").read_text().strip())
    packages = [entry for entry in entries if not entry.startswith("#")]
    assert len(packages) > 200 and all(re.match(r"[a-z0-9.-]+==\S+", package) for package in packages)
    without_hash = [package for package in packages if "--hash=sha256:" not in package]
    assert without_hash == [package for package in packages if package.startswith("torch==") and "+cpu" in package]


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_a_lock_holds_the_versions_that_are_asked_for(name):
    locked = (FOLDER / f"{name}.txt").read_text()
    for line in (FOLDER / f"{name}.in").read_text().splitlines():
        package, _, version = line.partition("==")
        package = re.sub(r"\[.*", "", package).lower()
        assert re.search(rf"^{re.escape(package)}=={re.escape(version)}", locked, re.M), line


def test_uv_gets_the_sources_of_pip():
    options = {
        "index-url": "https://mirror/simple",
        "extra-index-url": "https://one/simple\nhttps://two/simple",
        "find-links": "/wheels /more",
        "constraint": "/limits.txt",
        "cert": "/ca.pem",
        "timeout": "30",
        "quiet": "1",
    }
    assert uv.uv_variables(options, is_lock=False) == {
        "UV_INDEX_STRATEGY": "unsafe-best-match",
        "UV_DEFAULT_INDEX": "https://mirror/simple",
        "UV_INDEX": "https://one/simple https://two/simple",
        "UV_FIND_LINKS": "/wheels,/more",
        "UV_CONSTRAINT": "/limits.txt",
        "SSL_CERT_FILE": "/ca.pem",
        "UV_HTTP_TIMEOUT": "30",
    }
    assert uv.uv_variables({}, is_lock=False) == {"UV_INDEX_STRATEGY": "unsafe-best-match"}


def test_a_lock_leaves_out_indexes_in_local_folders():
    options = {"extra-index-url": "file:///wheels/simple https://one/simple"}
    assert uv.uv_variables(options, is_lock=True)["UV_INDEX"] == "https://one/simple"
    assert uv.uv_variables(options, is_lock=False)["UV_INDEX"] == "file:///wheels/simple https://one/simple"
    assert "UV_INDEX" not in uv.uv_variables({"extra-index-url": "file:///wheels/simple"}, is_lock=True)


def test_what_pip_says_later_wins(monkeypatch):
    listing = "global.timeout='5'\nglobal.cert='/a'\n:env:.timeout='7'\ninstall.timeout='6'\n"
    monkeypatch.setattr(uv.subprocess, "run", lambda *_, **__: type("Done", (), {"stdout": listing}))
    assert uv.pip_options() == {"timeout": "7", "cert": "/a"}
