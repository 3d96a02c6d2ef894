"""Tensors of PyTorch, and with --graph a captured CUDA graph over them. PYTORCH_CUDA_ALLOC_CONF chooses the allocator."""

import pathlib
import sys

import torch

sys.path.append(str(pathlib.Path(__file__).resolve().parent.parent))

import loop  # noqa: E402

import torch_program  # noqa: E402


class Memory:
    def __init__(self, total, graph):
        self.tensors = [torch.empty(size // 8, dtype=torch.int64, device="cuda") for size in loop.sizes(total)]
        self.graph = None
        if graph:
            largest = sorted(self.tensors, key=torch.Tensor.numel)
            self.graph = torch_program.Graph(largest[-1], largest[max(0, len(largest) - 2)], 1)

    def write(self, seed):
        torch_program.fill(self.tensors, seed)

    def differing(self, seed):
        return len(torch_program.differing(self.tensors, seed))

    def checksum(self):
        return torch_program.checksums(self.tensors)

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
