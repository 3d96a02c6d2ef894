"""PyTorch's memory, written and compared by kernels of Triton."""

import loop
import torch
import triton
import triton.language as tl

SIZE = 4096


@triton.jit
def mix(index, seed):
    x = index * 1103515245 + seed
    return x ^ (x >> 15)


@triton.jit
def fill(at, words, seed, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(at + index, mix(index, seed), mask=index < words)


@triton.jit
def compare(at, words, seed, differing, sums, BLOCK: tl.constexpr):
    number = tl.program_id(0)
    index = number.to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < words
    found = tl.load(at + index, mask=inside, other=0)
    wrong = (inside & (found != mix(index, seed))).to(tl.int64)
    tl.store(differing + number, tl.sum(wrong, 0))
    tl.store(sums + number, tl.sum(found, 0))


class Memory:
    def __init__(self, total):
        self.blocks = [torch.empty(size // 8, dtype=torch.int64, device="cuda") for size in loop.sizes(total)]
        self.seed = 0

    @staticmethod
    def grid(block):
        return (triton.cdiv(block.numel(), SIZE),)

    def write(self, seed):
        self.seed = seed
        for number, block in enumerate(self.blocks):
            fill[self.grid(block)](block, block.numel(), seed * 1009 + number, BLOCK=SIZE)

    def compare(self, seed):
        """The number of words that differ, and the sum of all words."""
        differing = total = 0
        for number, block in enumerate(self.blocks):
            parts = torch.zeros((2, *self.grid(block)), dtype=torch.int64, device="cuda")
            compare[self.grid(block)](block, block.numel(), seed * 1009 + number, parts[0], parts[1], BLOCK=SIZE)
            differing += int(parts[0].sum())
            total += int(parts[1].sum())
        return differing, total

    def differing(self, seed):
        return self.compare(seed)[0]

    def checksum(self):
        return self.compare(self.seed)[1]


if __name__ == "__main__":
    loop.serve(Memory, version=f"triton {triton.__version__}, torch {torch.__version__}")
