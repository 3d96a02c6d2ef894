"""Compares `vramctl gpus` with nvidia-smi: a PyTorch program with a captured graph, active and paused, next to a trainer
with the library and a program without it; on two GPUs, the ranks of two.py, for NCCL.

usage: ledger.py VRAMCTL          prints a line `ok: …` or `FAILED: …` for each check, and the ledgers
       ledger.py --program GIB    PyTorch, with that much and a captured graph, until its input ends
       ledger.py --leak           PyTorch, which keeps 200 MiB more at each line of its input
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time

import common
from common import MIB, Job, check, end, free_port, used_mib

#: How much the ledger may differ from nvidia-smi, and how much may be unexplained.
LIMIT = 64
MANAGED, OTHER = 16, 8
#: MiB that the program with a leak keeps in each cycle.
LEAK = 200


def program(gib):
    import torch

    keep = torch.ones(gib << 30, dtype=torch.uint8, device="cuda")
    x = torch.ones(1024, 1024, device="cuda", dtype=torch.bfloat16)
    torch.cuda.synchronize()
    (x @ x).sum().item()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = (x @ x) * 2
    graph.replay()
    torch.cuda.synchronize()
    print(json.dumps({"ready": float(y[0, 0]) == 2048.0 and bool(keep[-1] == 1)}), flush=True)
    sys.stdin.read()


def leak():
    """Keeps 200 MiB more at each line of its input."""
    import torch

    kept = [torch.ones(LEAK * MIB, dtype=torch.uint8, device="cuda")]
    print(json.dumps({"ready": True}), flush=True)
    for _ in sys.stdin:
        kept.append(torch.ones(LEAK * MIB, dtype=torch.uint8, device="cuda"))
        torch.cuda.synchronize()
        print(json.dumps({"kept": len(kept)}), flush=True)


def settled():
    """Memory in use on each GPU, once it no longer changes: a release may take a moment to show."""
    before = used_mib()
    for _ in range(20):
        time.sleep(0.2)
        now = used_mib()
        if now == before:
            break
        before = now
    return before


def mib(bytes_):
    return round(bytes_ / MIB)


def table(gpu):
    """A ledger in one line."""
    rows = [f"{share.get('name', '')} {share['what']} {share.get('of', '')}".split() for share in gpu["shares"]]
    return ", ".join(f"{' '.join(row)} {mib(share['bytes'])}" for row, share in zip(rows, gpu["shares"]))


def ledgers(vramctl, when):
    """The ledger of each GPU, compared with nvidia-smi."""
    used = settled()
    done = subprocess.run([vramctl, "gpus", "--json"], capture_output=True, text=True, timeout=60)
    gpus = json.loads(done.stdout).get("gpus", [])
    check(f"{when}: every GPU has a ledger", len(gpus) == len(used), "" if len(gpus) == len(used) else (done.stdout + done.stderr)[:500])
    for gpu in gpus:
        ok, detail = compare(gpu, used[gpu["index"]])
        check(f"{when}: the ledger of GPU {gpu['index']} matches nvidia-smi", ok, detail)
    return gpus


def compare(gpu, used):
    """Whether a ledger matches what is in use, in MiB, and both for people."""
    off = mib(sum(share["bytes"] for share in gpu["shares"])) - used
    unexplained = share_of(gpu, "unexplained")
    told = f"{used} MiB in use, the ledger has {off:+}, {unexplained} unexplained; {table(gpu)}"
    return abs(off) <= LIMIT and abs(unexplained) <= LIMIT, told


def share_of(gpu, what, of="", pid=None):
    """MiB of a kind of share."""
    meant = [
        share["bytes"]
        for share in gpu["shares"]
        if share["what"] == what and share.get("of", "").startswith(of) and pid in (None, share.get("pid"))
    ]
    return mib(sum(meant))


@contextlib.contextmanager
def started(command, **options):
    """Starts a program, and waits until it is ready."""
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, **options)
    try:
        check("the program has started", json.loads(child.stdout.readline() or "{}").get("ready", False))
        yield child
    finally:
        end([child])


def run(*command):
    code, text, _ = common.run(*command)
    if code:
        check(" ".join(command[1:]), False, text[:500])


def one_gpu(vramctl):
    ledgers(vramctl, "before")
    own = [sys.executable, os.path.abspath(__file__), "--program"]
    managed_as = lambda name, gib: started([vramctl, "run", "--name", name, "--", *own, str(gib)])  # noqa: E731
    with managed_as("ledger", MANAGED) as child, managed_as("trainer", OTHER) as trainer, started([*own, str(OTHER)]) as other:
        first = ledgers(vramctl, "active")[0]
        managed = share_of(first, "tag", pid=child.pid)
        check("active: the tensors are under their tag", MANAGED << 10 <= managed < (MANAGED << 10) + 1024, f"{managed} MiB")
        trainers = share_of(first, "tag", pid=trainer.pid)
        check("active: so are the trainer's", OTHER << 10 <= trainers < (OTHER << 10) + 1024, f"{trainers} MiB")
        theirs = share_of(first, "process", pid=other.pid)
        check("active: the other process has its own share", OTHER << 10 <= theirs < (OTHER << 10) + 2048, f"{theirs} MiB")
        run(vramctl, "pause", "--name", "ledger")
        paused = ledgers(vramctl, "paused")[0]
        check("paused: its tags have nothing, the trainer's all", share_of(paused, "tag") == trainers, table(paused))
        before, now = (share_of(gpu, "driver", pid=child.pid) for gpu in (first, paused))
        check("paused: the driver's own has not changed much", abs(now - before) <= 2 * LIMIT, f"{before} MiB, then {now}")
        run(vramctl, "resume", "--name", "ledger")
        again = share_of(ledgers(vramctl, "resumed")[0], "tag", pid=child.pid)
        check("resumed: as much under its tag as before", again == managed, f"{again} MiB")


def named(vramctl):
    """After three cycles, a leaking program is named, once."""
    command = [vramctl, "run", "--name", "leak", "--", sys.executable, os.path.abspath(__file__), "--leak"]
    with tempfile.TemporaryFile("w+") as log, started(command, stderr=log) as child:
        growing = []
        for _ in range(4):
            run(vramctl, "pause", "--name", "leak")
            done = subprocess.run([vramctl, "status", "leak", "--json"], capture_output=True, text=True, timeout=60)
            growing.append(json.loads(done.stdout)["processes"][0].get("growing", []))
            run(vramctl, "resume", "--name", "leak")
            child.stdin.write("more\n")
            child.stdin.flush()
            child.stdout.readline()
        log.seek(0)
        warnings = [line for line in log if "more in each cycle" in line]
        check("leak: nobody is named after one cycle or two", not any(growing[:2]), growing[:2])
        for number, found in enumerate(growing[2:], 3):
            mean = [mib(one["bytes_per_cycle"]) for one in found if one["owner"] == "tag default"]
            check(f"leak: named after {number} cycles", mean and abs(mean[0] - LEAK) <= 8, json.dumps(found))
        own = [line for line in warnings if "tag default" in line]
        check("leak: one warning in the program's stderr", len(own) == 1, "".join(warnings).strip())


def nccl(vramctl):
    import two

    port = free_port()
    job = Job(vramctl, "ranks", two.__file__, *(("--rank", number, port) for number in (0, 1)))
    try:
        check("nccl: both ranks have started", job.all("ready", job.hear()))
        for when in ("active", "paused"):
            for rank, gpu in zip(job.ranks, ledgers(vramctl, f"nccl, {when}")):
                told = f"nccl, {when}: its memory on GPU {gpu['index']} is told as its own"
                of_nccl = share_of(gpu, "tag", "nccl", rank.pid)
                check(told, of_nccl >= 100, f"{of_nccl} MiB, {share_of(gpu, 'driver', pid=rank.pid)} the driver's")
            if when == "active":
                run(vramctl, "pause", "--name", "ranks")
        run(vramctl, "resume", "--name", "ranks")
    finally:
        job.end()


def main():
    vramctl = sys.argv[1]
    one_gpu(vramctl)
    named(vramctl)
    if len(used_mib()) > 1:
        nccl(vramctl)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--program"]:
        program(int(sys.argv[2]))
    elif sys.argv[1:2] == ["--leak"]:
        leak()
    else:
        main()
