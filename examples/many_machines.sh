#!/bin/bash
# A SLURM job: one torchrun on each machine, which starts a rank for each GPU. Submit it with
#
#     sbatch --nodes 4 examples/many_machines.sh examples/language_model.py --plan hsdp --save /shared/run
#
#SBATCH --job-name=shardgraph
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
#SBATCH --requeue
set -euo pipefail

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
exec srun --kill-on-bad-exit=1 torchrun \
    --nnodes "$SLURM_NNODES" \
    --nproc-per-node "${SLURM_GPUS_ON_NODE:-1}" \
    --rdzv-backend c10d \
    --rdzv-id "$SLURM_JOB_ID" \
    --rdzv-endpoint "$head:29500" \
    --max-restarts 0 \
    "$@"
