"""Hook mode ``torch``: torch allocates regions through the library, which intercepts nothing else."""

from __future__ import annotations

import ctypes
from typing import Any

from ..utils import get_binary_path_from_package
from .base import HookUtilBase


class HookUtilModeTorch(HookUtilBase):
    """The library as an allocator of torch's. Loads it."""

    def __init__(self) -> None:
        import torch

        from vramctl import _library

        path = self.get_path_binary()
        _library.open(path)
        self.allocator = torch.cuda.memory.CUDAPluggableAllocator(path, "tms_torch_malloc", "tms_torch_free")
        # Leak a reference: the allocator must outlive every pool, and pools live as long as the process.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.allocator))

    def get_path_binary(self) -> str:
        return str(get_binary_path_from_package("torch_memory_saver_hook_mode_torch"))

    def get_allocator(self) -> Any:
        return self.allocator.allocator()
