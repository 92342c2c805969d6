#!/bin/bash
#SBATCH --job-name=digits
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --time=01:00:00
#SBATCH --signal=USR1@120
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=digits-%j.log
#
# One task per GPU: with four a node, --ntasks-per-node=4 --gpus-per-node=4.
#
# Two minutes before the time is over, every task gets SIGUSR1: the batch is finished, the state is
# stored, and the tasks leave. The job is then queued again and goes on where it was.

if [ -n "$SLURM_RESTART_COUNT" ]; then
  export PACELINE_RESUME=auto
else
  rm -f results/final_model.pth
fi

srun --kill-on-bad-exit=1 python3 train.py "$@" || exit

if [ ! -f results/final_model.pth ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
