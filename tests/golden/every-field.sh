#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=4
#SBATCH --gres=gpu:v100:4
#SBATCH --cpus-per-task=10
#SBATCH --mem=0
#SBATCH --partition=gpu
#SBATCH --account=abc@v100
#SBATCH --qos=long
#SBATCH --constraint=v100-32g
#SBATCH --exclude='n[3-4]'
#SBATCH --time=4-04:00:00
#SBATCH --signal=TERM@300
#SBATCH --output=DIR/runs/x/logs/small_%j.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
#SBATCH --hint=nomultithread
# Written by `bloomery launch`. The training is in DIR/runs/x/launch/recipe.yaml, read at every start.

cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
export NCCL_DEBUG='INFO it'               # launch.env
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch
module load cuda

echo "[$(date -u +%FT%TZ)] Slurm job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST" | tee -a DIR/runs/x/logs/main_log.txt
df -h /dev/shm DIR/runs/x >> DIR/runs/x/logs/main_log.txt
trap 'ended=--ended' TERM  # scancel, or the limit itself: the ranks save, this shell goes on to the end
srun --ntasks="$SLURM_NNODES" --ntasks-per-node=1 --container-image=/images/x.sqsh --container-workdir=DIR --container-mounts=/data:/data bloomery doctor --node DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2) &&
  srun --kill-on-bad-exit=1 --wait=60 --container-image=/images/x.sqsh --container-workdir=DIR --container-mounts=/data:/data bloomery train DIR/runs/x/launch/recipe.yaml --run-dir DIR/runs/x 2> >(trap '' HUP INT TERM; exec tee -a DIR/runs/x/logs/main_log.txt >&2)
code=$?
# It decides again where scancel, or the limit itself, has interrupted it.
while PYTHON -m bloomery launch --after DIR/runs/x --code "$code" ${ended:-}; [ $? = 130 ]; do :; done
exit $code  # the job's state is that of the training

