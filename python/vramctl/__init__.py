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

    with vramctl.Client("engine") as engine:
        engine.pause(["weights", "kv_cache"])

Torch is used where the program has imported it, and not needed. Sizes are in bytes and timeouts in seconds. What goes
wrong is an exception of `vramctl.errors` with the numbers in it. Functions may be called from any thread; a region
belongs to the thread that is in it.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from . import _library, _request, _torch, errors
from ._request import Backup, Tags
from ._types import Device, Hello, Host, Progress, Report, Status, Tag
from .client import Client, Process, processes
from .errors import Error

__all__ = [
    "Client",
    "Device",
    "Error",
    "Hello",
    "Host",
    "Process",
    "Progress",
    "Report",
    "Status",
    "Tag",
    "__version__",
    "backup_of",
    "cuda_graph",
    "current_tag",
    "errors",
    "is_preloaded",
    "library_path",
    "library_version",
    "pause",
    "processes",
    "region",
    "resume",
    "retain",
    "set_disk_directory",
    "set_memory_margin",
    "status",
    "unmanaged",
]


#: The version of this package, and of the library and the command line that are installed with it.
__version__ = "0.1.0"


def is_preloaded() -> bool:
    """Whether the library is preloaded in this process. If not, the functions of this module that concern the process's
    own memory raise `errors.NotPreloaded`; `Client` and `processes` work all the same.
    """
    return _library.find() is not None


def library_version() -> str:
    """The version of the preloaded library. Raises `errors.NotPreloaded`."""
    return _library.get().version


def library_path() -> str:
    """The path of ``libvramctl.so``, for those who set ``LD_PRELOAD`` themselves: the one that is preloaded, else the one
    that was installed with this package. Raises `errors.NotPreloaded` where there is neither.
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


@contextlib.contextmanager
def region(tag: str | None, backup: Backup = "default", *, device: Any = None, pool: bool = True) -> Iterator[None]:
    """GPU memory that the calling thread allocates inside gets the tag `tag`. Regions nest; the innermost counts.

    `tag`: 1 to 128 bytes of UTF-8 without commas, equals signs and control characters; None: allocations are left to
    CUDA, and are never paused.

    `backup`: what a pause does with the contents: ``host`` keeps them in host memory, ``disk`` in a file, ``discard`` drops
    them (zeros after the resume); ``default``: as ``VRAMCTL_BACKUP`` says for the tag, else ``host``. With ``discard``,
    neighbours share physical memory after a resume: what is freed of them goes back to the driver with the last of them, at
    the next pause at the latest.

    With torch, tensors made inside come from a `torch.cuda.MemPool` of this tag and policy on `device` (as torch takes it;
    the current device if None), so that tensors of several tags never share memory; a region is for tensors of one
    device. Before torch 2.8, a pool also takes what other threads allocate on the device meanwhile. Expandable segments
    are off in the process while any thread is in a region. `pool=False` leaves torch's pools alone, for callers that enter
    one of their own.

    Raises `errors.NotPreloaded`, `errors.Invalid` for a tag or policy that makes no sense, and `errors.Unsupported` where
    torch cannot keep the tags apart.
    """
    library = _library.get()
    library.call("region_begin", _library.tag(tag), _library.backup(backup))
    try:
        with _torch.scope(tag, backup, device, pool):
            yield
    finally:
        library.call("region_end")


def unmanaged(*, device: Any = None) -> contextlib.AbstractContextManager[None]:
    """A region whose allocations are left to CUDA and are never paused. With torch, tensors made inside come from a pool of
    their own, so that none of them lands in cached memory that can be paused. Raises as `region` does.
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
    """Captures a CUDA graph as ``torch.cuda.graph`` does; the memory that the graph allocates for itself gets the tag `tag`.

    `graph`, `pool`, `stream` and `capture_error_mode` are those of ``torch.cuda.graph``. Graphs that share a `pool` share
    memory, which has the tag of the graph that allocated it first. After a pause and a resume the graph can be replayed
    as before. With ``backup="discard"`` what the graph left in its memory reads as zero until the next replay.

    Raises `errors.NotPreloaded`, and `errors.Unsupported` without torch.
    """
    torch = _torch.required()
    with (
        region(tag, backup, pool=False),
        torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=capture_error_mode),
    ):
        yield


def current_tag() -> str | None:
    """The tag that an allocation of the calling thread would get now; None: it would be left to CUDA.
    Raises `errors.NotPreloaded`.
    """
    return _library.get().read("current_tag") or None


def pause(
    tag: Tags = None,
    *,
    timeout: float | None = None,
    backup: Backup = "default",
    live_only: bool = True,
) -> Report:
    """Gives the GPU memory of a tag back to the driver; its addresses stay, and must not be used until `resume`.

    Waits for the device's work, then keeps or discards the contents, then gives the memory back: all of it or, after an
    error, nothing. What is paused already is left alone, and counted in `Report.unchanged`.

    `tag`: one; several; None for all; or a mapping of tags to policies, in which the key None stands for all others.

    `timeout`: how long to wait for the device's work, in seconds; None: as long as it takes. Copying is not limited by it.

    `backup`: a policy for all of it, in place of each allocation's own. Not with a mapping, which has its own.

    `live_only`: with torch, what its allocator holds as free is not copied and reads as anything after the resume. So
    other threads must not make tensors while this runs, as what they write may be lost; a `RuntimeWarning` says if one
    did. With ``live_only=False`` all of it is kept.

    Raises `errors.NotPreloaded`, `errors.UnknownTag`, `errors.HostMemory`, `errors.Disk`, `errors.Busy` after the timeout,
    `errors.Capturing` while a CUDA graph is being captured, `errors.Driver`, `errors.Work`.
    """
    library = _library.get()
    policies = _request.policies(tag, backup)
    entries = _library.tags(policies)
    timeout_ms = _library.milliseconds(timeout)
    free = _torch.Free([], 0)
    if live_only and _torch.is_used():
        free = _free_of(policies)
    library.call("pause_tags", entries, len(entries), timeout_ms, _library.ranges(free.ranges), len(free.ranges))
    report = Report._from(library.json("last_report_json"))
    lost = _torch.taken_since(free)
    if lost:
        warnings.warn(
            f"another thread made tensors of {lost} bytes while vramctl.pause() ran; what it wrote to them may not have been "
            "kept. Pause while no other thread allocates, or with live_only=False",
            RuntimeWarning,
            stacklevel=2,
        )
    return report


