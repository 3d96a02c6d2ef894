"""A plain PyTorch program: gigabytes of tensors, a CUDA graph, and questions on stdin.

Each line on stdin is one question, each answer one JSON object on stdout.
"""

import argparse
import hashlib
import json
import sys
import traceback

import torch

GIB = 1 << 30
# Fill and compare tensors in pieces, to need little extra memory.
PIECE = 256 << 20
WIDTH = 4096
DEVICE = "cuda"


def sizes(total, smallest):
    """Tensor sizes in bytes, large and small, `total` in all."""
    wanted = [3 * GIB, GIB, (512 << 20) + 4096, GIB + (GIB >> 1), (96 << 20) + 8, 20 << 20]
    wanted += [(3 << 20) + 512, 300 << 10, 4096]
    wanted = [size for size in wanted if size >= smallest]
    left, number, found = total, 0, []
    while left > 0:
        size = min(wanted[number % len(wanted)], left)
        if left - size < max(smallest, 8):
            size = left  # no tiny remainder
        found.append(size)
        left -= size
        number += 1
    return found


def allocate(total, smallest=0):
    return [
        torch.empty(size // 8, dtype=torch.int64, device=DEVICE) for size in sizes(total, smallest)
    ]


def pieces(tensor):
    step = PIECE // 8
    return [tensor[at : at + step] for at in range(0, tensor.numel(), step)]


def randomise(tensor, seed):
    generator = torch.Generator(device=DEVICE)
    generator.manual_seed(seed)
    tensor.random_(generator=generator)


def fill(tensors, seed):
    for number, tensor in enumerate(tensors):
        for index, piece in enumerate(pieces(tensor)):
            randomise(piece, seed * 1_000_003 + number * 1009 + index)


def differing(tensors, seed):
    """The indexes of tensors that differ in any bit from what `fill` wrote."""
    scratch = torch.empty(PIECE // 8, dtype=torch.int64, device=DEVICE)
    wrong = []
    for number, tensor in enumerate(tensors):
        for index, piece in enumerate(pieces(tensor)):
            expected = scratch[: piece.numel()]
            randomise(expected, seed * 1_000_003 + number * 1009 + index)
            if not torch.equal(piece, expected):
                wrong.append(number)
                break
    return wrong


def checksums(tensors):
    return [int(torch.sum(tensor)) for tensor in tensors]


class Graph:
    """Two matrix products and the contents of two tensors, captured once."""

    def __init__(self, first, second, seed):
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(seed)

        def matrix(rows):
            shape = (rows, WIDTH)
            return torch.randn(shape, generator=generator, device=DEVICE).bfloat16() / 64

        self.x, self.w1, self.w2 = matrix(1024), matrix(WIDTH), matrix(WIDTH)
        count = min(first.numel(), second.numel(), self.x.numel())
        count -= count % WIDTH
        self.first, self.second = first[-count:], second[:count]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.y = self.step()

    def step(self):
        y = torch.relu(self.x @ self.w1) @ self.w2
        seen = ((self.first ^ self.second) & 0xFF).to(torch.bfloat16).view(-1, WIDTH)
        y[: seen.shape[0]] += seen
        return y

    def replay(self, number):
        """A digest of every bit of the output for input `number`."""
        generator = torch.Generator(device=DEVICE)
        generator.manual_seed(number)
        self.x.copy_(torch.randn(self.x.shape, generator=generator, device=DEVICE))
        self.graph.replay()
        torch.cuda.synchronize()
        return hashlib.sha256(self.y.view(torch.int16).cpu().numpy().tobytes()).hexdigest()


class Program:
    def __init__(self, options):
        self.seed = options.seed
        self.tensors = allocate(options.gib * GIB)
        fill(self.tensors, self.seed)
        largest = sorted(self.tensors, key=torch.Tensor.numel)
        self.graph = Graph(largest[-1], largest[max(0, len(largest) - 2)], self.seed)
        torch.cuda.synchronize()
        self.sums = checksums(self.tensors)

    def all_tensors(self):
        return self.tensors

    def verify(self):
        return {
            "tensors": len(self.tensors),
            "bytes": sum(t.numel() * 8 for t in self.tensors),
            "differing": differing(self.tensors, self.seed),
            "checksums_equal": checksums(self.tensors) == self.sums,
        }

    def answer(self, question):
        word, *rest = question.split()
        if word == "verify":
            return self.verify()
        if word == "replay":
            return {"digest": self.graph.replay(int(rest[0]))}
        if word == "addresses":
            graph = self.graph
            tensors = [*self.all_tensors(), graph.x, graph.w1, graph.w2, graph.y]
            return {"addresses": [t.data_ptr() for t in tensors]}
        if word == "memory":
            return {"reserved": torch.cuda.memory_reserved(), "free": torch.cuda.mem_get_info()[0]}
        raise ValueError(f"unknown question: {question}")


def main(program_class):
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    program = program_class(options)
    print(json.dumps({"ready": True, "torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        if line.strip() == "quit":
            break
        try:
            reply = program.answer(line.strip())
        except Exception as error:
            traceback.print_exc()
            reply = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    main(Program)
