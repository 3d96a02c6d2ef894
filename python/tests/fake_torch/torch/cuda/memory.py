from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import threading
from collections.abc import Iterator
from typing import Any

from support import Cuda

PoolId = tuple[int, int]
DEFAULT: PoolId = (0, 0)
MIB = 1 << 20

backend = "native"
#: Pools whose objects, and so their memory, are gone.
destroyed: list[PoolId] = []

_runtime: Cuda | None = None
_waiting: list[Any] = []
_allocators: dict[int, Allocator] = {}
_settings: dict[str, Any] = {"text": "", "expandable": False}
_numbers = itertools.count(1)
_expandable = itertools.count(0x7000_0000_0000, 1 << 36)
_lock = threading.RLock()
_initializing = threading.Lock()


def runtime() -> Cuda:
    global _runtime
    if _runtime is None:
        with _initializing:
            _runtime = Cuda()
            for function in _waiting:
                function()
            _waiting.clear()
    return _runtime


def when_initialized(function: Any) -> None:
    # As in torch: the function must not register another, and its exceptions reach the program.
    assert _initializing.acquire(timeout=10), "torch would wait for itself for ever"
    try:
        if initialized():
            function()
        else:
            _waiting.append(function)
    finally:
        _initializing.release()


def initialized() -> bool:
    return _runtime is not None


def allocator(device: int) -> Allocator:
    with _lock:
        return _allocators.setdefault(device, Allocator(device))


def apply_settings(text: str) -> None:
    _settings["text"] = text
    if "expandable_segments:" in text:
        _settings["expandable"] = "expandable_segments:True" in text


apply_settings(os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""))


def new_pool_id(graph: bool = False) -> PoolId:
    return (next(_numbers), 0) if not graph else (0, next(_numbers))


class Block:
    def __init__(self, segment: Segment, address: int, size: int) -> None:
        self.segment, self.address, self.size = segment, address, size
        self.state = "inactive"
        self.used_elsewhere = False

    def free(self) -> None:
        with _lock:
            self.state = "active_awaiting_free" if self.used_elsewhere else "inactive"
            self.segment.merge()


class _Thread(threading.local):
    stream = 0


#: The current stream of each thread.
current = _Thread()


class Segment:
    def __init__(
        self, address: int, size: int, pool: PoolId, small: bool, expandable: bool, device: int, source: Any = None
    ) -> None:
        self.address, self.size, self.pool, self.small = address, size, pool, small
        self.stream = current.stream
        self.expandable, self.device, self.source = expandable, device, source
        self.blocks = [Block(self, address, size)]

    def give_back(self) -> None:
        if self.source is not None:
            self.source.free(self.address, self.size, self.device, None)
        elif not self.expandable:
            runtime().free(self.address)

    def merge(self) -> None:
        merged: list[Block] = []
        for block in self.blocks:
            if merged and merged[-1].state == block.state == "inactive":
                merged[-1].size += block.size
            else:
                merged.append(block)
        self.blocks = merged


