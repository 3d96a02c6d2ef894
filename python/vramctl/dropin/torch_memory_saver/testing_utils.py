"""What torch_memory_saver's tests measure with, for programs that use it too."""

from __future__ import annotations

from typing import Any

import torch

from .utils import is_xpu


def get_device() -> str:
    """The kind of device whose memory is measured, as torch names it."""
    return "xpu" if is_xpu() else "cuda"


def empty_cache() -> None:
    """Has torch give back what it holds as free."""
    _device_module().empty_cache()


def get_and_print_gpu_memory(message: str, gpu_id: int = 0) -> int:
    """Bytes in use on the device, by whomever; printed with the message."""
    free, total = _device_module().mem_get_info(gpu_id)
    used = int(total - free)
    print(f"{message}: {used / 2**30:.2f} GiB in use on GPU {gpu_id}")
    return used


def _device_module() -> Any:
    return getattr(torch, get_device())
