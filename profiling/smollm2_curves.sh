#!/usr/bin/env bash
# GRPO, PPO and GRPO with LoRA on two tasks: six runs of SmolLM2-135M-Instruct, at the same time on one GPU of 80 GB.
#   profiling/smollm2_curves.sh MODEL_FOLDER RUNS_FOLDER [further settings]     then: plot_run.py RUNS_FOLDER/<name>
# The runs slow each other down: read the curves, not the times.
set -euo pipefail
cd "$(dirname "$0")/.."
model=$1 runs=$2
shift 2
mkdir -p "$runs"
shared=(--models.actor "$model" --run.dir "$runs" --num_processes 1 --rollout.enforce_eager true
        --rollout.gpu_memory_utilization 0.1 --rollout.kv_cache_memory_bytes 2147483648 --update.micro_batch_tokens 8192)
declare -A kinds=(
  [grpo]=""
  [lora]="--models.lora.rank 32 --models.lora.alpha 64 --update.actor.lr 2e-4"
  # As many responses per step, each of another prompt.
  [ppo]="--advantage.estimator gae --rollout.group_size 1 --rollout.rollout_batch_size 512 --prompts.num_generated 51200
         --update.critic.lr 1e-5"
)
for task in chain_sum products; do
  for kind in "${!kinds[@]}"; do
    name=smollm2_${task}_$kind
    # shellcheck disable=SC2086  # the settings of a kind are words
    "${PYTHON:-python}" launch/colocated.py --config "launch/configs/smollm2_$task.yaml" --run.name "$name" \
      "${shared[@]}" ${kinds[$kind]} "$@" > "$runs/$name.log" 2>&1 &
  done
done
wait
for log in "$runs"/*.log; do
  name=$(basename "$log" .log)
  echo "$name $(cat "$runs/$name/summary.json" 2>/dev/null || tail -1 "$log")"
done
