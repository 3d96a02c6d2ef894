"""Two models in two processes share one GPU that need not fit both, and neither gives a command.

    python examples/two_models.py [GIB]

Starts both at the same moment under `vramctl run --share`, with GIB of weights each (default: as much as GPU and host memory
allow), and queries them in turn: who is asked has its memory on the GPU, and the other one gives way.
"""

import os
import subprocess
import sys

CHUNK = 1 << 28  # 4-byte elements: 1 GiB


def model(gib):
    """Answers each input line with a number that depends on all the weights."""
    import torch

    torch.manual_seed(os.getpid())
    weights = [torch.randn(CHUNK, device="cuda") for _ in range(gib)]
    first = None
    print("ready", flush=True)
    for _ in sys.stdin:
        answer = sum(chunk.sum(dtype=torch.float64).item() for chunk in weights)
        first = answer if first is None else first
        print(f"{answer:.6f} {'unchanged' if answer == first else 'CHANGED'}", flush=True)


def start(name, gib):
    command = ["vramctl", "run", "--share", "--name", name, "--", sys.executable, __file__, "--model", str(gib)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def hear(process):
    return process.stdout.readline().strip() or sys.exit("a model has ended")


def main():
    if sys.argv[1:2] == ["--model"]:
        return model(int(sys.argv[2]))
    if len(sys.argv) > 1:
        gib = int(sys.argv[1])
    else:
        query = ["nvidia-smi", "--id=0", "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
        total = int(subprocess.run(query, stdout=subprocess.PIPE, text=True, check=True).stdout) // 1024
        host = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 30
        gib = max(min(total * 6 // 10, host * 4 // 10), 1)
    models = {name: start(name, gib) for name in ("first", "second")}
    for process in models.values():
        hear(process)
    for turn in range(3):
        for name, process in models.items():
            process.stdin.write("?\n")
            process.stdin.flush()
            print(f"turn {turn}: {name} answers {hear(process)}", flush=True)
    for process in models.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
