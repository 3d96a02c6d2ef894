"""What the library costs loops that allocate, set and free memory in the order of a stream: with and without it, in turns.

usage: stream_ordered.py VRAMCTL LIBCUDART

Prints a table, and a line `ok: …` or `FAILED: …` for each check.
"""

import json
import os
import pathlib
import re
import subprocess
import sys

from common import MIB, check

TURNS = 5
#: How much longer a round may take.
LIMIT = 1.10
#: Shorter differences are noise, in microseconds a round.
NOISE = 1.0
#: What a program may have in use afterwards that it had not before: kernels that the driver has loaded.
LEFT_LIMIT = 64 * MIB

#: PyTorch's pool keeps what is freed.
TORCH = r"""
import json, sys, time, torch
sizes = {"2 MiB": (2, 3000), "20 MiB": (20, 2000), "256 MiB": (256, 300)}
figures = {}
stream = torch.cuda.current_stream()
for synced in (False, True):
    for name, (mib, rounds) in sizes.items():
        for each in range(-5, rounds):
            if each == 0:
                torch.cuda.synchronize()
                started = time.perf_counter()
            memory = torch.empty(mib << 20, dtype=torch.uint8, device="cuda")
            memory.fill_(each % 200)
            del memory
            if synced:
                stream.synchronize()
        torch.cuda.synchronize()
        taken = (time.perf_counter() - started) / rounds * 1e6
        figures[f"torch{', synchronised' if synced else ''}, {name}"] = taken
torch.cuda.empty_cache()
figures["left"] = torch.cuda.mem_get_info()[1] - torch.cuda.mem_get_info()[0]
print(json.dumps(figures))
"""


def run(command, managed, **env):
    vramctl = sys.argv[1]
    if managed:
        command = [vramctl, "run", "--", *command]
    done = subprocess.run(
        command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60
    )
    if done.returncode != 0:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return done.stdout


def loops(managed):
    """Microseconds a round by loop; under "left": bytes."""
    program = pathlib.Path(sys.argv[1]).with_name("stream_ordered")
    library = pathlib.Path(sys.argv[2])
    folder = library if library.is_dir() else library.parent
    path = f"{folder}:{os.environ.get('LD_LIBRARY_PATH', '')}"
    figures = {}
    for line in run([str(program)], managed, LD_LIBRARY_PATH=path).splitlines():
        if found := re.fullmatch(r"(\w+) (\d+) (\d+) ([\d.]+) ([\d.]+)", line):
            name = f"{found[1]}, {int(found[2]) // MIB} MiB"
            figures[name] = float(found[5])
            figures[f"{name}, until the host is done"] = float(found[4])
        elif found := re.fullmatch(r"left (\d+)", line):
            figures["left"] = int(found[1])
    return figures


def torch_loops(managed):
    return json.loads(
        run(
            [sys.executable, "-c", TORCH],
            managed,
            PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync",
            PYTORCH_ALLOC_CONF="backend:cudaMallocAsync",
        ).splitlines()[-1]
    )


def compare(measure):
    figures = {False: [], True: []}
    for _ in range(TURNS):
        for managed in (False, True):
            figures[managed].append(measure(managed))
    fine = True
    for name in figures[True][0]:
        turns = [[turn[name] for turn in figures[managed]] for managed in (False, True)]
        if name == "left":
            extra = max(turns[1]) - max(turns[0])
            fine &= check(f"afterwards the memory is free ({extra / MIB:.0f} MiB more in use)", extra < LEFT_LIMIT)
            continue
        # Whatever disturbs a process makes its loops slower, so the fastest turn is the truest.
        without, with_it = map(min, turns)
        ratio = with_it / without
        print(f"| {name} | {without:.1f} µs | {with_it:.1f} µs | {ratio:.2f} |", flush=True)
        if "until the host" not in name:
            fine &= check(f"{name}: {ratio:.2f} times", ratio <= LIMIT or with_it - without < NOISE)
    return fine


def main():
    print("| stream-ordered loop | without, a round | with it | ratio |")
    print("| --- | ---: | ---: | ---: |")
    fine = compare(loops)
    try:
        import torch

        has_torch = torch.cuda.is_available()
    except ImportError:
        has_torch = False
    if has_torch:
        fine &= compare(torch_loops)
    else:
        print("note: no PyTorch that sees a GPU, so its loops are left out")
    return 0 if fine else 1


if __name__ == "__main__":
    sys.exit(main())
