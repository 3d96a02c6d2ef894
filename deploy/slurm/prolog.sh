#!/bin/sh
# Slurm's Prolog, as root on each node before a job: makes the job's directory of control sockets, and takes the resident programs off the GPUs
# that the job gets. Resident programs, such as an engine that serves while no job runs, are those in $VRAMCTL_SLURM_DIR/resident.
# A failure here would drain the node, so what cannot be suspended is only reported.
set -u
place=${VRAMCTL_SLURM_DIR:-/run/vramctl}
mkdir -p "$place"
mkdir -p -m 700 "$place/job-$SLURM_JOB_ID" && chown "$SLURM_JOB_UID" "$place/job-$SLURM_JOB_ID"

[ -d "$place/resident" ] || exit 0
export VRAMCTL_DIR="$place/resident"
# One prolog or epilog at a time: an epilog brings back what no list of another job has.
exec 9>"$place/lock"
flock -w 120 9 || echo "vramctl: another prolog or epilog takes long" >&2
for gpu in $(echo "${SLURM_JOB_GPUS:-}" | tr ',' ' '); do
  # A process that does not answer may have no name.
  vramctl ps --gpu "$gpu" --json | python3 -c '
import json, sys
for one in json.load(sys.stdin)["processes"]:
    if one.get("name"):
        print(one["name"])
    else:
        print("vramctl: process", one["pid"], "does not answer, and stays on its GPUs", file=sys.stderr)'
done | sort -u | while IFS= read -r name; do
  list="$place/job-$SLURM_JOB_ID.suspended"
  echo "$name" >>"$list"
  # What the driver cannot restore is only paused, and its CUDA context stays.
  vramctl suspend --name "$name" --quiet </dev/null || vramctl pause --name "$name" --quiet </dev/null || {
    echo "vramctl: $name stays on its GPUs" >&2
    grep -Fxv -e "$name" "$list" >"$list.new"
    mv "$list.new" "$list"
  }
done
exit 0
