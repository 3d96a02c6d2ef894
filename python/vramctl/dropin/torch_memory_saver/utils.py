"""Locates the library for callers that set ``LD_PRELOAD`` themselves, and detects the GPU vendor."""

from __future__ import annotations

import os
from pathlib import Path

from ._vramctl import DIRECTORY, vramctl

#: The file name under which frameworks look for torch_memory_saver's library. One library serves every CUDA runtime.
PRELOAD = "torch_memory_saver_hook_mode_preload"


def get_binary_path_from_package(stem: str) -> Path:
    """The library's file for `stem`, such as ``torch_memory_saver_hook_mode_preload``. Both hook modes use the same library.

    Looks for a file of that name beside the package (an installed wheel), then ``VRAMCTL_LIB``, then ``libvramctl.so``.
    Raises `vramctl.errors.NotPreloaded` if there is none.
    """
    named = DIRECTORY / "dropin" / f"{stem}.abi3.so"
    chosen = os.environ.get("VRAMCTL_LIB")
    if named.is_file():
        return named
    return Path(chosen).absolute() if chosen else Path(vramctl.library_path())


def is_xpu() -> bool:
    """Whether torch's GPUs are Intel's, which vramctl does not manage."""
    try:
        import torch
    except ImportError:
        return False
    xpu = getattr(torch, "xpu", None)
    return xpu is not None and bool(xpu.is_available())


def is_library(path: str) -> bool:
    """Whether an ``LD_PRELOAD`` entry is this library, under any of its names."""
    file = Path(path)
    return file.name == "libvramctl.so" or (file.name.startswith(PRELOAD) and file.parent.parts[-2:] == ("vramctl", "dropin"))
