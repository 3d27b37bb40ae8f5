#!/bin/bash
#SBATCH --job-name=tr1-13b
#SBATCH --nodes=32
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:4
#SBATCH --time=20:00:00
#SBATCH --signal=TERM@300
#SBATCH --array=1-10%1
#SBATCH --output=DIR/runs/x/logs/tr1-13b_%A_%a.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
# Written by `bloomery launch`. The training is in DIR/runs/x/launch/recipe.yaml, read at every start.

cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames

echo "[$(date -u +%FT%TZ)] Slurm job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST" | tee -a DIR/runs/x/logs/main_log.txt
df -h /dev/shm DIR/runs/x >> DIR/runs/x/logs/main_log.txt
trap 'ended=--ended' TERM  # scancel, or the limit itself: the ranks save, this shell goes on to the end
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 PYTHON -m bloomery doctor --node DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2) &&
  srun --kill-on-bad-exit=1 --wait=60 PYTHON -m bloomery train DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2)
code=$?
# It decides again where scancel, or the limit itself, has interrupted it.
while PYTHON -m bloomery launch --after DIR/runs/x --code "$code" ${ended:-}; [ $? = 130 ]; do :; done
exit $code  # the job's state is that of the training

