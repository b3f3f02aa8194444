#!/usr/bin/env bash
# Nsight Compute over the kernels of this repository: share of the card's throughput that each reaches.
#   profiling/ncu.sh [TxHxV] [BxT]        PYTHON=... picks the interpreter, OUT=... the folder of ncu.csv
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
out=${OUT:-profiling/results}/ncu.csv
mkdir -p "$(dirname "$out")"

# Clocks stay as they are: a locked base clock would measure another card.
ncu --kernel-name regex:hybrid_rl --clock-control none --csv --page details \
  --section SpeedOfLight --section SpeedOfLight_RooflineChart --section MemoryWorkloadAnalysis \
  --log-file "$out" "${PYTHON:-python}" - <<'PY'
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

"${PYTHON:-python}" - "$out" <<'PY'
import csv
import sys
from collections import defaultdict

WANTED = {
    "Duration": "duration",
    "Compute (SM) Throughput": "compute %",
    "Memory Throughput": "memory %",
    "DRAM Throughput": "DRAM %",
    "L2 Hit Rate": "L2 hits %",
}
lines = [line for line in open(sys.argv[1], encoding="utf-8") if not line.startswith("==")]
launches = defaultdict(lambda: defaultdict(list))
for row in csv.DictReader(lines):
    # Memory Throughput stands twice: as a share of the peak, and in bytes per second.
    if row["Metric Name"] in WANTED and (row["Metric Name"] != "Memory Throughput" or row["Metric Unit"] == "%"):
        kernel = f"{row['Kernel Name'].split('(')[0]} {row.get('Grid Size', '')}"
        metric = f"{WANTED[row['Metric Name']]} {row['Metric Unit'] if row['Metric Name'] == 'Duration' else ''}".strip()
        launches[kernel][metric].append(float(row["Metric Value"].replace(",", "")))
for kernel, metrics in sorted(launches.items()):
    count = max(map(len, metrics.values()))
    means = ", ".join(f"{name} {sum(values) / len(values):.1f}" for name, values in metrics.items())
    print(f"{kernel} ({count} launches): {means}")
PY
