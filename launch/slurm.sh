#!/usr/bin/env bash
# A Ray cluster over the nodes of a Slurm job, and the run on it:
#   sbatch --nodes 2 --gpus-per-node 8 launch/slurm.sh --config my.yaml --max_failures 3
# A starting point: add partition, account and modules of your site. Checkout, models, data and run.dir must be on a
# file system of all nodes. A requeued job (scontrol requeue) continues from its latest checkpoint.
#SBATCH --job-name hybrid_rl
#SBATCH --ntasks-per-node 1
#SBATCH --exclusive
#SBATCH --output %x-%j.log
set -euo pipefail
cd "${HYBRID_RL_DIR:-$SLURM_SUBMIT_DIR}"
export RAY_USAGE_STATS_ENABLED=0
# Anyone who reaches an open Ray port can run code as you; the token, in the home folder of all nodes, prevents this.
export RAY_AUTH_MODE=token
.venv/bin/ray get-auth-token --generate > /dev/null

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes 1 --ntasks 1 --nodelist "$head" hostname --ip-address | awk '{print $1}')
port=${RAY_PORT:-6379}

# With --block, the job step lasts as long as the node's processes, and Slurm ends them with the job.
srun --overlap --nodes 1 --ntasks 1 --nodelist "$head" \
  .venv/bin/ray start --head --node-ip-address "$address" --port "$port" --block &
if (( ${#nodes[@]} > 1 )); then
  workers=$(IFS=,; echo "${nodes[*]:1}")
  srun --overlap --nodes $(( ${#nodes[@]} - 1 )) --ntasks-per-node 1 --nodelist "$workers" \
    .venv/bin/ray start --address "$address:$port" --block &
fi

# The driver runs on the head node, as this script does. It waits for GPUs and lists what is missing.
until .venv/bin/ray status --address "$address:$port" > /dev/null 2>&1; do sleep 2; done
num_gpus=$(( SLURM_NNODES * ${SLURM_GPUS_ON_NODE:?} ))
.venv/bin/python launch/ray_cluster.py --address "$address:$port" --num_workers "$num_gpus" "$@"