def resume(tag: str | Iterable[str] | None = None, *, timeout: float | None = 0.0) -> Report:
    """Puts new memory at the addresses of a tag and the kept contents into it; discarded contents read as zero.

    All of it or, after an error, nothing; what is active already is left alone.

    `tag`: one, several, or None for all. `timeout`: how long to wait for memory that other processes hold, in seconds;
    None: without limit.

    Raises `errors.NotPreloaded`, `errors.UnknownTag`, `errors.DeviceMemory` (with what is needed, what is free and who has
    the rest), `errors.Disk`, `errors.Driver`.
    """
    library = _library.get()
    names = (ctypes.c_char_p * len(chosen))(*map(_library.tag, chosen)) if (chosen := _request.names(tag)) else None
    library.call("resume_tags", names, len(chosen), _library.milliseconds(timeout))
    return Report._from(library.json("last_report_json"))


def _free_of(policies: Mapping[str | None, str]) -> _torch.Free:
    """What torch holds as free under the tags of which only live blocks are kept. To ask it takes longer than a pause that
    keeps nothing, or finds nothing changed.
    """
    there = status()

    def is_of_use(tag: Tag) -> bool:
        policy = policies.get(tag.tag, policies.get(None, "discard"))
        # What is retained is kept whole, to be compared with what is there next time.
        return not tag.retained and any(each != "discard" for each in (tag.backup if policy == "default" else [policy]))

    asked = [tag.tag for tag in there.tags if is_of_use(tag)]
    return _torch.free(asked, there.process_tag) if asked else _torch.Free([], 0)


def status() -> Status:
    """What this process has under management, by tag and by device. Does not wait for a pause or resume under way.
    Raises `errors.NotPreloaded`.
    """
    return Status._from(_library.get().json("status_json"))


def retain(tag: str | None, keep: bool | None) -> None:
    """Whether the saved contents of a tag stay in host memory after a resume, so that the next pause copies only what has
    changed. `tag` None: every tag without a setting of its own. `keep` None: as ``VRAMCTL_RETAIN`` says.
    Raises `errors.NotPreloaded`.
    """
    _library.get().call("set_retain", _library.tag(tag), -1 if keep is None else int(bool(keep)))


def set_disk_directory(path: str | os.PathLike[str] | None) -> None:
    """Where the policy ``disk`` keeps contents from now on: an existing directory on a drive; None: as ``VRAMCTL_DISK_DIR``
    says. What is in files already stays where it is. Raises `errors.NotPreloaded`, and `errors.Disk` where it is no directory.
    """
    _library.get().call("set_disk_directory", None if path is None else os.fsencode(path))


def set_memory_margin(bytes: int) -> None:
    """From now on, a managed allocation that would leave less than `bytes` of its device free is answered with out of
    memory; 0: none is. Raises `errors.NotPreloaded`.
    """
    if not 0 <= bytes < 1 << 64:
        raise errors.Invalid(f"a margin is a number of bytes from 0 on, not {bytes!r}")
    _library.get().call("set_memory_margin", bytes)


def backup_of(tensor_or_address: Any) -> memoryview:
    """The kept contents of paused memory, to read, without a copy.

    Of a tensor (anything with `data_ptr()`, `numel()`, `element_size()` and `is_contiguous()`): its bytes; of an address on
    the device: the bytes from there to its allocation's end. The view is of the library's memory: do not use it after the
    memory was resumed or freed.

    Raises `errors.NotPreloaded`, `errors.NotPaused` where no contents are kept in host memory for it, and `errors.Invalid`
    for a tensor that is not contiguous.
    """
    address, wanted = tensor_or_address, None
    if hasattr(tensor_or_address, "data_ptr"):
        tensor = tensor_or_address
        if not tensor.is_contiguous():
            raise errors.Invalid("the tensor is not contiguous: ask for the backup of the one that it is a view of")
        address, wanted = tensor.data_ptr(), tensor.numel() * tensor.element_size()
        if wanted == 0:
            return memoryview(b"")
    library = _library.get()
    pointer, size = ctypes.c_void_p(), ctypes.c_size_t()
    library.call("backup_pointer", ctypes.c_void_p(address), ctypes.byref(pointer), ctypes.byref(size))
    length = size.value if wanted is None else wanted
    if length > size.value:
        raise errors.Invalid(f"the tensor has {length} bytes, and its allocation only {size.value} more from there on")
    contents = (ctypes.c_ubyte * length).from_address(pointer.value or 0)
    return memoryview(contents).cast("B").toreadonly()
