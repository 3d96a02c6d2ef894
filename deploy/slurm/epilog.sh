#!/bin/sh
# Slurm's Epilog, as root on each node after a job, whose processes have ended: removes its directory, and brings back what the prolog has
# suspended, unless another job has one of its GPUs: that job's epilog does it then.
set -u
place=${VRAMCTL_SLURM_DIR:-/run/vramctl}
rm -rf "$place/job-$SLURM_JOB_ID"
list="$place/job-$SLURM_JOB_ID.suspended"
[ -f "$list" ] || exit 0
export VRAMCTL_DIR="$place/resident"
exec 9>"$place/lock"
flock -w 120 9 || echo "vramctl: another prolog or epilog takes long" >&2
suspended=$(cat "$list")
rm -f "$list"
echo "$suspended" | while IFS= read -r name; do
  [ -n "$name" ] || continue
  cat "$place"/job-*.suspended 2>/dev/null | grep -Fxq -e "$name" && continue
  # The driver takes a moment to clean up after the job.
  vramctl resume --name "$name" --timeout "${VRAMCTL_SLURM_PATIENCE:-60}" --quiet </dev/null ||
    echo "vramctl: $name is not back; when there is room: VRAMCTL_DIR=$VRAMCTL_DIR vramctl resume --name $name" >&2
done
exit 0
