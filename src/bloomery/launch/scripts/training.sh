#!/bin/bash
@directives@
# Written by `bloomery launch`. The training is in @recipe@, read at every start.

cd @directory@ || exit 2
@setup@

echo "[$(date -u +%FT%TZ)] Slurm job $SLURM_JOB_ID, start $((${SLURM_RESTART_COUNT:-0} + 1)), on $SLURM_JOB_NODELIST" | tee -a @log@
df -h /dev/shm @run@ >> @log@
trap 'ended=--ended' TERM  # scancel, or the limit itself: the ranks save, this shell goes on to the end
srun --ntasks="$SLURM_NNODES" @check@ @keep_errors@ &&
  @srun@ @command@ @keep_errors@
code=$?
# It decides again where scancel, or the limit itself, has interrupted it.
while @after@ --code "$code" ${ended:-}; [ $? = @interrupted@ ]; do :; done
exit $code  # the job's state is that of the training
