"""Pause and resume the GPU memory of this process, or of others, by tag.

Inside a program that was started with ``vramctl run -- python …``::

    import vramctl

    with vramctl.region("weights"):
        model = load_model()                    # tensors made here can be paused as "weights"
    with vramctl.region("kv_cache", backup="discard"):
        cache = torch.empty(…, device="cuda")   # paused without keeping the contents

    vramctl.pause("kv_cache")                   # its GPU memory is free for others …
    vramctl.resume("kv_cache")                  # … and back, at the same address

From another process::

    with vramctl.Job("engine").paused():        # all its processes, or none
        ...
    with vramctl.Client(4711) as process:       # one process
        process.pause(["weights", "kv_cache"])

Torch is optional; the package uses it if the program has imported it. Sizes are in bytes, timeouts in seconds. Errors
are exceptions from `vramctl.errors` and carry the numbers. All functions are thread-safe; a region applies to the
thread that entered it, and in asyncio to the task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import _imports, _library, _regions, _request, _torch, _trim, errors, types
from ._request import Backup, Tags
from .client import Client, Process, processes
from .errors import Error
from .job import Job, ledger, swap

__all__ = [
    "Client",
    "Error",
    "Job",
    "Process",
    "__version__",
    "backup_of",
    "cuda_graph",
    "current_tag",
    "errors",
    "is_preloaded",
    "ledger",
    "library_path",
    "library_version",
    "pause",
    "processes",
    "region",
    "resume",
    "retain",
    "set_disk_directory",
    "set_memory_margin",
    "set_watch",
    "status",
    "swap",
    "trim",
    "types",
    "unmanaged",
]


#: The version of this package and of the library and command line installed with it.
__version__ = "0.1.0"


def is_preloaded() -> bool:
    """Whether the library is preloaded in this process. Without it, functions that act on this process's own memory raise
    `errors.NotPreloaded`; `Client` and `processes` still work.
    """
    return _library.find() is not None


def library_version() -> str:
    """The version of the preloaded library. Raises `errors.NotPreloaded`."""
    return _library.get().version


def library_path() -> str:
    """The path of ``libvramctl.so``, for setting ``LD_PRELOAD`` by hand: the preloaded library, else the one installed with
    this package. Raises `errors.NotPreloaded` if there is neither.
    """
    library = _library.find()
    path = library.path() if library is not None else None
    if path is None:
        installed = Path(__file__).with_name("libvramctl.so")
        if not installed.is_file():
            raise errors.NotPreloaded(
                f"libvramctl.so is neither preloaded nor at {installed}. In a checkout, build it with `cargo build --release` "
                "and start the program with `target/release/vramctl run -- python …`"
            )
        path = str(installed)
    return os.path.abspath(path)


def region(tag: str | None, backup: Backup = "default", *, device: Any = None, pool: bool = True) -> _regions.Region:
    """Tags the GPU memory that the calling thread allocates inside, or in asyncio the calling task. Regions nest; the innermost wins.

    Also a decorator, of functions, coroutine functions and generators. Without asyncio (trio), a `with` that awaits something inside also tags what
    other tasks allocate meanwhile; a decorated coroutine function does not.

    `tag`: 1 to 128 bytes of UTF-8 without commas, equals signs or control characters. None leaves allocations to CUDA; they
    are never paused.

    `backup`: what a pause does with the contents. ``host`` keeps them in host memory, ``disk`` keeps them in a file,
    ``discard`` drops them (they read as zero after the resume), ``default`` follows ``VRAMCTL_BACKUP``, else ``host``.

    With torch, tensors made inside come from a `torch.cuda.MemPool` for this tag, policy and `device` (anything torch
    accepts; None is the current device), so tensors with different tags never share memory. A region covers one device.
    Before torch 2.8, a pool also takes what other threads allocate on the device. Expandable segments are off for the
    whole process while any thread is in a region. Pass `pool=False` to use a torch pool of your own.

    Raises `errors.NotPreloaded`, `errors.Invalid` for an invalid tag or policy, and `errors.Unsupported` if torch cannot
    keep tags apart.
    """
    return _regions.Region(tag, backup, device, pool)


def unmanaged(*, device: Any = None) -> contextlib.AbstractContextManager[None]:
    """A region whose allocations are left to CUDA and never paused. With torch, tensors made inside come from a separate
    pool, so none lands in cached memory that can be paused. Raises the same errors as `region`.
    """
    return region(None, device=device)


@contextlib.contextmanager
def cuda_graph(
    graph: Any,
    *,
    tag: str = "cuda_graph",
    backup: Backup = "default",
    pool: Any = None,
    stream: Any = None,
    capture_error_mode: str = "global",
) -> Iterator[None]:
    """``torch.cuda.graph``, with a tag for the memory that the graph allocates.

    `graph`, `pool`, `stream` and `capture_error_mode` are passed to ``torch.cuda.graph``. Graphs that share a `pool` share
    memory, which keeps the tag of the graph that allocated it first. The graph can be replayed after a pause and resume.
    With ``backup="discard"``, the graph's memory reads as zero until the next replay.

    Raises `errors.NotPreloaded`, and `errors.Unsupported` without torch.
    """
    torch = _torch.required()
    with (
        region(tag, backup, pool=False),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
    ):
        yield


def current_tag() -> str | None:
    """The tag that an allocation by the calling thread would get now; None if it would be left to CUDA.
    Raises `errors.NotPreloaded`.
    """
    library = _library.get()
    _regions.refresh()
    return library.read("current_tag") or None


def pause(
    tag: Tags = None,
    *,
    timeout: float | None = None,
    backup: Backup = "default",
    live_only: bool = True,
) -> types.Report:
    """Returns the GPU memory of a tag to the driver. Its addresses stay reserved; do not use them until `resume`.

    Waits for the device, saves or discards the contents, then releases the memory. All or nothing: an error changes
    nothing. Pausing a paused tag is a no-op, counted in `Report.unchanged`.

    `tag`: one tag, several, None for all, or a mapping of tags to policies, where the key None means all others.

    `timeout`: seconds to wait for the device's work; None waits indefinitely. It does not limit copying.

    `backup`: overrides the policy of every allocation. Not allowed with a mapping.

    `live_only`: with torch, skip blocks that its allocator holds as free; their contents are undefined after the resume.
    Other threads must not create tensors meanwhile, or their contents may be lost; a `RuntimeWarning` says if one did.
    ``live_only=False`` keeps everything.

    Raises `errors.NotPreloaded`, `errors.UnknownTag`, `errors.HostMemory`, `errors.Disk`, `errors.Busy` on timeout,
    `errors.Capturing` during a CUDA graph capture, `errors.Driver`, `errors.Work`.
    """
    library = _library.get()
    policies = _request.policies(tag, backup)
    entries = _library.tags(policies)
    timeout_ms = _library.milliseconds(timeout)
    free = _torch.Free([], 0)
    if live_only and _torch.is_used():
        free = _free_of(policies)
    unused = _library.ranges(free.ranges)
    size = ctypes.sizeof(_library.PauseOptions)
    options = _library.PauseOptions(size, entries, len(entries), timeout_ms, unused, len(free.ranges))
    library.call("pause_with", ctypes.byref(options))
    report = types.Report._from(library.json("last_report_json"))
    lost = _torch.taken_since(free)
    if lost:
        warnings.warn(
            f"another thread created tensors of {lost} bytes during vramctl.pause(); their contents may be lost. Pause "
            "while no other thread allocates, or with live_only=False",
            RuntimeWarning,
            stacklevel=2,
        )
    return report


def resume(tag: str | Iterable[str] | None = None, *, timeout: float | None = 0.0) -> types.Report:
    """Maps new memory at the addresses of a tag and restores the saved contents; discarded contents read as zero.

    All or nothing: an error changes nothing. Resuming an active tag is a no-op.

    `tag`: one tag, several, or None for all. `timeout`: seconds to wait for memory that other processes hold; None waits
    indefinitely.

    Raises `errors.NotPreloaded`, `errors.UnknownTag`, `errors.DeviceMemory` (how much is needed, how much is free, who
    holds the rest), `errors.Disk`, `errors.Driver`.
    """
    library = _library.get()
    names = (ctypes.c_char_p * len(chosen))(*map(_library.tag, chosen)) if (chosen := _request.names(tag)) else None
    size = ctypes.sizeof(_library.ResumeOptions)
    options = _library.ResumeOptions(size, names, len(chosen), _library.milliseconds(timeout))
    library.call("resume_with", ctypes.byref(options))
    return types.Report._from(library.json("last_report_json"))


def _free_of(policies: Mapping[str | None, str]) -> _torch.Free:
    """Torch's free blocks under the tags whose pause can skip them. The other tags are left out because asking torch
    takes longer than a pause that keeps nothing or finds nothing changed.
    """
    there = status()

    def is_of_use(tag: types.Tag) -> bool:
        policy = policies.get(tag.tag, policies.get(None, "discard"))
        # Retained contents are saved whole, to be compared at the next pause.
        return not tag.retained and any(each != "discard" for each in (tag.backup if policy == "default" else [policy]))

    asked = [tag.tag for tag in there.tags if is_of_use(tag)]
    return _torch.free(asked, there.process_tag) if asked else _torch.Free([], 0)


def status() -> types.Status:
    """This process's managed memory, by tag and by device. Does not wait for a pause or resume in progress.
    Raises `errors.NotPreloaded`.
    """
    return types.Status._from(_library.get().json("status_json"))


def trim(*, timeout: float | None = 10.0) -> types.Trimmed:
    """Returns the GPU memory that torch has cached: collects garbage and empties torch's cache, up to three times, until a round
    returns less than 1 GiB.

    A thread of this package does it, and this call waits. Memory cached in other pools, such as those of regions, is kept;
    `Cached.fragmented_bytes` is stuck in segments that still hold a tensor.

    `timeout`: seconds to wait; None means 10. Raises `errors.NotPreloaded`, `errors.Busy` on timeout, and `errors.Invalid` if torch
    has not used CUDA yet.
    """
    library = _library.get()
    _trim.ensure()
    library.call("trim", _library.milliseconds(timeout))
    return types.Trimmed._from(library.json("last_report_json"))


def retain(tag: str | None, keep: bool | None) -> None:
    """Sets whether the saved contents of a tag stay in host memory after a resume, so that the next pause copies only what
    has changed. `tag` None: every tag without its own setting. `keep` None: follow ``VRAMCTL_RETAIN``.
    Raises `errors.NotPreloaded`.
    """
    _library.get().call("set_retain", _library.tag(tag), -1 if keep is None else int(bool(keep)))


def set_disk_directory(path: str | os.PathLike[str] | None) -> None:
    """Sets where the policy ``disk`` writes new backups: an existing directory on a drive; None follows
    ``VRAMCTL_DISK_DIR``. Existing backups stay where they are. Raises `errors.NotPreloaded`, and `errors.Disk` if `path`
    is not a directory.
    """
    _library.get().call("set_disk_directory", None if path is None else os.fsencode(path))


def set_memory_margin(bytes: int) -> None:
    """Makes managed allocations fail with out of memory if they would leave less than `bytes` of the device free; 0 turns
    this off. Raises `errors.NotPreloaded`.
    """
    if not 0 <= bytes < 1 << 64:
        raise errors.Invalid(f"the margin must be a number of bytes from 0 to 2**64 - 1, not {bytes!r}")
    _library.get().call("set_memory_margin", bytes)


def set_watch(below: int, *, trim: bool = False) -> None:
    """Watches how much of each device is free, whoever uses the rest. When less than `below` bytes are free, the library logs once who
    uses the memory and, with `trim`, does what `trim()` does. 0 ends the watch. ``VRAMCTL_WATCH`` sets this from the start.
    Raises `errors.NotPreloaded`.
    """
    if not 0 <= below < 1 << 64:
        raise errors.Invalid(f"the watch is for a number of bytes from 0 to 2**64 - 1, not {below!r}")
    if trim:
        _trim.ensure()
    _library.get().call("set_watch", below, int(trim))


def backup_of(tensor_or_address: Any) -> memoryview:
    """A read-only, zero-copy view of the saved contents of paused memory.

    For a tensor (anything with `data_ptr()`, `numel()`, `element_size()` and `is_contiguous()`), the view covers its bytes;
    for a device address, everything from there to the end of the allocation. The view points into the library's memory:
    do not use it after the memory is resumed or freed.

    Raises `errors.NotPreloaded`, `errors.NotPaused` if host memory holds no contents for it, and `errors.Invalid` for a
    non-contiguous tensor.
    """
    address, wanted = tensor_or_address, None
    if hasattr(tensor_or_address, "data_ptr"):
        tensor = tensor_or_address
        if not tensor.is_contiguous():
            raise errors.Invalid("the tensor is not contiguous; ask for the backup of its base tensor")
        address, wanted = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if wanted == 0:
            return memoryview(b"")
    library = _library.get()
    pointer, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.call("backup_pointer", ctypes.c_void_p(address), ctypes.byref(pointer), ctypes.byref(size))
    length = size.value if wanted is None else wanted
    if length > size.value:
        raise errors.Invalid(f"the tensor has {length} bytes, but only {size.value} remain in its allocation")
    contents = (ctypes.c_ubyte * length).from_address(pointer.value or 0)
    return memoryview(contents).cast("B").toreadonly()


# So that `vramctl trim` works from outside, however this package was found.
if _library.find() is not None:
    _imports.serve_torch()
