#!/bin/bash
# sbatch recipes/accelerate/slurm.sh recipes/pretrain_electra.py --size base --output_dir /shared/runs/base ...
#SBATCH --job-name=hf_tiny
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=4
#SBATCH --cpus-per-task=32
#SBATCH --time=24:00:00
#SBATCH --signal=TERM@300
#SBATCH --requeue
# One launch on each machine; they meet at the first one. Five minutes before the time is up the run saves and ends; sent
# again, the same command goes on from its last checkpoint, which all machines must see: --output_dir on a shared disk.
set -e
export FIRST_MACHINE=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export PORT=$((20000 + SLURM_JOB_ID % 20000))
srun bash -c 'accelerate launch --config_file "$SLURM_SUBMIT_DIR/recipes/accelerate/multi_node.yaml" \
    --num_machines $SLURM_NNODES --num_processes $((SLURM_NNODES * SLURM_GPUS_ON_NODE)) --machine_rank $SLURM_NODEID \
    --main_process_ip $FIRST_MACHINE --main_process_port $PORT "$@" --resume_from_checkpoint latest' - "$@"
