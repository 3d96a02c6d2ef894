"""On two GPUs, moves a PyTorch program from one to the other and back in the middle of its work, and swaps two jobs. A job that cannot
be moved is refused, and continues.

usage: move.py VRAMCTL [TIMES]         prints a line `ok: …` or `FAILED: …` for each check
       move.py --owner, move.py --importer: two programs that share a tensor
"""

import base64
import json
import pickle
import statistics
import sys
import time

import suspend
from common import Job, ask, check, filled, median, most_gib, run, smi, started, tell, used_mib
from common import stages as stages_of
from suspend import PROGRAM_GIB

#: Exit codes of the command line.
USAGE, NO_ROOM, BUSY, UNSUSPENDABLE = 2, 4, 5, 7


def owner():
    import torch
    from torch.multiprocessing.reductions import reduce_tensor

    tensor = torch.full((64 << 20,), 7.0, device="cuda")
    print(json.dumps({"tensor": base64.b64encode(pickle.dumps(reduce_tensor(tensor))).decode()}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"same": bool((tensor == 7).all())}), flush=True)


def importer():
    rebuild, arguments = pickle.loads(base64.b64decode(json.loads(sys.stdin.readline())["tensor"]))
    tensor = rebuild(*arguments)
    print(json.dumps({"same": bool((tensor == 7).all())}), flush=True)
    for _ in sys.stdin:
        print(json.dumps({"same": bool((tensor == 7).all())}), flush=True)


def there_and_back(vramctl, name, child, times):
    """Moves a program to GPU 1 and back. It was started on GPU 0."""
    uuids = smi("uuid")
    undisturbed = ask(child, "work")
    failed, took, stages, told = [], [], [], []
    for number in range(2 * times):
        there = 1 - number % 2
        tell(child, "work")
        time.sleep(0.3 * undisturbed["s"])
        code, text, ms = run(vramctl, "move", name, "--to", str(there), "--json")
        if code:
            failed.append(f"move {number}: exit code {code}: {text}")
            break
        took.append(ms)
        stages.append(stages_of(text))
        after = json.loads(child.stdout.readline())
        used = used_mib()
        told.append(after["uuid"])
        status = json.loads(run(vramctl, "status", name, "--json")[1])["processes"][0]
        if after["digest"] != undisturbed["digest"] or not after["same"]:
            failed.append(f"move {number}: {after}")
        if used[there] < PROGRAM_GIB << 10 or used[1 - there] > 1024:
            failed.append(f"move {number}: {used} MiB in use")
        if status["devices"][0]["uuid"] != uuids[there]:
            failed.append(f"move {number}: status says {status['devices'][0]['uuid']}, it is on {uuids[there]}")
    moves = f"{name}: {times} times to the other GPU and back, in the middle of its work, results equal"
    check(moves, not failed, " ".join(failed)[:2000])
    if took:
        names = dict.fromkeys(stage for row in stages for stage in row)
        print(f"  vramctl move: {statistics.median(took):.0f} ms ({', '.join(f'{one} {median(stages, one)}' for one in names)})")
        print(f"  the program is told {told}, the GPUs are {uuids}", flush=True)


def refused(what, vramctl, arguments, code, words):
    """A command that must change nothing. The caller checks that the program continues."""
    got, text, _ = run(vramctl, *arguments)
    check(f"refused: {what}", got == code and all(word in text for word in words), f"exit code {got}: {text[:400]}")


def wrong_maps(vramctl, child):
    for gpus, why in (("7", "no GPU 7"), ("0", "already"), ("0,1", "--to names GPU 0, GPU 1"), ("1,1", "--to names GPU 1, GPU 1")):
        refused(f"--to {gpus}", vramctl, ("move", "moved", "--to", gpus), USAGE, [why])
    check("it runs on", ask(child, "check")["same"])


def full_gpu(vramctl, child):
    with filled(most_gib(1), 1):
        refused("a full GPU", vramctl, ("move", "moved", "--to", "1"), NO_ROOM, ["GiB"])
        check("it runs on", ask(child, "check")["same"])


def swapped(vramctl, child, other):
    uuids = smi("uuid")
    want = ask(child, "work"), ask(other, "work")
    failed = []
    for number in range(2):
        tell(child, "work")
        tell(other, "work")
        time.sleep(0.3 * want[0]["s"])
        code, text, ms = run(vramctl, "move", "moved", "--to", str(1 - number), "--swap", "other", "--json")
        if code:
            failed.append(f"exit code {code}: {text}")
            break
        after = json.loads(child.stdout.readline()), json.loads(other.stdout.readline())
        if [one["digest"] for one in after] != [one["digest"] for one in want] or not all(one["same"] for one in after):
            failed.append(f"{after} instead of {want}")
        places = [json.loads(run(vramctl, "status", name, "--json")[1])["processes"][0]["devices"][0]["uuid"] for name in ("moved", "other")]
        if places != ([uuids[1], uuids[0]] if number == 0 else uuids):
            failed.append(f"status says {places}, the GPUs are {uuids}")
        print(f"  swap: {ms:.0f} ms", flush=True)
    check("two jobs swapped, and back, in the middle of their work, results equal", not failed, " ".join(failed)[:2000])


def shared(vramctl):
    giving, taking = (Job(vramctl, role, __file__, (f"--{role}",)) for role in ("owner", "importer"))
    try:
        check("importer: it sees the memory", taking.ask(**giving.hear()[0])[0]["same"])
        for job, code in ((taking, UNSUSPENDABLE), (giving, BUSY)):
            refused(f"{job.name} of shared memory", vramctl, ("move", job.name, "--to", "1"), code, ["memory"])
            run(vramctl, "resume", "--name", job.name)
            check(f"{job.name}: it runs on", job.ask()[0]["same"])
    finally:
        taking.end()
        giving.end()


def main():
    vramctl, times = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    own = [sys.executable, suspend.__file__, "--program"]
    # One sees both GPUs, the other one only its own.
    with started([vramctl, "run", "--name", "moved", "--", *own, str(PROGRAM_GIB)]) as child:
        there_and_back(vramctl, "moved", child, times)
        wrong_maps(vramctl, child)
        full_gpu(vramctl, child)
        with started([vramctl, "run", "--name", "other", "--", *own, "8"], CUDA_VISIBLE_DEVICES="1") as other:
            swapped(vramctl, child, other)
    shared(vramctl)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--owner"]:
        owner()
    elif sys.argv[1:2] == ["--importer"]:
        importer()
    else:
        main()
