"""Torch, where the program uses it: a memory pool for each tag, and what the allocator holds as free.

Torch's caching allocator asks CUDA for segments and hands out parts of them. A segment gets the tag of the region in
which it was asked for, whatever its parts are used for later. So each tag needs a pool of its own (`torch.cuda.MemPool`),
or a tensor of one tag might be put into a segment of another.

Nothing here imports torch: a program that has not imported it does not need this module's work.
"""

from __future__ import annotations

import contextlib
import ctypes
import inspect
import os
import sys
import threading
from collections.abc import Collection, Iterator, Mapping
from typing import Any, NamedTuple, Optional

from . import errors

#: What a pool is for: tag (None: left to CUDA), backup policy, device.
Key = tuple[Optional[str], str, int]
#: How torch names a pool.
PoolId = tuple[int, int]

#: Torch's name of the pool of everything that is in no pool.
_DEFAULT_POOL: PoolId = (0, 0)

#: The library leaves out whole pages of this size: there is none in a smaller block.
_PAGE = 2 << 20


def loaded() -> Any:
    """The torch module, if the program has imported it and it has GPUs; else None."""
    torch = sys.modules.get("torch")
    # A module that is still being imported lacks most of its attributes.
    available = getattr(getattr(torch, "cuda", None), "is_available", None)
    return torch if available is not None and available() else None


def required() -> Any:
    """The torch module, for what is of no use without it."""
    torch = loaded()
    if torch is None:
        raise errors.Unsupported("torch with a GPU is needed: import torch before, and check torch.cuda.is_available()")
    return torch


# ---- pools ----


class _Pools:
    """The pools of this process, by key.

    Torch refuses to enter one pool in two threads at a time, so each key has as many as there have been threads in it
    at once. They live as long as the process: torch frees a pool's memory when the pool object dies.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Key, list[Any]] = {}
        self._tags: dict[PoolId, str | None] = {}
        #: What pools get their memory from; None: from CUDA's functions.
        self.allocator: Any = None

    def take(self, torch: Any, key: Key) -> Any:
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if idle:
                return idle.pop()
        with torch.cuda.device(key[2]):
            pool = torch.cuda.MemPool(self.allocator)
        # One reference that is never given back. At the interpreter's exit the pool would otherwise free its memory
        # through a runtime that may be gone already.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        with self._lock:
            self._tags[tuple(pool.id)] = key[0]
        return pool

    def give_back(self, key: Key, pool: Any) -> None:
        with self._lock:
            self._idle[key].append(pool)

    def adopt(self, pool_id: PoolId, tag: str) -> None:
        with self._lock:
            self._tags[pool_id] = tag

    def of(self, tags: Collection[str] | None) -> set[PoolId]:
        """The pools whose memory has one of the tags; None: any tag."""
        with self._lock:
            return {pool for pool, tag in self._tags.items() if tag is not None and (tags is None or tag in tags)}


_pools = _Pools()


def _caching() -> Any:
    """Torch, ready to have pools made; None: there is none, or its allocator does not cache, so there is nothing to keep apart."""
    torch = loaded()
    if torch is None or torch.cuda.get_allocator_backend() != "native":
        return None
    torch.cuda.init()  # there are no pools before
    return torch


def _require_pools(torch: Any) -> None:
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise errors.Unsupported(
            f"torch {torch.__version__} has no torch.cuda.MemPool, so tensors of several tags may share memory. Use "
            "torch 2.5 or later; or region(…, pool=False), if all that is allocated has one tag"
        )


class _Scope:
    """What torch allocates from in one thread: a pool, or None: from whatever it would without us."""

    def __init__(self, pool: Any, device: int | None, key: Key | None) -> None:
        self.pool, self.device = pool, device
        #: What the pool is for, if it is one of `_pools`.
        self.key = key
        self._entered: Any = None

    def enter(self, torch: Any) -> None:
        if self.pool is not None:
            entered = torch.cuda.use_mem_pool(self.pool, self.device)
            entered.__enter__()
            self._entered = entered

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            entered.__exit__(None, None, None)


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The innermost last.
        self.scopes: list[_Scope] = []


_thread = _Thread()


@contextlib.contextmanager
def _allocating_from(torch: Any, pool: Any, device: int | None = None, key: Key | None = None) -> Iterator[None]:
    """Has torch allocate from this pool in the calling thread, on `device` (the current one if None).

    Torch would go on with the pool that was entered first and not with the innermost. So the one around this is left for
    as long as it lasts, and whatever is entered by this package is entered here.
    """
    scopes = _thread.scopes
    outer = scopes[-1] if scopes else None
    inner = _Scope(pool, device, key)
    if outer is not None:
        outer.leave()
    try:
        inner.enter(torch)
        scopes.append(inner)
        try:
            yield
        finally:
            scopes.pop()
            inner.leave()
    finally:
        if outer is not None:
            outer.enter(torch)


@contextlib.contextmanager
def scope(tag: str | None, backup: str, device: Any, pool: bool) -> Iterator[None]:
    """Allocations of the calling thread on `device` come from the pool of this tag and policy; without `pool`, from none of
    ours. Without torch, or with an allocator that does not cache, there is nothing to keep apart.
    """
    torch = _caching()
    if torch is None:
        yield
        return
    with _without_expandable_segments(torch):
        if not pool:
            with _allocating_from(torch, None):
                yield
            return
        _require_pools(torch)
        key = (tag, backup, _index(torch, device))
        # This thread may be in a region of the same key further out: that pool is its own already.
        own = next((around.pool for around in _thread.scopes if around.key == key), None)
        if own is not None:
            with _allocating_from(torch, own, key[2], key):
                yield
            return
        taken = _pools.take(torch, key)
        try:
            with _allocating_from(torch, taken, key[2], key):
                yield
        finally:
            _pools.give_back(key, taken)


@contextlib.contextmanager
def pool_for_once(tag: str | None) -> Iterator[None]:
    """Allocations of the calling thread on the current device come from a pool that goes at the end: what of it is free then
    goes back to the device, and the rest once no tensor uses it. `tag` is that of its memory; None: it is left to CUDA.
    """
    torch = _caching()
    if torch is None:
        yield
        return
    _require_pools(torch)
    pool = torch.cuda.MemPool()
    if tag is not None:
        adopt(pool.id, tag)
    with _allocating_from(torch, pool):
        del pool
        yield


def use_allocator(allocator: Any) -> None:
    """Pools that are made from now on get their memory from a pluggable allocator, and not from CUDA's functions."""
    _pools.allocator = allocator


