#!/bin/bash
@directives@
cd @directory@ || exit 2
@setup@
trap 'ended=1' TERM  # scancel, or the time limit: the last lines say why what depends on it is cancelled
@srun@ @command@@share@
code=$?
[ "$code" = 0 ] && exit
sleep 1  # what has ended srun may come here as well
[ "$code" = @usage@ ] || [ "${ended:-}" ] || [ "${SLURM_RESTART_COUNT:-0}" -ge @restarts@ ] || { scontrol requeue "$SLURM_JOB_ID" && exit "$code"; }
echo "[$(date -u +%FT%TZ)] $SLURM_JOB_NAME ${SLURM_ARRAY_TASK_ID:-} failed with exit code $code:" @given_up@ | tee -a @log@
exit $code
