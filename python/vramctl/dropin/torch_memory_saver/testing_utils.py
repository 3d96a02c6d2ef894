"""torch_memory_saver's measuring helpers, which some programs import."""

from __future__ import annotations

from typing import Any

import torch

from .utils import is_xpu


def get_device() -> str:
    """Torch's name for the device type."""
    return "xpu" if is_xpu() else "cuda"


def empty_cache() -> None:
    """Makes torch release its cached memory."""
    _device_module().empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Prints and returns the bytes in use on the device, by all processes."""
    free, total = _device_module().mem_get_info(gpu_id)
    used = int(total - free)
    print(f"{message}: {used / 2**30:.2f} GiB in use on GPU {gpu_id}")
    return used


def _device_module() -> Any:
    return getattr(torch, get_device())
