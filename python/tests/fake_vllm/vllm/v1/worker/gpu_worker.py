from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch.cuda.memory import runtime
from vllm.v1.worker.utils import LAYER, allocate_kv_cache

# Nothing is captured.
torch.cuda.CUDAGraph.capture_begin = torch.cuda.CUDAGraph.capture_end = lambda self: None


class Worker:
    def __init__(self, vllm_config: Any) -> None:
        self.vllm_config = vllm_config

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def load_model(self, contents: bytes) -> None:
        with self._maybe_get_memory_pool_context(tag="weights"):
            self.weights = torch.empty(len(contents))
        self.weights.copy_(contents)

    def initialize_cache(self, size: int) -> None:
        with self._maybe_get_memory_pool_context(tag="kv_cache"):
            self.cache = allocate_kv_cache(size, "cuda", None)
        assert not any(any(layer.tobytes()) for layer in self.cache), "the KV cache is not zero"

    def address(self, offset: int) -> int:
        return self.cache[offset // LAYER].data_ptr() + offset % LAYER

    def prefill(self, offset: int, state: bytes) -> None:
        runtime().write(self.address(offset), state)

    def copy(self, into: int, offset: int) -> None:
        self.prefill(into, self.read(offset))

    def read(self, offset: int) -> bytes:
        return runtime().read(self.address(offset), 4)

    def contents(self) -> bytes:
        return self.weights.tobytes()