def adopt(pool_id: PoolId, tag: str) -> None:
    """Treats a pool of the caller's, whose memory has this tag, as one of ours: what torch holds as free in it is not kept
    by a pause.

    Not for pools of CUDA graphs: a graph that is replayed uses memory that torch holds as free.
    """
    _pools.adopt((int(pool_id[0]), int(pool_id[1])), tag)


def _index(torch: Any, device: Any) -> int:
    """The ordinal of a device given as torch takes it: a number, `cuda:1`, a `torch.device`, or None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


# ---- expandable segments ----

_EXPANDABLE = "expandable_segments"


class _Switch:
    """Counts the regions that need it off. The setting is the process's and not a thread's."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        #: The settings by which it was switched off; None: it was off.
        self.without: str | None = None


_switch = _Switch()


@contextlib.contextmanager
def _without_expandable_segments(torch: Any) -> Iterator[None]:
    """Has torch allocate its segments with `cudaMalloc`.

    With expandable segments it calls the driver, and what goes to the driver is not managed. Torch lets them be
    switched at run time: while they are off, it neither makes such segments nor hands out parts of those it has.
    """
    with _switch.lock:
        # Torch tells its settings with a snapshot of all its memory: so where nothing is to be changed, it is asked once.
        if _switch.users == 0 and _is_expandable(live := _live_settings(torch)):
            without = _with_expandable(_last_settings(live), False)
            _apply(torch, without)
            if _is_expandable(_live_settings(torch)):
                _apply(torch, _with_expandable(without, True))
                raise errors.Unsupported(
                    f"torch {torch.__version__} allocates expandable segments and cannot be told otherwise, and those are "
                    f"not managed. Start the program without {_EXPANDABLE}:True in PYTORCH_CUDA_ALLOC_CONF"
                )
            _switch.without = without
        _switch.users += 1
    try:
        yield
    finally:
        with _switch.lock:
            _switch.users -= 1
            if _switch.users == 0 and _switch.without is not None:
                without, _switch.without = _switch.without, None
                now = _last_settings(_live_settings(torch))
                # Or the program has said something of it meanwhile, and knows why.
                if now == without or _said_of_expandable(now) is None:
                    _apply(torch, _with_expandable(now, True))


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _live_settings(torch: Any) -> Mapping[str, Any]:
    return torch.cuda.memory._snapshot().get("allocator_settings") or {}


