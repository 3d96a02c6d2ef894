"""On two GPUs, a training job over NCCL leaves both of them in the middle of its work and comes back, and its ranks change places, again
and again: DistributedDataParallel and FSDP, with each of NCCL's settings that change what the ranks share. Its losses are those of an
undisturbed run, bit for bit.

usage: training.py VRAMCTL [TIMES [WHICH]]   TIMES suspends in all for each kind (20), and a move for each setting; only what has WHICH in
                                             its line ("FSDP, NCCL_P2P_DISABLE=1")
"""

import contextlib
import json
import random
import statistics
import sys
import time

from common import check, filled, most_gib, stages, used_mib
from nccl import IDLE_MIB, Ranks

KINDS = {"DistributedDataParallel": "--train", "FSDP": "--train-sharded"}
SETTINGS = [
    {},
    {"NCCL_CUMEM_ENABLE": "0"},
    {"NCCL_CUMEM_HOST_ENABLE": "0"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "1"},
    {"NCCL_P2P_DISABLE": "1", "NCCL_CUMEM_HOST_ENABLE": "0"},
]
#: Of GPU memory that another program takes meanwhile, at most.
FILL_GIB = 60


class Training(Ranks):
    """Two ranks that train when told to."""

    def losses(self):
        return [((one or {}).get("digest"), (one or {}).get("same")) for one in self.hear()]


def leave_and_come_back(job, times, chance, idle, rows):
    """Returns what went wrong."""
    if not job.all("ready", job.hear()):
        return "did not start"
    began = time.monotonic()
    job.begin()
    undisturbed = job.losses()
    took = time.monotonic() - began

    def disturbed(*command):
        job.begin()
        time.sleep(chance.uniform(0.05, 0.8) * took)
        return job.command(*command)

    for number in range(times):
        code, text = disturbed("suspend", "ranks", "--json")
        if code:
            return f"suspend {number}: {text}"
        down, rest = stages(text), [used - most for used, most in zip(used_mib(), idle)]
        with contextlib.ExitStack() as stack:
            for gpu in (0, 1) if number == 0 else ():
                stack.enter_context(filled(min(FILL_GIB, most_gib(gpu)), gpu))
        code, text = job.command("resume", "ranks", "--json")
        if code:
            return f"resume {number}: {text}"
        rows.append({"rest": max(rest), **{f"down {stage}": ms for stage, ms in down.items()}, **stages(text)})
        if max(rest) > IDLE_MIB:
            return f"suspend {number}: {rest} MiB more than on idle GPUs"
        if (losses := job.losses()) != undisturbed:
            return f"after suspend {number}: {losses} instead of {undisturbed}"
    before = [process["devices"][0]["uuid"] for process in job.processes()]
    code, text = disturbed("move", "ranks", "--to", "1,0")
    after = [process["devices"][0]["uuid"] for process in job.processes()]
    if code or after != before[::-1]:
        return f"move: {before} to {after}; {text}"
    losses = job.losses()
    return f"after the move: {losses} instead of {undisturbed}" if losses != undisturbed else ""


def main():
    vramctl, times = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 20
    which, idle = sys.argv[3] if len(sys.argv) > 3 else "", used_mib()
    if not check("there are two GPUs", len(idle) > 1, f"{len(idle)}"):
        return
    jobs = {
        f"{kind}, {' '.join(f'{name}={value}' for name, value in settings.items()) or 'defaults'}": (option, settings)
        for kind, option in KINDS.items()
        for settings in SETTINGS
    }
    chosen = {what: job for what, job in jobs.items() if which in what}
    if not check("there is a setting to check", bool(chosen), "" if chosen else f"{which!r} is in none of: {'; '.join(jobs)}"):
        return
    chance, each = random.Random(5), -(-times // len(SETTINGS))
    for what, (option, settings) in chosen.items():
        environment = {"NCCL_NVLS_ENABLE": "0", **settings}
        job, rows = Training(vramctl, environment, option), []
        with contextlib.ExitStack() as stack:
            stack.callback(job.end)
            wrong = leave_and_come_back(job, each, chance, idle, rows)
        check(f"{what}: suspended {each} times and moved, every loss equal", not wrong, wrong[:1500])
        if rows:
            names = dict.fromkeys(stage for row in rows for stage in row)
            medians = {name: statistics.median(row[name] for row in rows if name in row) for name in names}
            print(f"  medians, ms, and the rest in MiB: {json.dumps(medians)}", flush=True)


if __name__ == "__main__":
    main()
