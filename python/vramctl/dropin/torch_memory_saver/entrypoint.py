"""`TorchMemorySaver`: what torch_memory_saver offers, said in vramctl's words."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Literal

from ._vramctl import vramctl
from .binary_wrapper import BinaryWrapper
from .utils import get_binary_path_from_package

if TYPE_CHECKING:
    from vramctl._request import Backup

HookMode = Literal["preload", "torch"]
CpuBackupBackend = Literal["pinned", "mmap"]

_DEFAULT_TAG = "default"
_HOOK_MODES = ("preload", "torch")
_BACKENDS = ("pinned", "mmap")


class TorchMemorySaver:
    """Pauses and resumes the GPU memory of tensors by tag. Methods may be called from any thread; a region belongs to the
    thread that is in it.

    What cannot be done is raised as one of `vramctl.errors`, all of them a `RuntimeError`; nothing was changed then.
    """

    def __init__(self) -> None:
        self._hook_mode: HookMode = "preload"
        self._memory_margin_bytes = 0
        #: None until it is first used: programs look here to learn whether it is in use.
        self._impl: _TorchMemorySaverImpl | None = None

    @contextlib.contextmanager
    def region(
        self,
        tag: str = _DEFAULT_TAG,
        enable_cpu_backup: bool = False,
        enable_disk_backup: bool = False,
        cpu_backup_backend: CpuBackupBackend | None = None,
    ) -> Iterator[None]:
        """Tensors that the calling thread makes inside can be paused and resumed under `tag`. Regions nest; the innermost
        counts.

        Without a backup, a pause drops their contents, and they read as zero after the resume. `enable_cpu_backup` keeps
        them in host memory, `enable_disk_backup` in a file in the directory of `set_disk_backup_dir`; not both.
        `cpu_backup_backend` is taken for compatibility: host memory is pinned as long as it is needed, and given back.
        """
        backup = _backup(enable_cpu_backup, enable_disk_backup, cpu_backup_backend)
        with self._ensure_initialized().region(tag, backup, cpu_backup_backend):
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
        """Captures as ``torch.cuda.graph`` does; the memory that the graph allocates for itself can be paused under `tag`.
        The other arguments are those of `region`. Needs the library preloaded.
        """
        backup = _backup(enable_cpu_backup, False, cpu_backup_backend)
        impl = self._ensure_initialized()
        if not vramctl.is_preloaded():
            raise vramctl.errors.NotPreloaded(
                "the memory of a CUDA graph can be paused only where the library is preloaded: start the program with "
                "`vramctl run -- python …`, or capture with torch.cuda.graph(), whose memory stays"
            )
        with (
            impl.backend(cpu_backup_backend),
            vramctl.cuda_graph(
                cuda_graph, tag=tag, backup=backup, pool=pool, stream=stream, capture_error_mode=capture_error_mode
            ),
        ):
            yield

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        """What the calling thread allocates inside is left to CUDA and never paused: it can be shared with other processes
        (CUDA IPC), say. Its cached memory goes back to the device at the end, as soon as no tensor uses it.
        """
        with self._ensure_initialized().disable():
            yield

    def pause(self, tag: str | None = None) -> None:
        """Gives the GPU memory of a tag, or of all, back to the driver. What is paused already stays so; a tag that nothing
        has is nothing to do. The memory must not be used until `resume`.
        """
        self._ensure_initialized()
        with contextlib.suppress(vramctl.errors.UnknownTag):
            vramctl.pause(tag or None)

    def resume(self, tag: str | None = None) -> None:
        """Puts memory back at the same addresses, with what was kept. What is active already stays so; a tag that nothing
        has is nothing to do. Raises `vramctl.errors.DeviceMemory` where there is too little; everything stays paused then.
        """
        self._ensure_initialized()
        with contextlib.suppress(vramctl.errors.UnknownTag):
            vramctl.resume(tag or None)

    def get_cpu_backup(self, x: Any, zero_copy: bool = False) -> Any:
        """What a paused tensor held, as a tensor in host memory; None: it is not paused, or was not kept there.

        With `zero_copy` it is the backup itself, which must not be written to, nor used after the resume.
        """
        return self._ensure_initialized().get_cpu_backup(x, zero_copy)

    def set_disk_backup_dir(self, path: str | os.PathLike[str]) -> None:
        """Where pauses from now on keep what is kept on disk; made if it is not there."""
        self._ensure_initialized()
        os.makedirs(path, exist_ok=True)
        vramctl.set_disk_directory(path)

    @property
    def enabled(self) -> bool:
        """True."""
        return True

    @property
    def hook_mode(self) -> HookMode:
        """``preload``: the library answers the CUDA runtime's functions, so it must be preloaded. ``torch``: torch asks it for
        the memory of regions; it need not be preloaded, and is all the same used in the better way where it is. To be set
        before anything else.
        """
        return self._hook_mode

    @hook_mode.setter
    def hook_mode(self, hook_mode: HookMode) -> None:
        if hook_mode not in _HOOK_MODES:
            raise ValueError(f"hook_mode is {' or '.join(map(repr, _HOOK_MODES))}, not {hook_mode!r}")
        # Where the library is preloaded, both are the same.
        if self._impl is not None and hook_mode != self._hook_mode and not vramctl.is_preloaded():
            raise RuntimeError(f"hook_mode is {self._hook_mode!r} and in use: set it before anything else is asked for")
        self._hook_mode = hook_mode

    @property
    def memory_margin_bytes(self) -> int:
        """An allocation in a region that would leave less than so many bytes of its device free is out of memory; 0: no such
        margin.
        """
        return self._memory_margin_bytes

    @memory_margin_bytes.setter
    def memory_margin_bytes(self, value: int) -> None:
        self._ensure_initialized()
        vramctl.set_memory_margin(value)
        self._memory_margin_bytes = value

    @property
    def retain_cpu_backup(self) -> bool:
        """Whether what a pause keeps in host memory stays there after the resume, so that the next pause copies only what has
        changed. False gives up at once what is not needed.
        """
        return bool(self._ensure_initialized()._binary_wrapper.cdll.tms_get_retain_cpu_backup())

    @retain_cpu_backup.setter
    def retain_cpu_backup(self, value: bool) -> None:
        self._ensure_initialized()
        vramctl.retain(None, bool(value))

    def _ensure_initialized(self) -> _TorchMemorySaverImpl:
        if self._impl is None:
            self._impl = _TorchMemorySaverImpl(self._hook_mode)
        return self._impl


class _TorchMemorySaverImpl:
    """What there is once it is in use."""

    def __init__(self, hook_mode: HookMode = "preload") -> None:
        path = None
        if not vramctl.is_preloaded():
            if hook_mode == "preload":
                raise vramctl.errors.NotPreloaded(
                    "the library is not preloaded in this process, so CUDA's memory cannot be paused. Start the program with "
                    "`vramctl run -- python …`, start this process inside torch_memory_saver.configure_subprocess(), or set "
                    'torch_memory_saver.hook_mode = "torch"'
                )
            path = str(get_binary_path_from_package("torch_memory_saver_hook_mode_torch"))
            _use_as_allocator(path)
        self._hook_mode = hook_mode
        self._binary_wrapper = BinaryWrapper(path)

    @contextlib.contextmanager
    def region(self, tag: str, backup: Backup, cpu_backup_backend: str | None) -> Iterator[None]:
        with self.backend(cpu_backup_backend), vramctl.region(tag, backup):
            yield

    @contextlib.contextmanager
    def backend(self, name: str | None) -> Iterator[None]:
        """`tms_get_cpu_backup_backend` answers `name` inside; None: as before."""
        cdll = self._binary_wrapper.cdll
        before = cdll.tms_get_cpu_backup_backend()
        if name is not None:
            cdll.tms_set_cpu_backup_backend(name.encode())
        try:
            yield
        finally:
            cdll.tms_set_cpu_backup_backend(before)

    @contextlib.contextmanager
    def disable(self) -> Iterator[None]:
        # A pool of its own, so that no cached memory of a tag is used; and not for longer than it is needed.
        with vramctl.region(None, pool=False), vramctl._torch.pool_for_once(None):
            yield

    def get_cpu_backup(self, x: Any, zero_copy: bool) -> Any:
        torch = _torch_with_gpu()
        if torch is None or not x.is_cuda or not x.is_contiguous():
            raise vramctl.errors.Invalid("get_cpu_backup() takes a contiguous tensor on a GPU")
        if x.numel() == 0:
            return torch.empty(x.shape, dtype=x.dtype)
        address = ctypes.cast(x.data_ptr(), ctypes.POINTER(ctypes.c_uint8))
        kept = self._binary_wrapper.cdll.tms_get_cpu_backup_pointer(address, x.nbytes)
        if not kept:
            return None
        contents = (ctypes.c_uint8 * x.nbytes).from_address(ctypes.addressof(kept.contents))
        tensor = torch.frombuffer(contents, dtype=torch.uint8).view(x.dtype).view(x.shape)
        return tensor if zero_copy else tensor.clone()


def _backup(in_memory: bool, on_disk: bool, backend: str | None) -> Backup:
    """vramctl's word for what becomes of the contents."""
    if in_memory and on_disk:
        raise ValueError("enable_cpu_backup and enable_disk_backup exclude each other: choose where the contents are kept")
    if backend is not None and backend not in _BACKENDS:
        raise ValueError(f"cpu_backup_backend is {' or '.join(map(repr, _BACKENDS))}, not {backend!r}")
    if backend is not None and not in_memory:
        raise ValueError("cpu_backup_backend is of use with enable_cpu_backup=True only")
    return "host" if in_memory else "disk" if on_disk else "discard"


def _torch_with_gpu() -> Any:
    """torch, where it has a GPU."""
    try:
        import torch
    except ImportError:
        return None
    return torch if torch.cuda.is_available() else None


def _use_as_allocator(path: str) -> None:
    """Has torch ask the library for the memory of regions. It is not preloaded, and nothing else is answered by it."""
    import torch

    from vramctl import _library, _torch

    _library.open(path)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "tms_torch_malloc", "tms_torch_free")
    # It must outlive every pool, and those live as long as the process.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(allocator))
    _torch.use_allocator(allocator.allocator())
