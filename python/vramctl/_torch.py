"""Torch integration: a memory pool per tag, and the allocator's free blocks.

Torch's caching allocator gets segments from CUDA and hands out blocks of them. A segment keeps the tag of the region that
it was allocated in, whatever its blocks are used for later. So each tag needs its own pool (`torch.cuda.MemPool`), or a
tensor of one tag could land in a segment of another.

Nothing here imports torch: a program that has not imported it does not need any of this.
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
#: Torch's pool id.
PoolId = tuple[int, int]

#: Torch's id for memory outside any pool.
_DEFAULT_POOL: PoolId = (0, 0)

#: The library skips whole pages of this size, so smaller blocks do not matter.
_PAGE = 2 << 20


def loaded() -> Any:
    """The torch module, if the program has imported it and it has GPUs; else None."""
    torch = sys.modules.get("torch")
    # A module still being imported lacks most of its attributes.
    available = getattr(getattr(torch, "cuda", None), "is_available", None)
    return torch if available is not None and available() else None


def required() -> Any:
    """The torch module. Raises `errors.Unsupported` if `loaded` finds none."""
    torch = loaded()
    if torch is None:
        raise errors.Unsupported("this needs torch with a GPU: import torch first, and check torch.cuda.is_available()")
    return torch


# ---- pools ----


class _Pools:
    """The pools of this process, by key.

    Torch does not let two threads enter the same pool, so each key has one pool per concurrent thread. Pools live as long
    as the process, because torch frees a pool's memory when the pool object dies; `forget` is for programs that want that.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._idle: dict[Key, list[Any]] = {}
        self._tags: dict[PoolId, str | None] = {}
        #: The pluggable allocator behind new pools; None: CUDA's functions.
        self.allocator: Any = None

    def take(self, torch: Any, key: Key) -> Any:
        with self._lock:
            idle = self._idle.setdefault(key, [])
            if idle:
                return idle.pop()
        with torch.cuda.device(key[2]):
            pool = torch.cuda.MemPool(self.allocator)
        # Leak one reference. Otherwise the pool would free its memory at interpreter exit, through a CUDA runtime that
        # may already be gone.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(pool))
        with self._lock:
            self._tags[tuple(pool.id)] = key[0]
        return pool

    def give_back(self, key: Key, pool: Any) -> None:
        with self._lock:
            self._idle.setdefault(key, []).append(pool)

    def idle(self) -> dict[Key, Any]:
        """A pool of each key, unless all of them are in use."""
        with self._lock:
            return {key: pools[-1] for key, pools in self._idle.items() if pools}

    def forget(self, key: Key) -> None:
        """Drops the idle pools of a key: a region makes a new one."""
        with self._lock:
            pools = self._idle.pop(key, [])
        for pool in pools:
            ctypes.pythonapi.Py_DecRef(ctypes.py_object(pool))

    def adopt(self, pool_id: PoolId, tag: str) -> None:
        with self._lock:
            self._tags[pool_id] = tag

    def of(self, tags: Collection[str] | None) -> set[PoolId]:
        """The pools with one of these tags; None means any tag."""
        with self._lock:
            return {pool for pool, tag in self._tags.items() if tag is not None and (tags is None or tag in tags)}


_pools = _Pools()


def _caching() -> Any:
    """Torch, initialized for pools; None without torch, or if its allocator does not cache and so never mixes tags."""
    torch = loaded()
    if torch is None or torch.cuda.get_allocator_backend() != "native":
        return None
    torch.cuda.init()  # pools need it
    return torch


def _require_pools(torch: Any) -> None:
    if not hasattr(torch.cuda, "use_mem_pool"):
        raise errors.Unsupported(
            f"torch {torch.__version__} has no torch.cuda.MemPool, so tensors with different tags may share memory. Use "
            "torch 2.5 or later, or region(…, pool=False) if you use only one tag"
        )


class _Scope:
    """What torch allocates from in one thread: a pool, or its own choice if None."""

    def __init__(self, pool: Any, device: int | None, key: Key | None) -> None:
        self.pool, self.device = pool, device
        #: Set if the pool is one of `_pools`.
        self.key = key
        self._entered: Any = None

    def enter(self, torch: Any) -> None:
        if self.pool is not None:
            entered = torch.cuda.use_mem_pool(self.pool, self.device)
            entered.__enter__()
            self._entered = entered
            _note_pool(entered=True)

    def leave(self) -> None:
        entered, self._entered = self._entered, None
        if entered is not None:
            _note_pool(entered=False)
            entered.__exit__(None, None, None)


