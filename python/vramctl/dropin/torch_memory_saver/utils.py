"""Where the library is, for those who put it into ``LD_PRELOAD`` themselves; which GPUs there are."""

from __future__ import annotations

import os
from pathlib import Path

from ._vramctl import DIRECTORY, vramctl

#: The library under the names by which frameworks look for torch_memory_saver's, beside the package. All are the same: it
#: works with every CUDA runtime.
PRELOAD = "torch_memory_saver_hook_mode_preload"


def get_binary_path_from_package(stem: str) -> Path:
    """The library's file for `stem`, such as ``torch_memory_saver_hook_mode_preload``. Both hook modes have the same one.

    A file of that name beside the package, as in an installed wheel; else what ``VRAMCTL_LIB`` names; else
    ``libvramctl.so``. Raises `vramctl.errors.NotPreloaded` where there is none.
    """
    named = DIRECTORY / "dropin" / f"{stem}.abi3.so"
    chosen = os.environ.get("VRAMCTL_LIB")
    if named.is_file():
        return named
    return Path(chosen).absolute() if chosen else Path(vramctl.library_path())


def is_xpu() -> bool:
    """Whether torch's GPUs are Intel's, whose memory vramctl does not manage."""
    try:
        import torch
    except ImportError:
        return False
    xpu = getattr(torch, "xpu", None)
    return xpu is not None and bool(xpu.is_available())


def is_library(path: str) -> bool:
    """Whether an entry of ``LD_PRELOAD`` is this library, under whichever name."""
    file = Path(path)
    return file.name == "libvramctl.so" or (file.name.startswith(PRELOAD) and file.parent.parts[-2:] == ("vramctl", "dropin"))
