#!/usr/bin/env bash
# Nsight Compute over the kernels of this repository: share of the card's throughput that each reaches.
#   profiling/ncu.sh [TxHxV] [BxT]        PYTHON=... picks the interpreter, OUT=... the folder of the results:
# ncu.csv, a row for each kernel and grid, means of its launches; ncu_details.csv, all that Nsight Compute says.
set -euo pipefail

missing=()
command -v ncu >/dev/null || missing+=("Nsight Compute (ncu) on the PATH")
nvidia-smi -L 2>/dev/null | grep -q GPU || missing+=("an NVIDIA GPU")
if ((${#missing[@]})); then
  printf 'ncu.sh needs %s\n' "$(IFS=';'; echo "${missing[*]}" | sed 's/;/ and /')" >&2
  exit 1
fi

cd "$(dirname "$0")/.."
export LOGPROB_SHAPE=${1:-4096x2048x151936} GAE_SHAPE=${2:-4096x1024} PYTHONPATH=kernels:profiling
out=${OUT:-profiling/results}
mkdir -p "$out"

# Clocks stay as they are: a locked base clock would measure another card.
ncu --kernel-name regex:hybrid_rl --clock-control none --csv --page details \
  --section SpeedOfLight --section SpeedOfLight_RooflineChart --section MemoryWorkloadAnalysis \
  --log-file "$out/ncu_details.csv" "${PYTHON:-python}" - <<'PY'
import os

import torch
from bench_kernels import Clock, Problem, gae_rows, one_pass

from hybrid_rl_kernels import logprobs

p = Problem.make(tuple(map(int, os.environ["LOGPROB_SHAPE"].split("x"))), "cuda")
for path in ("fused", "chunked"):
    values, _ = logprobs.fused_logprobs(p.hidden, p.weight, p.targets, path=path)
    torch.autograd.grad(values, (p.hidden, p.weight), p.upstream)
one_pass(p, "fused")()
list(gae_rows(tuple(map(int, os.environ["GAE_SHAPE"].split("x"))), Clock(device="cuda", repeats=1), "ours"))
PY

"${PYTHON:-python}" - "$out" "$(nvidia-smi --query-gpu=name --format=csv,noheader | head -1)" <<'PY'
import csv
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
import triton

WANTED = {
    "Duration": "us",
    "Compute (SM) Throughput": "compute %",
    "Memory Throughput": "memory %",
    "DRAM Throughput": "DRAM %",
    "L2 Hit Rate": "L2 hits %",
}
NS_PER_UNIT = {"ns": 1, "us": 1e3, "ms": 1e6}
out, card = Path(sys.argv[1]), sys.argv[2]
lines = [line for line in open(out / "ncu_details.csv", encoding="utf-8") if not line.startswith("==")]
launches = defaultdict(lambda: defaultdict(list))
for row in csv.DictReader(lines):
    # Memory Throughput stands twice: as a share of the peak, and in bytes per second. Shares have no unit of time.
    if row["Metric Name"] in WANTED and (row["Metric Name"] != "Memory Throughput" or row["Metric Unit"] == "%"):
        value = float(row["Metric Value"].replace(",", "")) * NS_PER_UNIT.get(row["Metric Unit"], 1e3) / 1e3
        launches[row["Kernel Name"].split("(")[0], row["Grid Size"]][WANTED[row["Metric Name"]]].append(value)
with open(out / "ncu.csv", "w", newline="", encoding="utf-8") as file:
    file.write(f"# device {card}, torch {torch.__version__}, triton {triton.__version__}\n")
    table = csv.writer(file, lineterminator="\n")
    table.writerow(["kernel", "grid", "launches", *WANTED.values()])
    for (kernel, grid), metrics in sorted(launches.items()):
        means = [f"{mean(metrics[name]):.1f}" for name in WANTED.values()]
        table.writerow([kernel, grid, len(metrics["us"]), *means])
print((out / "ncu.csv").read_text())
PY