def _note_pool(*, entered: bool) -> None:
    """Meanwhile, torch gives nothing back to CUDA when it runs out of memory, and does not ask again (pytorch#159674)."""
    note = getattr(ctypes.CDLL(None), "vramctl_note_torch_pool", None)
    if note is not None:
        note(int(entered))


class _Thread(threading.local):
    def __init__(self) -> None:
        #: Innermost last.
        self.scopes: list[_Scope] = []


_thread = _Thread()


@contextlib.contextmanager
def _allocating_from(torch: Any, pool: Any, device: int | None = None, key: Key | None = None) -> Iterator[None]:
    """Makes torch allocate from this pool in the calling thread, on `device` (None: the current one).

    With nested pools, torch uses the one entered first, and the innermost since pytorch#168382. So leave the outer pool
    for the duration, and enter all of this package's pools here.
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


class Scope:
    """What torch allocates from on `device` in a region: the pool of this tag and policy, or none of ours if `pool` is False. A no-op without
    torch or with an allocator that does not cache.
    """

    def __init__(self, tag: str | None, backup: str, device: Any, pool: bool) -> None:
        self._tag, self._backup, self._device, self._pool = tag, backup, device, pool
        self._torch: Any = None
        self._key: Key | None = None
        self._open = contextlib.ExitStack()

    def open(self) -> None:
        """Checks that torch can do it, and prepares torch. For as long as the region lasts: a thread enters it often meanwhile."""
        torch = _caching()
        if torch is None:
            return
        if self._pool:
            _require_pools(torch)
            self._key = (self._tag, self._backup, _index(torch, self._device))
        self._open.enter_context(_without_expandable_segments(torch))
        self._torch = torch

    def close(self) -> None:
        self._open.close()

    @contextlib.contextmanager
    def entered(self) -> Iterator[None]:
        """The calling thread allocates from it."""
        torch, key = self._torch, self._key
        if torch is None:
            yield
            return
        if key is None:
            with _allocating_from(torch, None):
                yield
            return
        # This thread may already own the key's pool, from an outer region.
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
    """Makes the calling thread allocate on the current device from a temporary pool. At the end, its free memory returns to
    the device; the rest follows once no tensor uses it. `tag` is the tag of its memory; None: left to CUDA.
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


def idle_pools() -> dict[Key, Any]:
    """The pools that no region uses now, one of each key."""
    return _pools.idle()


def forget_pools(key: Key) -> None:
    """Drops the idle pools of a key. Torch frees their memory once no tensor uses it."""
    _pools.forget(key)


def use_allocator(allocator: Any) -> None:
    """Makes new pools get their memory from a pluggable allocator instead of CUDA's functions."""
    _pools.allocator = allocator


def adopt(pool_id: PoolId, tag: str) -> None:
    """Treats the caller's pool, whose memory has this tag, as one of ours: a pause skips its free blocks.

    Not for CUDA graph pools: a graph replay uses memory that torch holds as free.
    """
    _pools.adopt((int(pool_id[0]), int(pool_id[1])), tag)


def _index(torch: Any, device: Any) -> int:
    """The ordinal of a device: an int, `cuda:1`, a `torch.device`, or None for the current one."""
    if isinstance(device, int):
        return device
    index = None if device is None else torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


# ---- expandable segments ----

_EXPANDABLE = "expandable_segments"