def _last_settings(live: Mapping[str, Any]) -> str:
    """The settings that were made last: programs make them at run time, so the environment is only where to look next."""
    for settings in (live, os.environ):
        for name in _VARIABLES:
            if settings.get(name):
                return str(settings[name])
    return ""


def _is_expandable(live: Mapping[str, Any]) -> bool:
    """Whether it is on. Settings that do not mention it leave it as it is, so the last ones do not tell."""
    return bool(live[_EXPANDABLE] if _EXPANDABLE in live else _said_of_expandable(_last_settings(live)))


def _said_of_expandable(settings: str) -> bool | None:
    """What settings say of it; None: nothing."""
    pairs = [item.partition(":") for item in settings.split(",")]
    said = [value.strip().lower() in ("true", "1") for name, _, value in pairs if name.strip() == _EXPANDABLE]
    return said[-1] if said else None


def _with_expandable(settings: str, on: bool) -> str:
    """All of the settings with this one changed: torch puts most of those that are not mentioned back to their defaults."""
    others = [item for item in settings.split(",") if item.strip() and item.partition(":")[0].strip() != _EXPANDABLE]
    return ",".join([*others, f"{_EXPANDABLE}:{on}"])


def _apply(torch: Any, settings: str) -> None:
    # Torch 2.9 has moved it, and warns of the old place.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(settings)


# ---- live blocks ----


def is_used() -> bool:
    """Whether torch's own allocator is in use in this process."""
    torch = sys.modules.get("torch")
    initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch is not None and initialized is not None and initialized() and torch.cuda.get_allocator_backend() == "native"


class Free(NamedTuple):
    """What torch holds as free, and how many allocations it had made by then."""

    ranges: list[tuple[int, int]]
    made: int


def free(tags: Collection[str] | None, process_tag: str | None) -> Free:
    """The parts of segments with these tags (None: any) that torch certainly holds as free, as (address, bytes): nobody
    reads them before writing. `process_tag` is that of memory outside regions.

    Left out, as they may be in use or are not worth it: blocks that wait for another stream, blocks in pools that are not
    ours (a CUDA graph that is replayed uses memory that torch holds as free), expandable segments, and small blocks. Of our
    pools also what belongs to other streams than the default one: a graph that is captured inside a region takes its memory
    from the region's pool, which was entered before its own, and no graph is captured on the default stream.
    """
    torch = sys.modules["torch"]
    made = _allocations_made(torch)
    trusted = _pools.of(tags)
    if tags is None or process_tag in tags:
        trusted.add(_DEFAULT_POOL)
    ranges = [
        (int(block["address"]), int(block["size"]))
        for segment in _segments(torch)
        if _is_trusted(segment, trusted)
        for block in segment["blocks"]
        if block["state"] == "inactive" and block["size"] >= _PAGE and block.get("address")
    ]
    return Free(ranges, made)


def _is_trusted(segment: Mapping[str, Any], pools: Collection[PoolId]) -> bool:
    pool = tuple(segment.get("segment_pool_id", ()))
    return pool in pools and not segment.get("is_expandable") and (pool == _DEFAULT_POOL or segment.get("stream") == 0)


def taken_since(before: Free) -> int:
    """Bytes of `before` that torch has handed out since: other threads have allocated meanwhile."""
    if not before.ranges:
        return 0
    torch = sys.modules["torch"]
    if _allocations_made(torch) == before.made:
        return 0
    used = sorted(
        (int(block["address"]), int(block["size"]))
        for segment in _segments(torch)
        for block in segment["blocks"]
        if block["state"] != "inactive"
    )
    return _overlap(sorted(before.ranges), used)


def _overlap(one: list[tuple[int, int]], other: list[tuple[int, int]]) -> int:
    """Bytes in both of two sorted lists of ranges that do not overlap in themselves."""
    total = at = 0
    for address, size in one:
        while at < len(other) and sum(other[at]) <= address:
            at += 1
        behind = at
        while behind < len(other) and other[behind][0] < address + size:
            total += min(address + size, sum(other[behind])) - max(address, other[behind][0])
            behind += 1
    return total


def _segments(torch: Any) -> list[dict[str, Any]]:
    snapshot = torch.cuda.memory_snapshot
    # The history of allocations, where one is recorded, may be far larger than the rest.
    try:
        without_history = "include_traces" in inspect.signature(snapshot).parameters
    except (TypeError, ValueError):
        without_history = False
    return list(snapshot(include_traces=False) if without_history else snapshot())


def _allocations_made(torch: Any) -> int:
    """How many allocations torch has made so far, on all devices."""
    devices = range(torch.cuda.device_count())
    return sum(int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)) for device in devices)
