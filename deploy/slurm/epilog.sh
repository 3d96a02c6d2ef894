#!/bin/sh
# Slurm's Epilog, as root on each node after a job, whose processes have ended: removes its directory, and brings back what the prolog has
# suspended.
set -u
place=${VRAMCTL_SLURM_DIR:-/run/vramctl}
rm -rf "$place/job-$SLURM_JOB_ID"
suspended="$place/job-$SLURM_JOB_ID.suspended"
[ -f "$suspended" ] || exit 0
export VRAMCTL_DIR="$place/resident"
while read -r name; do
  # The driver takes a moment to clean up after the job.
  vramctl resume --name "$name" --timeout "${VRAMCTL_SLURM_PATIENCE:-60}" --quiet </dev/null ||
    echo "vramctl: $name is not back; when there is room: VRAMCTL_DIR=$VRAMCTL_DIR vramctl resume --name $name" >&2
done <"$suspended"
rm -f "$suspended"
exit 0
