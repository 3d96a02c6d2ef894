from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

from . import memory as memory
from .memory import MemPool as MemPool
from .memory import PoolId
from .memory import memory_reserved as memory_reserved
from .memory import memory_snapshot as memory_snapshot
from .memory import memory_stats as memory_stats
from .memory import use_mem_pool as use_mem_pool

_thread = threading.local()


def is_available() -> bool:
    return True


def init() -> None:
    memory.runtime()


def _lazy_call(function: Any) -> None:
    """Calls it when CUDA is initialized: now, if it is."""
    memory.when_initialized(function)


def is_initialized() -> bool:
    return memory.initialized()


def device_count() -> int:
    return 2


def current_device() -> int:
    return getattr(_thread, "device", 0)


@contextlib.contextmanager
def device(index: Any) -> Iterator[None]:
    before, _thread.device = current_device(), int(index)
    memory.runtime().call("cudaSetDevice", int(index))
    try:
        yield
    finally:
        _thread.device = before
        memory.runtime().call("cudaSetDevice", before)


def get_allocator_backend() -> str:
    return memory.backend


def mem_get_info(index: int) -> tuple[int, int]:
    with device(index):
        return memory.runtime().memory_info()


def empty_cache() -> None:
    memory.empty_cache()


class CUDAGraph:
    def __init__(self) -> None:
        self.pool_id: PoolId | None = None

    def pool(self) -> PoolId:
        assert self.pool_id is not None
        return self.pool_id


class graph:
    """During capture, a graph allocates from its private pool, unless another pool was entered before. It is captured on a
    separate stream, because the default stream cannot be captured.
    """

    def __init__(
        self, cuda_graph: CUDAGraph, pool: PoolId | None = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        self.graph, self.pool, self.arguments = cuda_graph, pool, (stream, capture_error_mode)

    def __enter__(self) -> None:
        self.graph.pool_id = self.pool or memory.new_pool_id(graph=True)
        self.device = current_device()
        memory.allocator(self.device).begin(self.graph.pool_id)
        self.before, memory.current.stream = memory.current.stream, self.arguments[0] or 7

    def __exit__(self, *_: Any) -> None:
        memory.current.stream = self.before
        assert self.graph.pool_id is not None
        memory.allocator(self.device).end(self.graph.pool_id)
