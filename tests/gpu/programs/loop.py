"""The questions and answers of a program that holds GPU memory. Each line `check` on stdin is answered with one line of JSON.

`differing` says how much of the memory is not what was last written, `sum_equal` whether its checksum is that of then. After
that the memory is written anew, with other contents, and compared again: `rewritten_differing`.
"""

import argparse
import json
import os
import sys
import traceback


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, required=True)
    return parser.parse_args()


def sizes(total):
    """Bytes of each block, large and small. None is under 1 MiB, which would be left to CUDA."""
    mib = 1 << 20
    wanted = [3072 * mib, 1024 * mib, 512 * mib + 4096, 96 * mib + 8, 20 * mib, 3 * mib + 512]
    found = []
    while total > 0:
        size = min(wanted[len(found) % len(wanted)], total)
        if total - size < 2 * mib:
            size = total
        found.append(size)
        total -= size
    return found


class Program:
    """Answers for a `memory` that has write(seed), differing(seed) and checksum(). Its extra(), if it has one, returns what
    must be the same whenever it is asked for between two writes.
    """

    def __init__(self, memory):
        self.memory, self.seed = memory, 1000
        self.extra = getattr(memory, "extra", lambda: None)
        self.write()

    def write(self):
        self.seed += 1
        self.memory.write(self.seed)
        self.sum, self.seen = self.memory.checksum(), self.extra()

    def check(self):
        answer = {
            "differing": int(self.memory.differing(self.seed)),
            "sum_equal": self.memory.checksum() == self.sum,
            "extra_equal": self.extra() == self.seen,
        }
        self.write()
        return {**answer, "rewritten_differing": int(self.memory.differing(self.seed))}


def serve(make, **facts):
    """Makes the memory of `--mib` MiB, and answers until stdin ends."""
    # Keep the output of libraries out of the answers.
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)

    def tell(reply):
        print(json.dumps(reply), file=answers, flush=True)

    total = arguments().mib << 20
    try:
        program = Program(make(total))
        tell({"ready": True, "bytes": total, **facts, "differing": int(program.memory.differing(program.seed))})
    except Exception as error:
        traceback.print_exc()
        tell({"error": f"{type(error).__name__}: {error}"})
        sys.exit(1)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        try:
            tell(program.check() if line.strip() == "check" else {"error": f"unknown question: {line.strip()}"})
        except Exception as error:
            traceback.print_exc()
            tell({"error": f"{type(error).__name__}: {error}"})
