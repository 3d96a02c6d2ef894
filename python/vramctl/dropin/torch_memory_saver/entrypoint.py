"""`TorchMemorySaver`: torch_memory_saver's interface, implemented with vramctl."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator, MutableMapping
from typing import TYPE_CHECKING, Any, Literal

from ._vramctl import Invalid, NotPreloaded, vramctl
from .binary_wrapper import BinaryWrapper
from .hooks.base import HookMode, HookUtilBase

if TYPE_CHECKING:
    from vramctl._request import Backup

CpuBackupBackend = Literal["pinned", "mmap"]

_DEFAULT_TAG = "default"
_HOOK_MODES = ("preload", "torch")
_BACKENDS = ("pinned", "mmap")


class TorchMemorySaver:
    """Pauses and resumes the GPU memory of tensors by tag. Thread-safe; a region applies to the thread that entered it.

    Raises exceptions from `vramctl.errors`, all of them `RuntimeError`. A call that raises has changed nothing.
    """

    def __init__(self) -> None:
        self._hook_mode: HookMode = "preload"
        self._memory_margin_bytes = 0
        #: None until first use: programs read it to see whether the saver is in use.
        self._impl: _TorchMemorySaverImpl | None = None

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Tags the tensors that the calling thread creates inside. Regions nest; the innermost wins.

        Without a backup, a pause drops the contents, and they read as zero after the resume. `enable_cpu_backup` keeps
        them in host memory, `enable_disk_backup` in a file in the `set_disk_backup_dir` directory; use one of the two.
        Host memory is pinned while it is needed. With the `cpu_backup_backend` ``mmap`` it is returned to the system
        before `resume` returns; with ``pinned`` it may stay ready for the next pause for a while.
        """
        with self._ensure_initialized().region(tag, enable_cpu_backup, enable_disk_backup, cpu_backup_backend):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any = None,
        stream: Any = None,
        capture_error_mode: str = "global",
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """``torch.cuda.graph``, with the graph's own memory tagged `tag`. The other arguments are those of `region`.
        Requires the preloaded library.
        """
        with self._ensure_initialized().cuda_graph(
            cuda_graph, pool, stream, capture_error_mode, tag, enable_cpu_backup, cpu_backup_backend
        ):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """Leaves what the calling thread allocates inside to CUDA: it is never paused and can be shared by CUDA IPC. At the
        end, its cached memory returns to the device as soon as no tensor uses it.
        """
        with self._ensure_initialized().disable():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Returns the GPU memory of a tag, or of all tags, to the driver. Do not use the memory until `resume`. A no-op for
        paused or unknown tags.
        """
        self._ensure_initialized().pause(tag)

    def resume(self, tag: str | None = None) -> None:
        """Restores the memory at the same addresses, with the saved contents. A no-op for active or unknown tags. Raises
        `vramctl.errors.DeviceMemory` if there is too little memory; everything then stays paused.
        """
        self._ensure_initialized().resume(tag)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """The contents of a tensor at its last pause, as a CPU tensor; None if host memory has no backup of it, or if it is
        active and not retained.

        With `zero_copy`, the result is the backup itself: do not write to it. It is valid until the resume, or, if retained,
        until the next resume without retention or until another pause runs short of host memory.
        """
        return self._ensure_initialized().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Sets the directory for new disk backups, one file per allocation, and creates it if necessary. Removes files that
        killed processes left there.
        """
        os.makedirs(path, exist_ok=True)
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_disk_backup_dir(os.fsencode(path))

    @property
    def enabled(self) -> bool:
        """Always True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """``preload``: the library intercepts the CUDA runtime and must be preloaded. ``torch``: torch allocates regions
        through it, with no preload; if it is preloaded anyway, this works like ``preload``. Set it before first use.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in _HOOK_MODES:
            raise ValueError(f"hook_mode must be {' or '.join(map(repr, _HOOK_MODES))}, not {hook_mode!r}")
        # With the library preloaded, both modes are the same.
        if self._impl is not None and hook_mode != self._hook_mode and not vramctl.is_preloaded():
            raise RuntimeError(f"hook_mode {self._hook_mode!r} is already in use: set hook_mode before anything else")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """Allocations in regions fail with out of memory if they would leave less than this free on the device; 0: off."""
        return self._memory_margin_bytes

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized()
        vramctl.set_memory_margin(value)
        self._memory_margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether backups stay in host memory after future resumes, so that the next pause copies only what has changed and
        `get_cpu_backup` finds them in the meantime.
        """
        return bool(self._ensure_initialized()._binary_wrapper.cdll.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized()._binary_wrapper.cdll.tms_set_retain_cpu_backup(bool(value))

    def _ensure_initialized(self) -> _TorchMemorySaverImpl:
        if self._impl is None:
            self._impl = _TorchMemorySaverImpl(self._hook_mode)
        return self._impl


class _TorchMemorySaverImpl:
    """The state behind `TorchMemorySaver`, created on first use."""

    def __init__(self, hook_mode: HookMode = "preload") -> None:
        preloaded = vramctl.is_preloaded()
        self._hook_mode = hook_mode
        # With the library preloaded, both modes are the same.
        self._hook_util = HookUtilBase.create("preload" if preloaded else hook_mode)
        path = self._hook_util.get_path_binary()
        if not preloaded:
            from vramctl import _torch

            _torch.use_allocator(self._hook_util.get_allocator())
        # Never load the preloaded file again: it may have been replaced meanwhile.
        self._binary_wrapper = BinaryWrapper(path_binary=None if preloaded else path)
        self._mem_pools = _MemPools()

    @contextlib.contextmanager
    def region(
        self, tag: str, enable_cpu_backup: bool, enable_disk_backup: bool, cpu_backup_backend: CpuBackupBackend | None
    ) -> Iterator[None]:
        backup = _backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self.backend(cpu_backup_backend), vramctl.region(tag, backup):
            yield

    @contextlib.contextmanager
    def cuda_graph(
        self,
        cuda_graph: Any,
        pool: Any,
        stream: Any,
        capture_error_mode: str,
        tag: str,
        enable_cpu_backup: bool,
        cpu_backup_backend: CpuBackupBackend | None,
    ) -> Iterator[None]:
        backup = _backup(enable_cpu_backup, False, cpu_backup_backend)
        if not vramctl.is_preloaded():
            raise NotPreloaded(
                "pausing a CUDA graph's memory requires the preloaded library: start the program with "
                "`vramctl run -- python …`, or capture with torch.cuda.graph(), whose memory is never paused"
            )
        with (
            self.backend(cpu_backup_backend),
            vramctl.cuda_graph(
                cuda_graph, tag=tag, backup=backup, pool=pool, stream=stream, capture_error_mode=capture_error_mode
            ),
        ):
            yield

    def pause(self, tag: str | None) -> None:
        with contextlib.suppress(vramctl.errors.UnknownTag):
            vramctl.pause(tag or None)

    def resume(self, tag: str | None) -> None:
        with contextlib.suppress(vramctl.errors.UnknownTag):
            vramctl.resume(tag or None)

    @contextlib.contextmanager
    def _with_region_config(
        self, tag: str, enable_cpu_backup: bool, cpu_backup_backend: str | None = None, enable_disk_backup: bool = False
    ) -> Iterator[None]:
        """`region` for memory that the calling thread allocates without torch's pools."""
        backup = _backup(enable_cpu_backup, enable_disk_backup, None)
        with self.backend(cpu_backup_backend), vramctl.region(tag, backup, pool=False):
            yield

    @contextlib.contextmanager
    def backend(self, name: str | None) -> Iterator[None]:
        """Makes `tms_get_cpu_backup_backend` return `name` inside; None changes nothing."""
        cdll = self._binary_wrapper.cdll
        before = cdll.tms_get_cpu_backup_backend()
        if name is not None:
            cdll.tms_set_cpu_backup_backend(name.encode())
        try:
            yield
        finally:
            cdll.tms_set_cpu_backup_backend(before)

    @contextlib.contextmanager
    def disable(self, dispose_mem_pool_after_use: bool = True) -> Iterator[None]:
        # A separate pool, so that no tagged cached memory is used; a temporary one, so that it is not held afterwards.
        with vramctl.region(None, pool=False), vramctl._torch.pool_for_once(None):
            yield

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        torch = _torch_with_gpu()
        if torch is None or not x.is_cuda or not x.is_contiguous():
            raise Invalid("get_cpu_backup() needs a contiguous CUDA tensor")
        if x.numel() == 0:
            return torch.empty(x.shape, dtype=x.dtype)
        address = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
        kept = self._binary_wrapper.cdll.tms_get_cpu_backup_pointer(address, x.nbytes)
        if not kept:
            return None
        contents = (ctypes.c_uint8 * x.nbytes).from_address(ctypes.addressof(kept.contents))
        tensor = torch.frombuffer(contents, dtype=torch.uint8).view(x.dtype).view(x.shape)
        return tensor if zero_copy else tensor.clone()


