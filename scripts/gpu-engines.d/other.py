"""Another process on the GPUs: allocates, fills and verifies GIB GiB on each.

other.py GIB GPUS
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


def main():
    gib, gpus = map(int, sys.argv[1:])
    devices = [torch.device("cuda", number) for number in range(gpus)]
    filled = [fill(gib, device) for device in devices]
    for chunks, device in zip(filled, devices):
        verify(chunks, device)
        torch.cuda.synchronize(device)
    print(f"verified {gib} GiB on each of {gpus} GPUs")


if __name__ == "__main__":
    main()
