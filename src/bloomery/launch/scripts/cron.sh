#!/bin/bash
@directives@
# No `set -e`: a script that fails keeps neither the others nor the next job from running.
cd @directory@
@setup@
next=$(sbatch --parsable --dependency=singleton --begin=now+@seconds@ @here@/job)
echo "$next" > @here@/@id@
for each in @here@/*.sh; do
  echo "[$(date -u +%FT%TZ)] $each"
  bash "$each"
done
@watch@ | grep -q '"state": "finished"' && scancel "$next"
exit 0
