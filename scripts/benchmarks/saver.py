"""The same allocations under the Python package torch_memory_saver, in its preload mode.

bench.py sends commands on standard input, as for set.c. Torch's caching allocator is off, so each tensor
is one cudaMalloc of its size.
"""

import os
import sys
import time

import torch
from torch_memory_saver import torch_memory_saver as saver

MIB = 1 << 20


def main():
    # Keep the package's own output from mixing with the answers.
    answers, sys.stdout = sys.stdout, sys.stderr
    tensors = {}

    def answer(*words):
        print(*words, file=answers, flush=True)

    def allocate(tag, backup, path):
        sizes = [int(line) for line in open(path)]
        with saver.region(tag=tag, enable_cpu_backup=backup == "2"):
            held = [torch.empty(size, dtype=torch.uint8, device="cuda") for size in sizes]
        tensors[tag] = held
        torch.cuda.synchronize()
        return len(held)

    def fill(tag):
        for number, tensor in enumerate(tensors[tag]):
            tensor.fill_(number % 251 + 1)
        torch.cuda.synchronize()
        return ""

    def check(tag):
        """Checks one byte per 2 MiB of the first tensors."""
        for number, tensor in enumerate(tensors[tag][:200]):
            if not bool((tensor[:: 2 * MIB] == number % 251 + 1).all()):
                raise ValueError(f"tensor {number} has changed")
        return len(tensors[tag])

    def trips():
        begin = time.perf_counter()
        for _ in range(1000):
            os.getppid()
        return time.perf_counter() - begin

    best = min(trips() for _ in range(50))

    def slowness():
        """As in calls.h."""
        nonlocal best
        took = trips()
        best = min(best, took)
        return took / best

    def timed(function, tag):
        torch.cuda.synchronize()
        before = slowness()
        begin = time.monotonic_ns()
        function(tag)
        torch.cuda.synchronize()
        end = time.monotonic_ns()
        return f"{begin} {end} {max(before, slowness()):.3f}"

    def retain(value):
        saver.retain_cpu_backup = value == "1"
        return ""

    def drop(tag):
        del tensors[tag]
        torch.cuda.empty_cache()
        return ""

    commands = {
        "alloc": allocate,
        "fill": fill,
        "check": check,
        "pause": lambda tag: timed(saver.pause, tag),
        "resume": lambda tag: timed(saver.resume, tag),
        "retain": retain,
        "drop": drop,
    }
    torch.empty(1, device="cuda")
    answer("ok")
    for line in sys.stdin:
        command, *arguments = line.split()
        if command == "quit":
            break
        try:
            answer("ok", commands[command](*arguments))
        except Exception as error:  # report anything to the bench
            answer("error", " ".join(str(error).split())[:300])


if __name__ == "__main__":
    main()
