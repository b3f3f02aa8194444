"""The benchmark's dry run in Triton's interpreter, and what the profiling script says where it cannot run."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def bench(*arguments: str) -> str:
    command = [sys.executable, str(ROOT / "profiling/bench_kernels.py"), "--device", "cpu", "--tiny", *arguments]
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "kernels"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "did not run" not in done.stdout
    return done.stdout


def test_the_table_has_every_phase_and_the_right_values(tmp_path):
    printed = bench("--out", str(tmp_path))
    environment, *lines = (tmp_path / "kernels.csv").read_text().splitlines()
    assert environment.startswith("# device CPU") and "triton" in environment
    rows = list(csv.DictReader(lines))
    assert {row["phase"] for row in rows} == {"product", "forward", "forward+backward", "token loss", "gae"}
    forward = {row["provider"]: row for row in rows if row["phase"] == "forward"}
    assert set(forward) == {"ours fused", "ours chunked", "reference", "torch, full logits"}
    assert all(float(row["max_error"]) < 1e-5 for row in forward.values())
    gae = {row["provider"]: float(row["max_error"]) for row in rows if row["phase"] == "gae"}
    assert set(gae) == {"ours", "ours, whitened", "Python loop"} and max(gae.values()) < 1e-5
    assert all(float(row["ms"]) > 0 for row in rows)
    assert (tmp_path / "kernels.png").stat().st_size > 1000
    assert "liger_kernel is not installed" in printed


def test_only_and_shapes_choose(tmp_path):
    bench("--out", str(tmp_path), "--only", "fused", "--shapes", "5x8x33")
    rows = list(csv.DictReader((tmp_path / "kernels.csv").read_text().splitlines()[1:]))
    assert {(row["shape"], row["provider"]) for row in rows} == {("5x8x33", "cuBLAS"), ("5x8x33", "ours fused")}


def test_the_sweep_names_every_constant():
    printed = bench("--sweep", "--shapes", "5x8x33", "2x40")
    for constant in (
        "STATS_TILES",
        "GRADIENT_TILES",
        "NUMERATOR_TILES",
        "GRADIENT_BYTES",
        "NUMERATOR_BYTES",
        "MAX_BLOCK",
        "chunked",
    ):
        assert constant in printed


@pytest.mark.parametrize("has_tool", [False, True])
@pytest.mark.parametrize("tool, product", [("ncu", "Nsight Compute"), ("nsys", "Nsight Systems")])
def test_nsight_scripts_say_what_is_missing_in_one_line(tool, product, has_tool, tmp_path):
    for name in ("bash", "sed", "grep", "dirname"):
        (tmp_path / name).symlink_to(subprocess.check_output(["which", name], text=True).strip())
    if has_tool:
        (tmp_path / tool).write_text("")
        (tmp_path / tool).chmod(0o755)
    script = ROOT / "profiling" / f"{tool}.sh"
    done = subprocess.run(["bash", str(script)], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert done.returncode == 1 and done.stdout == ""
    needs = "an NVIDIA GPU" if has_tool else f"{product} ({tool}) on the PATH and an NVIDIA GPU"
    assert done.stderr == f"{tool}.sh needs {needs}\n"