class _Switch:
    """Counts the regions that need expandable segments off. The setting is process-wide."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.users = 0
        #: The settings that we applied to turn it off; None if it was off already.
        self.without: str | None = None


_switch = _Switch()


@contextlib.contextmanager
def _without_expandable_segments(torch: Any) -> Iterator[None]:
    """Makes torch allocate its segments with `cudaMalloc`.

    Expandable segments come straight from the driver, and not through the pool that marks a region's memory. Torch can switch them at
    run time: while they are off, it neither creates expandable segments nor hands out blocks of existing ones.
    """
    with _switch.lock:
        # Reading torch's settings takes a snapshot of all its memory, so read them once if there is nothing to change.
        if _switch.users == 0 and _is_expandable(live := _live_settings(torch)):
            without = _with_expandable(_last_settings(live), False)
            _apply(torch, without)
            if _is_expandable(_live_settings(torch)):
                _apply(torch, _with_expandable(without, True))
                raise errors.Unsupported(
                    f"torch {torch.__version__} cannot turn off expandable segments, whose memory no region can mark. "
                    f"Start the program without {_EXPANDABLE}:True in PYTORCH_CUDA_ALLOC_CONF"
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
                # Restore it, unless the program has set it explicitly in the meantime.
                if now == without or _said_of_expandable(now) is None:
                    _apply(torch, _with_expandable(now, True))


_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def _live_settings(torch: Any) -> Mapping[str, Any]:
    return torch.cuda.memory._snapshot().get("allocator_settings") or {}


def _last_settings(live: Mapping[str, Any]) -> str:
    """The settings applied last: those set at run time, else those from the environment."""
    for settings in (live, os.environ):
        for name in _VARIABLES:
            if settings.get(name):
                return str(settings[name])
    return ""


def _is_expandable(live: Mapping[str, Any]) -> bool:
    """Whether it is on. Ask torch first: settings that do not mention it leave it unchanged."""
    return bool(live[_EXPANDABLE] if _EXPANDABLE in live else _said_of_expandable(_last_settings(live)))


def _said_of_expandable(settings: str) -> bool | None:
    """The value in the settings; None if they do not mention it."""
    pairs = [item.partition(":") for item in settings.split(",")]
    said = [value.strip().lower() in ("true", "1") for name, _, value in pairs if name.strip() == _EXPANDABLE]
    return said[-1] if said else None


def _with_expandable(settings: str, on: bool) -> str:
    """The full settings with this one changed: torch resets most settings that are not mentioned."""
    others = [item for item in settings.split(",") if item.strip() and item.partition(":")[0].strip() != _EXPANDABLE]
    return ",".join([*others, f"{_EXPANDABLE}:{on}"])


def _apply(torch: Any, settings: str) -> None:
    # Torch 2.9 moved it and deprecated the old name.
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None) or torch.cuda.memory._set_allocator_settings
    change(settings)


# ---- live blocks ----


def is_used() -> bool:
    """Whether torch's own allocator is in use in this process."""
    torch = sys.modules.get("torch")
    initialized = getattr(getattr(torch, "cuda", None), "is_initialized", None)
    return torch is not None and initialized is not None and initialized() and torch.cuda.get_allocator_backend() == "native"


class Free(NamedTuple):
    """Torch's free blocks, and how many allocations it had made by then."""

    ranges: list[tuple[int, int]]
    made: int


def free(tags: Collection[str] | None, process_tag: str | None) -> Free:
    """The blocks with these tags (None: any) that are certainly free, as (address, bytes): nobody reads them before writing.
    `process_tag` is the tag of memory outside regions.

    Leaves out what may be in use or is not worth skipping: blocks waiting for another stream, pools that are not ours (a
    CUDA graph replay uses memory that torch holds as free), expandable segments, and small blocks. In our pools, leaves out
    blocks of non-default streams, too: a graph captured inside a region allocates from the region's pool, which was entered
    first, and graphs are never captured on the default stream.
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


def segments() -> list[tuple[int, int, int]]:
    """Torch's memory, as (address, bytes, bytes in use). Expandable segments block by block: their pages are returned one by one."""
    found = []
    for segment in _segments(sys.modules["torch"]):
        blocks = [
            (int(block["size"]), 0 if block["state"] == "inactive" else int(block["size"])) for block in segment["blocks"]
        ]
        if not segment.get("is_expandable"):
            blocks = [(int(segment["total_size"]), sum(live for _, live in blocks))]
        address = int(segment["address"])
        for size, live in blocks:
            found.append((address, size, live))
            address += size
    return found


def taken_since(before: Free) -> int:
    """Bytes of `before` that torch has since handed out to other threads."""
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
    """Bytes common to two sorted lists of disjoint ranges."""
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
    # A recorded allocation history may be far larger than the rest.
    try:
        without_history = "include_traces" in inspect.signature(snapshot).parameters
    except (TypeError, ValueError):
        without_history = False
    return list(snapshot(include_traces=False) if without_history else snapshot())


def _allocations_made(torch: Any) -> int:
    """The number of allocations torch has made so far, on all devices."""
    devices = range(torch.cuda.device_count())
    return sum(int(torch.cuda.memory_stats(device).get("allocation.all.allocated", 0)) for device in devices)
