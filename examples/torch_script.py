"""A plain torch script that knows nothing of vramctl. Pause and resume it from another shell.

    vramctl run --name script -- python examples/torch_script.py
    vramctl pause script              # in another shell, at any moment
    nvidia-smi                        # its memory is free
    vramctl resume script

While it is paused, a call that starts GPU work waits. After each round, the script rests, so that you have time to look: until Enter, or for ten
seconds without a terminal.
"""

import sys
import time

import torch


def rest(seconds):
    """Waits for Enter, or for `seconds` without a terminal."""
    if sys.stdin.isatty():
        input("resting; pause and resume me, then press Enter ")
    else:
        time.sleep(seconds)


def main(rounds=3, size=8192):
    torch.manual_seed(0)
    weights = torch.randn(64, size // 8, size, device="cuda", dtype=torch.bfloat16)
    state = torch.randn(size, size // 8, device="cuda", dtype=torch.bfloat16)
    for number in range(rounds):
        start = time.perf_counter()
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for layer in weights:
            total += (layer @ state).float().abs().mean()
        # Always the same sum: a resume restores the contents.
        print(f"round {number}: sum {total.item():.6f} in {time.perf_counter() - start:.2f} s", flush=True)
        if number + 1 < rounds:
            rest(10)


if __name__ == "__main__":
    main()
