#!/bin/bash
#SBATCH --job-name=small-download
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=io
#SBATCH --array=0-7
#SBATCH --output=DIR/runs/x/logs/download/%a.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
srun --ntasks=1 PYTHON -m bloomery download files.jsonl --output raw --unit "$SLURM_ARRAY_TASK_ID/8"
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = 2 ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" 'see DIR/runs/x/logs/download; what depends on it is cancelled' | tee -a DIR/runs/x/logs/main_log.txt
exit $code

#!/bin/bash
#SBATCH --job-name=small-download
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=io
#SBATCH --output=DIR/runs/x/logs/download/complete.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
srun --ntasks=1 PYTHON -m bloomery download files.jsonl --output raw
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = 2 ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" 'see DIR/runs/x/logs/download; what depends on it is cancelled' | tee -a DIR/runs/x/logs/main_log.txt
exit $code

#!/bin/bash
#SBATCH --job-name=small-extract
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --partition=gpu
#SBATCH --output=DIR/runs/x/logs/extract/complete.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
srun --ntasks=1 PYTHON -m bloomery extract raw --output chunks --chunks 32
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = 2 ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" 'see DIR/runs/x/logs/extract; what depends on it is cancelled' | tee -a DIR/runs/x/logs/main_log.txt
exit $code

#!/bin/bash
#SBATCH --job-name=small-prepare
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=100G
#SBATCH --partition=gpu
#SBATCH --time=04:00:00
#SBATCH --array=0-31
#SBATCH --output=DIR/runs/x/logs/prepare/%a.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
srun --ntasks=1 PYTHON -m bloomery prepare DIR/runs/x/launch/recipe.yaml --unit "$SLURM_ARRAY_TASK_ID/32"
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = 2 ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" 'see DIR/runs/x/logs/prepare; what depends on it is cancelled' | tee -a DIR/runs/x/logs/main_log.txt
exit $code

#!/bin/bash
#SBATCH --job-name=small-prepare
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=16
#SBATCH --mem=100G
#SBATCH --partition=gpu
#SBATCH --time=04:00:00
#SBATCH --output=DIR/runs/x/logs/prepare/complete.log
#SBATCH --open-mode=append
#SBATCH --kill-on-invalid-dep=yes
#SBATCH --requeue
cd DIR || exit 2
export OMP_NUM_THREADS=1                  # else every rank starts a thread for each core of the node
export PYTHONUNBUFFERED=1                 # the log has the last lines of a rank that is killed
export TORCH_NCCL_ASYNC_ERROR_HANDLING=1  # a rank that is lost ends the others' collectives
export TORCH_CPP_LOG_LEVEL=ERROR          # a lost rank is reported once, not in pages of C++ frames
export SRUN_CPUS_PER_TASK=$SLURM_CPUS_PER_TASK  # srun does not take it from sbatch
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
srun --ntasks=1 PYTHON -m bloomery prepare DIR/runs/x/launch/recipe.yaml
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = 2 ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge 3 ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" 'see DIR/runs/x/logs/prepare; what depends on it is cancelled' | tee -a DIR/runs/x/logs/main_log.txt
exit $code

#!/bin/bash
#SBATCH --job-name=small
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --gres=gpu:1
#SBATCH --partition=gpu
#SBATCH --output=DIR/runs/x/logs/small_%j.log
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

