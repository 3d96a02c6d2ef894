"""Device arrays of Numba, written and compared by its kernels."""

import loop
import numba
import numpy

# numba-cuda 0.30 still looks up names that NumPy 2.5 has removed.
for removed, now in {"row_stack": "vstack", "in1d": "isin", "trapz": "trapezoid"}.items():
    if not hasattr(numpy, removed):
        setattr(numpy, removed, getattr(numpy, now))

from numba import cuda  # noqa: E402 the names must be there first

GRID, THREADS = 1024, 256


# Uses signed 64-bit integers, without overflow: if an unsigned one is mixed in, Numba computes in floating point.
@cuda.jit
def fill(at, seed):
    for i in range(cuda.grid(1), at.size, cuda.gridsize(1)):
        x = i * 1103515245 + seed
        at[i] = x ^ (x >> 15)


@cuda.jit
def compare(at, seed, differing, sums):
    thread = cuda.grid(1)
    wrong = 0
    total = 0
    for i in range(thread, at.size, cuda.gridsize(1)):
        x = i * 1103515245 + seed
        if at[i] != x ^ (x >> 15):
            wrong += 1
        total += at[i]
    differing[thread] = wrong
    sums[thread] = total


class Memory:
    def __init__(self, total):
        self.blocks = [cuda.device_array(size // 8, dtype=numpy.int64) for size in loop.sizes(total)]
        self.parts = [cuda.device_array(GRID * THREADS, dtype=numpy.int64) for _ in range(2)]
        self.seed = 0

    def write(self, seed):
        self.seed = seed
        for number, block in enumerate(self.blocks):
            fill[GRID, THREADS](block, seed * 1009 + number)

    def compare(self, seed):
        """The number of words that differ, and the sum of all words."""
        differing = total = 0
        for number, block in enumerate(self.blocks):
            compare[GRID, THREADS](block, seed * 1009 + number, *self.parts)
            differing += int(self.parts[0].copy_to_host().sum())
            total += int(self.parts[1].copy_to_host().sum())
        return differing, total

    def differing(self, seed):
        return self.compare(seed)[0]

    def checksum(self):
        return self.compare(self.seed)[1]


if __name__ == "__main__":
    loop.serve(Memory, version=f"numba {numba.__version__}, numba-cuda {getattr(cuda, '__version__', 'built in')}")
