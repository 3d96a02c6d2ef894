"""The PyTorch program with two regions, marked through vramctl's C ABI with ctypes.

Three quarters of its tensors are `weights` (backed up in host memory), one quarter is `kv_cache`
(discarded). It can pause and resume itself.
"""

import contextlib
import ctypes

import torch

import torch_program
from torch_program import GIB, Graph, allocate, checksums, differing, fill

BACKUP_DEFAULT, BACKUP_DISCARD, BACKUP_HOST = 0, 1, 2

library = ctypes.CDLL(None)
for name, arguments in {
    "region_begin": [ctypes.c_char_p, ctypes.c_int32],
    "region_end": [],
    "pause": [ctypes.c_char_p, ctypes.c_int64, ctypes.c_int32],
    "resume": [ctypes.c_char_p, ctypes.c_int64],
}.items():
    function = getattr(library, f"vramctl_{name}")
    function.argtypes, function.restype = arguments, ctypes.c_int32
library.vramctl_last_error.restype = ctypes.c_char_p


def call(name, *arguments):
    code = getattr(library, f"vramctl_{name}")(*arguments)
    if code != 0:
        message = (library.vramctl_last_error() or b"").decode()
        raise RuntimeError(f"vramctl_{name}: code {code}: {message}")


@contextlib.contextmanager
def region(tag, backup):
    call("region_begin", tag, backup)
    try:
        yield
    finally:
        call("region_end")


class Program(torch_program.Program):
    def __init__(self, options):
        self.seed = options.seed
        total = options.gib * GIB
        # Sizes that PyTorch's allocator always requests from CUDA, so that a tensor never
        # lands in another tag's block.
        with region(b"weights", BACKUP_HOST):
            self.weights = allocate(total // 4 * 3, smallest=64 << 20)
        with region(b"kv_cache", BACKUP_DISCARD):
            self.kv = allocate(total // 4, smallest=64 << 20)
        fill(self.weights, self.seed)
        fill(self.kv, self.seed + 1)
        self.graph = Graph(self.weights[0], self.kv[0], self.seed)
        torch.cuda.synchronize()
        self.sums = checksums(self.weights)

    def all_tensors(self):
        return self.weights + self.kv

    def verify(self):
        kv_bytes = sum(t.numel() * 8 for t in self.kv)
        if not differing(self.kv, self.seed + 1):
            kv = "filled"
        elif not any(bool(piece.any()) for t in self.kv for piece in torch_program.pieces(t)):
            kv = "zero"
        else:
            kv = "neither"
        return {
            "tensors": len(self.weights),
            "bytes": sum(t.numel() * 8 for t in self.weights),
            "differing": differing(self.weights, self.seed),
            "checksums_equal": checksums(self.weights) == self.sums,
            "kv": kv,
            "kv_bytes": kv_bytes,
        }

    def answer(self, question):
        word, *rest = question.split()
        if word == "refill":
            fill(self.kv, self.seed + 1)
            torch.cuda.synchronize()
            return {"refilled": True}
        if word in ("pause", "resume"):
            tag = rest[0].encode() if rest else None
            arguments = (tag, 100_000, BACKUP_DEFAULT) if word == "pause" else (tag, 100_000)
            call(word, *arguments)
            return {word: rest}
        return super().answer(question)


if __name__ == "__main__":
    torch_program.main(Program)
