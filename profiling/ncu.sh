#!/usr/bin/env bash
# Nsight Compute over the kernels of this repository: fraction of the card's throughput that each reaches.
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
import os
import sys
from collections import defaultdict
from pathlib import Path
from statistics import mean

import torch
import triton
from colocated_run import table, write_csv

WANTED = {
    "Duration": "us",
    "Compute (SM) Throughput": "compute %",
    "Memory Throughput": "memory %",
    "DRAM Throughput": "DRAM %",
    "L2 Hit Rate": "L2 hits %",
}
SCALES = {"%": 1, "ns": 1e-3, "us": 1, "ms": 1e3}
out, card = Path(sys.argv[1]), sys.argv[2]
lines = [line for line in open(out / "ncu_details.csv", encoding="utf-8") if not line.startswith("==")]
launches = defaultdict(lambda: defaultdict(list))
for row in csv.DictReader(lines):
    # Memory Throughput appears twice: as a fraction of the peak, and in bytes per second.
    name, scale = WANTED.get(row["Metric Name"]), SCALES.get(row["Metric Unit"])
    if name and scale:
        launches[row["Kernel Name"].split("(")[0], row["Grid Size"]][name].append(
            float(row["Metric Value"].replace(",", "")) * scale
        )
rows = [
    {"kernel": kernel, "grid": grid, "launches": len(metrics["us"])}
    | {name: round(mean(metrics[name]), 1) for name in WANTED.values()}
    for (kernel, grid), metrics in sorted(launches.items())
]
sys.argv = ["profiling/ncu.sh", os.environ["LOGPROB_SHAPE"], os.environ["GAE_SHAPE"]]  # the command that is noted
shapes = f"log-probs {os.environ['LOGPROB_SHAPE']}, GAE {os.environ['GAE_SHAPE']}"
write_csv(out / "ncu.csv", f"# device {card}, torch {torch.__version__}, triton {triton.__version__}, {shapes}", rows)
print(*table(rows), sep="\n")
PY
