#!/bin/sh
# Slurm's TaskProlog, as the user before each task: what it prints as `export …` is in the task's environment. The ranks of a step are one job
# for vramctl, although each task runs `vramctl run` itself.
echo "export VRAMCTL_DIR=${VRAMCTL_SLURM_DIR:-/run/vramctl}/job-$SLURM_JOB_ID"
echo "export VRAMCTL_JOB=slurm-$SLURM_JOB_ID.$SLURM_STEP_ID"
