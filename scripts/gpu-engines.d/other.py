"""Another process on the GPU: takes so many GiB, fills them and verifies them.

other.py GIB
"""

import sys

import torch

CHUNK = 1 << 27  # numbers of 8 bytes: 1 GiB


def main():
    chunks = []
    for number in range(int(sys.argv[1])):
        chunk = torch.arange(CHUNK, device="cuda", dtype=torch.int64)
        chunks.append(chunk.add_(number))
    pattern = torch.arange(CHUNK, device="cuda", dtype=torch.int64) if len(chunks) < 2 else chunks[0]
    for number, chunk in enumerate(chunks):
        if number and not torch.equal(chunk.sub_(number), pattern):
            sys.exit(f"GiB number {number} is not what was written")
    torch.cuda.synchronize()
    print(f"verified {len(chunks)} GiB")


if __name__ == "__main__":
    main()
