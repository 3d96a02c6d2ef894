"""Lets llm-d's snapshot agent suspend and resume a job of `vramctl run` (docs/integrations.md).

    python deploy/llm_d.py --job-id my-job engine

It runs beside the job `engine`, on the same node and with the same VRAMCTL_DIR, registers a workload channel with the agent, and does what the
agent says: a snapshot without tags suspends the job, one with tags pauses these. Ends when it is told to; the job goes on.

Needs the package `timeslice` of llm-d-rl-time-slicing, and this package.
"""

from __future__ import annotations

import argparse
import signal
from typing import Any

import vramctl


class Workload:
    """A job, as the agent's client wants it: `snapshot` and `restore`."""

    supported_modes = ["offload", "discard"]
    default_mode = "offload"

    def __init__(self, job: vramctl.Job, engine: str | None = None, patience: float = 60.0) -> None:
        self.job, self.engine, self.patience = job, engine, patience

    def snapshot(self, mode: str, tags: list[str]) -> None:
        """Takes the job's memory, all or nothing: if this raises, the job goes on."""
        backup: Any = "discard" if mode == "discard" else "default"
        if tags or mode == "discard":
            # An engine whose KV cache is discarded must forget what it has cached.
            self.job.pause(tags or None, backup=backup, engine=self.engine)
        else:
            try:
                self.job.suspend()
            except vramctl.errors.NotRestorable as why:
                print(f"only paused: {why}", flush=True)
                self.job.pause()

    def restore(self, tags: list[str]) -> None:
        """Gives it back; waits for others to leave."""
        self.job.resume(tags or None, timeout=self.patience)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", default="127.0.0.1:9001", help="the agent of this node (default: %(default)s)")
    parser.add_argument(
        "--job-id", required=True, help="as in the agent's requests; in Kubernetes, the pod's label timeslice.io/job-id"
    )
    parser.add_argument("--group", default="", help="the agent's group")
    parser.add_argument(
        "--engine", metavar="URL", help="asked before its KV cache is discarded, as with `vramctl pause --engine`"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long a restore waits for memory (default: %(default)g)",
    )
    parser.add_argument("name", help="the job's name for vramctl")
    options = parser.parse_args()
    from timeslice.snapshot_agent import register_workload

    workload = Workload(vramctl.Job(options.name), options.engine, options.patience)
    tags = sorted({tag.tag for status in workload.job.status().values() for tag in status.tags})
    handle = register_workload(options.agent, options.job_id, group=options.group, workload=workload, tags=tags)
    print(f"registered {options.name} as {options.job_id}: {', '.join(tags)}", flush=True)
    signal.sigwait({signal.SIGINT, signal.SIGTERM})
    handle.close()


if __name__ == "__main__":
    # Before any thread starts, so that each inherits it.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM})
    main()