class Allocator:
    """The caching allocator of one device."""

    def __init__(self, device: int) -> None:
        self.device = device
        self.segments: list[Segment] = []
        self.entered: list[tuple[PoolId, int]] = []
        self.made = 0

    def begin(self, pool: PoolId) -> None:
        with _lock:
            if any(pool == other for other, _ in self.entered):
                raise RuntimeError("beginAllocateToPool: already recording to mempool_id")
            self.entered.append((pool, threading.get_ident()))

    def end(self, pool: PoolId) -> None:
        with _lock:
            found = [entry for entry in self.entered if entry[0] == pool]
            if not found:
                raise RuntimeError("endAllocatePool: not currently recording to mempool_id")
            self.entered.remove(found[0])

    def malloc(self, size: int) -> Block:
        with _lock:
            thread = threading.get_ident()
            pool = next((pool for pool, who in self.entered if who == thread), DEFAULT)
            size = max(-(-size // 512) * 512, 512)
            small, expandable = size <= MIB, bool(_settings["expandable"])
            free = [
                block
                for segment in self.segments
                if (segment.pool, segment.small, segment.stream) == (pool, small, current.stream)
                and (expandable or not segment.expandable)
                for block in segment.blocks
                if block.state == "inactive" and block.size >= size
            ]
            block = min(free, key=lambda block: block.size) if free else self._segment(size, pool, small, expandable).blocks[0]
            rest = block.size - size
            if rest >= 512 if small else rest > MIB:
                place = block.segment.blocks.index(block)
                block.segment.blocks.insert(place + 1, Block(block.segment, block.address + size, rest))
                block.size = size
            block.state, block.used_elsewhere = "active_allocated", False
            self.made += 1
            return block

    def _segment(self, size: int, pool: PoolId, small: bool, expandable: bool) -> Segment:
        bytes = 2 * MIB if small else 20 * MIB if size < 10 * MIB else -(-size // (2 * MIB)) * 2 * MIB
        source = _sources.get(pool)
        # A pool with its own allocator has no expandable segments.
        expandable = expandable and source is None
        if source is not None:
            address = source.malloc(bytes, self.device, None) or 0
            if not address:
                raise MemoryError
        else:
            address = next(_expandable) if expandable else self._from_cuda(bytes)
        segment = Segment(address, bytes, pool, small, expandable, self.device, source)
        self.segments.append(segment)
        return segment

    def _from_cuda(self, bytes: int) -> int:
        try:
            return runtime().malloc(bytes)
        except RuntimeError:
            empty_cache()
            try:
                return runtime().malloc(bytes)
            except RuntimeError:
                raise MemoryError from None


class CUDAPluggableAllocator:
    """Allocates through two functions of a library."""

    def __init__(self, path_to_so_file: str, alloc_fn_name: str, free_fn_name: str) -> None:
        library = ctypes.CDLL(path_to_so_file)
        self.malloc, self.free = getattr(library, alloc_fn_name), getattr(library, free_fn_name)
        self.malloc.restype = ctypes.c_void_p
        self.malloc.argtypes = [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]
        self.free.argtypes = [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]

    def allocator(self) -> Any:
        return self


#: The pluggable allocators, for pools that have one.
_sources: dict[PoolId, Any] = {}


class MemPool:
    def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
        if not initialized():
            raise RuntimeError("Allocator not initialized for device: did you call init?")
        self.id = new_pool_id()
        if allocator is not None:
            _sources[self.id] = allocator

    def __del__(self) -> None:
        destroyed.append(self.id)
        for each in _allocators.values():
            for segment in [segment for segment in each.segments if segment.pool == self.id]:
                if all(block.state == "inactive" for block in segment.blocks):
                    each.segments.remove(segment)
                    segment.give_back()


@contextlib.contextmanager
def use_mem_pool(pool: MemPool, device: int | None = None) -> Iterator[None]:
    from . import current_device

    index = current_device() if device is None else device
    allocator(index).begin(pool.id)
    try:
        yield
    finally:
        allocator(index).end(pool.id)


def memory_snapshot(mempool_id: PoolId | None = None, include_traces: bool = True) -> list[dict[str, Any]]:
    with _lock:
        return [
            {
                "device": segment.device,
                "address": segment.address,
                "total_size": segment.size,
                "allocated_size": sum(block.size for block in segment.blocks if block.state == "active_allocated"),
                "active_size": sum(block.size for block in segment.blocks if block.state != "inactive"),
                "stream": segment.stream,
                "segment_type": "small" if segment.small else "large",
                "segment_pool_id": segment.pool,
                "is_expandable": segment.expandable,
                "frames": [],
                "blocks": [
                    {
                        "address": block.address,
                        "size": block.size,
                        "requested_size": block.size,
                        "state": block.state,
                        "frames": [],
                    }
                    for block in segment.blocks
                ],
            }
            for each in _allocators.values()
            for segment in sorted(each.segments, key=lambda segment: segment.address)
            if mempool_id is None or segment.pool == mempool_id
        ]


def _snapshot(device: Any = None) -> dict[str, Any]:
    settings = {"PYTORCH_CUDA_ALLOC_CONF": _settings["text"], "expandable_segments": _settings["expandable"]}
    return {"segments": memory_snapshot(), "device_traces": [], "allocator_settings": settings}


def memory_stats(device: Any = None) -> dict[str, int]:
    return {"allocation.all.allocated": allocator(int(device)).made} if initialized() else {}


def memory_reserved(device: int) -> int:
    return sum(segment.size for segment in allocator(device).segments)


def empty_cache() -> None:
    """Returns the free segments of the default pool, and of pools that are gone, to CUDA; none while any thread is in a pool (pytorch#159674)."""
    with _lock:
        for each in _allocators.values():
            if each.entered:
                continue
            for segment in list(each.segments):
                is_free = segment.pool == DEFAULT or segment.pool in destroyed
                if is_free and len(segment.blocks) == 1 and segment.blocks[0].state == "inactive":
                    each.segments.remove(segment)
                    segment.give_back()
