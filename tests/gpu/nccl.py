"""On two GPUs, the ranks of an NCCL job leave both GPUs and come back, whichever way NCCL's ranks reach each other: their memory is paused by
its tag, all of them are suspended, and they change places. Eager and captured all-reduces are correct afterwards.

usage: nccl.py VRAMCTL [DIR]   DIR has a libnccl.so.2 to use in place of PyTorch's (or $GPU_CHECK_NCCL_DIR)

The ranks are those of two.py.
"""

import contextlib
import os
import pathlib
import sys

import two
from common import Job, check, free_port, used_mib

CYCLES = 3
#: What idle GPUs show beside a suspended job, at most.
IDLE_MIB = 8
TRANSPORTS = {
    "NVLink by cuMemCreate": {},
    "NVLink by CUDA IPC": {"NCCL_CUMEM_ENABLE": "0"},
    "host memory by cuMemCreate": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1"},
    "host memory of shm": {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
}


class Ranks(Job):
    """Two ranks of two.py."""

    def __init__(self, vramctl, environment, option="--rank"):
        port = free_port()
        super().__init__(vramctl, "ranks", two.__file__, *((option, number, port) for number in (0, 1)), **environment)
        self.steps = 0

    def begin(self):
        """All-reduces, which end when the job is there."""
        self.steps += 1
        self.tell(step=self.steps)

    def check_sums(self, when):
        heard = self.hear()
        return check(f"{when}: all-reduces are right", self.all("eager", heard) and self.all("graph", heard), heard)

    def waits(self):
        return self.hear(0.5) == [None] * len(self.ranks)


def leave_and_come_back(job, idle):
    if not check("started", job.all("ready", job.hear())):
        return
    job.begin()
    job.check_sums("before")
    known = [(one["rank"], one["ranks"]) for process in job.processes() for one in process.get("communicators", [])]
    check("both ranks of a communicator are known", {(0, 2), (1, 2)} <= set(known), known)
    tags = {tag["tag"] for process in job.processes() for tag in process["tags"]}
    if "nccl" in tags:
        before = used_mib()
        code, text = job.command("pause", "--name", "ranks", "nccl")
        freed = [was - now for was, now in zip(before, used_mib())]
        check("NCCL's memory is paused by its tag", code == 0 and min(freed) > 0, f"{freed} MiB less; {text}")
        job.begin()
        check("a collective waits meanwhile", job.waits())
        code, text = job.command("resume", "--name", "ranks")
        check("resumed", code == 0, text)
        job.check_sums("after the pause")
    for cycle in range(CYCLES):
        code, text = job.command("suspend", "ranks")
        rest = [used - most for used, most in zip(used_mib(), idle)]
        if not check(f"cycle {cycle}: suspended", code == 0 and max(rest) <= IDLE_MIB, f"{rest} MiB more than idle; {text}"):
            return
        job.begin()
        code, text = job.command("resume", "ranks")
        if not check(f"cycle {cycle}: resumed", code == 0, text) or not job.check_sums(f"cycle {cycle}"):
            return
    before = [process["devices"][0]["uuid"] for process in job.processes()]
    code, text = job.command("move", "ranks", "--to", "1,0")
    after = [process["devices"][0]["uuid"] for process in job.processes()]
    check("the ranks change places", code == 0 and after == before[::-1], f"{before} {after}; {text}")
    job.begin()
    job.check_sums("after the move")


def main():
    vramctl = sys.argv[1]
    folder = sys.argv[2] if len(sys.argv) > 2 else os.environ.get("GPU_CHECK_NCCL_DIR")
    environment = {"NCCL_NVLS_ENABLE": "0"}
    if folder:
        # PyTorch finds its own by RPATH, which comes before LD_LIBRARY_PATH, unless a library with this name is loaded already.
        library = pathlib.Path(folder, "libnccl.so.2").resolve(strict=True)
        environment["LD_PRELOAD"] = ":".join(filter(None, [os.environ.get("LD_PRELOAD"), str(library)]))
    idle = used_mib()
    if not check("there are two GPUs", len(idle) > 1, f"{len(idle)}"):
        return
    for name, settings in TRANSPORTS.items():
        print(f"note: {name}", flush=True)
        job = Ranks(vramctl, {**environment, **settings})
        with contextlib.ExitStack() as stack:
            stack.callback(job.end)
            leave_and_come_back(job, idle)


if __name__ == "__main__":
    main()
