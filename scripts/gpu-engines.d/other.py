"""Another process on the GPUs: allocates, fills and verifies GIB GiB on each.

other.py GIB GPUS            once
other.py GIB GPUS --serve    at each line on stdin; gives the memory back before it answers
"""

import sys

import torch

CHUNK = 1 << 27  # 8-byte elements: 1 GiB


def fill(gib, device):
    return [torch.arange(CHUNK, device=device, dtype=torch.int64).add_(number) for number in range(gib)]


def verify(chunks, device):
    for number, chunk in enumerate(chunks):
        if number and not torch.equal(chunk.sub_(number), chunks[0]):
            sys.exit(f"GiB {number} on {device} differs from what was written")


def use(gib, devices):
    filled = [fill(gib, device) for device in devices]
    for chunks, device in zip(filled, devices):
        verify(chunks, device)
        torch.cuda.synchronize(device)
    return f"verified {gib} GiB on each of {len(devices)} GPUs"


def main():
    gib, gpus = map(int, sys.argv[1:3])
    devices = [torch.device("cuda", number) for number in range(gpus)]
    if "--serve" not in sys.argv:
        print(use(gib, devices))
        return
    for device in devices:
        torch.zeros(1, device=device)
    print("ready", flush=True)
    for _ in sys.stdin:
        try:
            answer = use(gib, devices)
        except torch.OutOfMemoryError as error:
            answer = f"out of memory: {str(error).splitlines()[0]}"
        torch.cuda.empty_cache()
        print(answer, flush=True)


if __name__ == "__main__":
    main()