class _MemPools(MutableMapping[Any, Any]):
    """Torch's pools, by (tag, backup in host memory, on disk, its backend, device). To remove one has its memory freed once no tensor
    uses it.
    """

    @staticmethod
    def _keys() -> dict[tuple[str, bool, bool, str, int], Any]:
        found: dict[tuple[str, bool, bool, str, int], Any] = {}
        for key in vramctl._torch.idle_pools():
            tag, backup, device = key
            if tag is not None:
                for backend in _BACKENDS if backup == "host" else ("",):
                    found[tag, backup == "host", backup == "disk", backend, device] = key
        return found

    def __getitem__(self, key: Any) -> Any:
        return vramctl._torch.idle_pools()[self._keys()[key]]

    def __setitem__(self, key: Any, pool: Any) -> None:
        raise Invalid("a region makes its pool")

    def __delitem__(self, key: Any) -> None:
        vramctl._torch.forget_pools(self._keys()[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._keys())

    def __len__(self) -> int:
        return len(self._keys())

    def clear(self) -> None:
        for key in set(self._keys().values()):
            vramctl._torch.forget_pools(key)


def _backup(in_memory: bool, on_disk: bool, backend: str | None) -> Backup:
    """Maps torch_memory_saver's flags to a vramctl policy."""
    if in_memory and on_disk:
        raise Invalid("enable_cpu_backup and enable_disk_backup are mutually exclusive")
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"cpu_backup_backend must be {' or '.join(map(repr, _BACKENDS))}, not {backend!r}")
    if backend is not None and not in_memory:
        raise ValueError("cpu_backup_backend requires enable_cpu_backup=True")
    return "host" if in_memory else "disk" if on_disk else "discard"


def _torch_with_gpu() -> Any:
    """torch, if it has a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None
