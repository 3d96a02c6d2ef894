"""What the driver's checkpoint and restore of a process spend their time on: a process that has a context and one thing more, for each
thing. The first row, a context alone, is the least that a suspend and its resume take.

usage: restore.py VRAMCTL [TIMES]     a row for each thing: medians of TIMES checkpoints and restores (3)
       restore.py --hold THING COUNT  such a process; it prints a line, and ends when its input does

No library is involved: these are the driver's own times, which a pause before leaves less to do.
"""

import ctypes
import json
import os
import statistics
import sys

from common import GIB, MIB, check, run, started

#: What there is beside the context, and how often.
THINGS = [
    ("nothing", 0),
    ("GiB of device memory", 1),
    ("GiB of device memory", 4),
    ("GiB of pinned host memory", 1),
    ("GiB of pinned host memory", 4),
    ("allocations of 2 MiB", 500),
    ("streams", 64),
    ("events", 1000),
    ("modules", 100),
]
KERNEL = b".version 7.0\n.target sm_70\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"


def hold(thing, count):
    cuda = ctypes.CDLL("libcuda.so.1")

    def call(name, *arguments):
        code = getattr(cuda, name)(*arguments)
        if code:
            sys.exit(f"{name} returned {code}")

    context, out = ctypes.c_void_p(), ctypes.c_uint64()
    call("cuInit", 0)
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), 0)
    call("cuCtxSetCurrent", context)
    for _ in range(count):
        if thing == "GiB of device memory":
            call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(GIB))
            call("cuMemsetD8_v2", ctypes.c_uint64(out.value), ctypes.c_ubyte(7), ctypes.c_size_t(GIB))
        elif thing == "GiB of pinned host memory":
            call("cuMemHostAlloc", ctypes.byref(out), ctypes.c_size_t(GIB), 0)
            ctypes.memset(out.value, 7, GIB)
        elif thing == "allocations of 2 MiB":
            call("cuMemAlloc_v2", ctypes.byref(out), ctypes.c_size_t(2 * MIB))
        elif thing == "streams":
            call("cuStreamCreate", ctypes.byref(out), 1)
        elif thing == "events":
            call("cuEventCreate", ctypes.byref(out), 0)
        elif thing == "modules":
            call("cuModuleLoadData", ctypes.byref(out), KERNEL)
    call("cuCtxSynchronize")
    print(json.dumps({"ready": True}), flush=True)
    sys.stdin.read()


def main():
    times = int(sys.argv[2]) if len(sys.argv) > 2 else 3
    own, driver = os.path.abspath(__file__), os.path.join(os.path.dirname(os.path.abspath(__file__)), "suspend.py")
    print(
        "| beside a context | lock | checkpoint | restore | unlock |",
        "| --- | ---: | ---: | ---: | ---: |",
        sep="\n",
        flush=True,
    )
    for thing, count in THINGS:
        rows = []
        with started([sys.executable, own, "--hold", thing, str(count)]) as child:
            for _ in range(times):
                _, text, _ = run(sys.executable, driver, "--driver", str(child.pid))
                rows.append(json.loads(text))
        what = f"{count} {thing}" if count else thing
        if check(
            f"checkpointed and restored with {what}", not any("failed" in row for row in rows), str(rows[-1].get("failed", ""))
        ):
            steps = [
                statistics.median(row[f"cuCheckpointProcess{step}"] for row in rows)
                for step in ("Lock", "Checkpoint", "Restore", "Unlock")
            ]
            print(f"| {what} | {' | '.join(f'{ms:.0f} ms' for ms in steps)} |", flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "--hold":
        hold(sys.argv[2], int(sys.argv[3]))
    else:
        main()
