#!/usr/bin/env bash
# Nsight Systems over some steps of a run: every rank, the engines, CUDA, NVTX ranges named step/phase/tenant.
#   profiling/nsys.sh CONFIG [--steps 3-4] [further settings]     OUT=... the report's path, without its suffix
# Open the report in the Nsight Systems UI, or: nsys stats --report nvtx_sum,cuda_gpu_mem_time_sum OUT.nsys-rep
# An nsys without its importer leaves OUT.qdstrm instead, which QdstrmImporter of a whole Nsight Systems makes a report.
set -euo pipefail

missing=()
command -v nsys >/dev/null || missing+=("Nsight Systems (nsys) on the PATH")
nvidia-smi -L 2>/dev/null | grep -q GPU || missing+=("an NVIDIA GPU")
if ((${#missing[@]})); then
  printf 'nsys.sh needs %s\n' "$(IFS=';'; echo "${missing[*]}" | sed 's/;/ and /')" >&2
  exit 1
fi

config=${1:?usage: profiling/nsys.sh CONFIG [--steps 3-4] [further settings]}
shift
steps=3-4
if [[ ${1:-} == --steps ]]; then
  steps=$2
  shift 2
fi
cd "$(dirname "$0")/.."
out=${OUT:-runs/nsys}
mkdir -p "$(dirname "$out")"

# Nothing is recorded before cudaProfilerStart, which the run calls at the first of these steps.
nsys profile --capture-range=cudaProfilerApi --capture-range-end=stop --trace=cuda,nvtx --sample=none --cpuctxsw=none \
  --trace-fork-before-exec=true --cuda-memory-usage=true --force-overwrite=true --output "$out" \
  "${PYTHON:-python}" launch/colocated.py --config "$config" --run.profile_steps "[${steps/-/,}]" "$@"
ls "$out.nsys-rep" 2>/dev/null || ls "$out.qdstrm"
