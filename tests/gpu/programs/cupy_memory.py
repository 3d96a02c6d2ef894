"""CuPy's memory pool, written and compared by kernels that CuPy compiles."""

import pathlib

import cupy
import loop
import numpy

GRID, THREADS = (1024,), (256,)


class Memory:
    def __init__(self, total):
        source = pathlib.Path(__file__).resolve().parent / "kernels.cuh"
        module = cupy.RawModule(code=source.read_text())
        self.fill, self.kernel = module.get_function("fill"), module.get_function("compare")
        self.blocks = [cupy.empty(size // 8, dtype=cupy.uint64) for size in loop.sizes(total)]
        self.seed = 0

    @staticmethod
    def scalars(number, block, seed):
        return numpy.uint64(block.size), numpy.uint64(seed * 1009 + number)

    def write(self, seed):
        self.seed = seed
        for number, block in enumerate(self.blocks):
            self.fill(GRID, THREADS, (block, *self.scalars(number, block, seed)))

    def compare(self, seed):
        """The number of words that differ, and the sum of all words."""
        result = cupy.zeros(2, dtype=cupy.uint64)
        for number, block in enumerate(self.blocks):
            self.kernel(GRID, THREADS, (block, *self.scalars(number, block, seed), result))
        return [int(value) for value in result.get()]

    def differing(self, seed):
        return self.compare(seed)[0]

    def checksum(self):
        return self.compare(self.seed)[1]

    def extra(self):
        """The sums by a kernel of CuPy's own."""
        return [int(block.sum()) for block in self.blocks]


if __name__ == "__main__":
    loop.serve(Memory, version=f"cupy {cupy.__version__}")
