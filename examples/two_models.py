"""Two models, each in its own process, take turns on one GPU that need not have room for both.

    python examples/two_models.py [GIB]

Starts both under `vramctl run` with GIB of weights each (by default, as much as the GPU and host memory allow while both are
paused), and asks them in turns. Before it asks a model, it pauses the other one and resumes this one. This works for any
program that can be kept idle; for an engine with an HTTP interface, check first that it has no requests (docs/engines.md).
"""

import os
import subprocess
import sys

CHUNK = 1 << 28  # numbers of 4 bytes: 1 GiB


def model(gib):
    """A model that answers each line with a number that depends on all of its weights."""
    import torch

    torch.manual_seed(os.getpid())
    weights = [torch.randn(CHUNK, device="cuda") for _ in range(gib)]
    first = None
    print("ready", flush=True)
    for _ in sys.stdin:
        answer = sum(chunk.sum(dtype=torch.float64).item() for chunk in weights)
        first = answer if first is None else first
        print(f"{answer:.6f} {'unchanged' if answer == first else 'CHANGED'}", flush=True)


class Model:
    def __init__(self, name, gib):
        self.name = name
        command = ["vramctl", "run", "--name", name, "--", sys.executable, __file__, "--model", str(gib)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.hear()

    def hear(self):
        line = self.process.stdout.readline().strip()
        if not line:
            sys.exit(f"{self.name} has ended")
        return line

    def ask(self):
        self.process.stdin.write("?\n")
        self.process.stdin.flush()
        return self.hear()

    def pause(self):
        subprocess.run(["vramctl", "pause", "--name", self.name], check=True)

    def resume(self):
        # The memory of a process that was just paused may take a moment to become free.
        subprocess.run(["vramctl", "resume", "--name", self.name, "--timeout", "10"], check=True)


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
    models = []
    for name in ("first", "second"):
        # The second starts while the first is paused.
        models.append(Model(name, gib))
        models[-1].pause()
    for turn in range(3):
        for one in models:
            one.resume()
            print(f"turn {turn}: {one.name} answers {one.ask()}", flush=True)
            one.pause()
    for one in models:
        one.process.stdin.close()
        one.process.wait()


if __name__ == "__main__":
    main()
