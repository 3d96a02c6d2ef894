"""Arrays of JAX, in the memory that its default allocator takes at its start: three quarters of the GPU."""

import functools

import jax
import jax.numpy as jnp
import loop
import numpy

# Bytes of an array.
SIZE = 1 << 30


def pattern(words, seed):
    x = jax.lax.iota(jnp.uint32, words) + seed * numpy.uint32(2654435761)
    x = (x ^ (x >> 16)) * numpy.uint32(73244475)
    return x ^ (x >> 16)


@functools.partial(jax.jit, static_argnums=0)
def fill(words, seed):
    return pattern(words, seed)


@jax.jit
def compare(block, seed):
    """The number of words that differ, and the sum of all words."""
    differing = jnp.sum(block != pattern(block.shape[0], seed), dtype=jnp.uint32)
    return differing, jnp.sum(block, dtype=jnp.uint32)


class Memory:
    def __init__(self, total):
        device = jax.devices()[0]
        if device.platform != "gpu":
            raise RuntimeError(f"JAX sees no GPU, only {device}: is its CUDA plugin installed?")
        self.words = [min(SIZE, total - at) // 4 for at in range(0, total, SIZE)]
        self.blocks, self.seed = [], 0

    @staticmethod
    def number(seed, block):
        return numpy.uint32(seed * 1009 + block)

    def write(self, seed):
        self.seed = seed
        self.blocks = [fill(words, self.number(seed, i)) for i, words in enumerate(self.words)]

    def compare(self, seed):
        found = [compare(block, self.number(seed, i)) for i, block in enumerate(self.blocks)]
        return [[int(value) for value in one] for one in found]

    def differing(self, seed):
        return sum(differing for differing, _ in self.compare(seed))

    def checksum(self):
        return [total for _, total in self.compare(self.seed)]


if __name__ == "__main__":
    loop.serve(Memory, version=f"jax {jax.__version__}")
