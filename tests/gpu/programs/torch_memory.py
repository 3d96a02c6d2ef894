"""Tensors of PyTorch, and with --graph a captured CUDA graph over them. PYTORCH_CUDA_ALLOC_CONF chooses the allocator."""

import hashlib
import sys

import loop
import torch

# Fill and compare tensors in pieces, to need little extra memory.
PIECE = 256 << 20
WIDTH = 4096
DEVICE = "cuda"


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


class Memory:
    def __init__(self, total, graph):
        self.tensors = [torch.empty(size // 8, dtype=torch.int64, device="cuda") for size in loop.sizes(total)]
        self.graph = None
        if graph:
            largest = sorted(self.tensors, key=torch.Tensor.numel)
            self.graph = Graph(largest[-1], largest[max(0, len(largest) - 2)], 1)

    def write(self, seed):
        fill(self.tensors, seed)

    def differing(self, seed):
        return len(differing(self.tensors, seed))

    def checksum(self):
        return checksums(self.tensors)

    def extra(self):
        """Every bit of the graph's results for two inputs and the tensors."""
        return self.graph and [self.graph.replay(number) for number in (1, 2)]


if __name__ == "__main__":
    graph = "--graph" in sys.argv
    if graph:
        sys.argv.remove("--graph")
    loop.serve(
        lambda total: Memory(total, graph),
        version=f"torch {torch.__version__}, {torch.cuda.get_allocator_backend()} allocator",
    )
