"""Locates the library for callers that set ``LD_PRELOAD`` themselves, and detects the GPU's vendor and the CUDA runtime."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterator
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


def _is_rocm_torch() -> bool:
    """Whether torch's GPUs are AMD's, which vramctl does not manage."""
    try:
        import torch
    except ImportError:
        return False
    return bool(getattr(torch.version, "hip", None))


def _detect_cuda_major() -> int:
    """The CUDA runtime's major version: torch's, else that of the newest that the loader finds. Raises RuntimeError if there is none."""
    try:
        import torch

        version = getattr(torch.version, "cuda", None) or ""
    except ImportError:
        version = ""
    major = version.partition(".")[0]
    if major.isdigit():
        return int(major)
    for known in (13, 12):
        with contextlib.suppress(OSError):
            ctypes.CDLL(f"libcudart.so.{known}")
            return known
    raise RuntimeError("there is no CUDA runtime: torch was built without CUDA, and neither libcudart.so.13 nor .12 is found")


@contextlib.contextmanager
def change_env(key: str, value: str) -> Iterator[None]:
    """Sets a variable of the process's environment inside."""
    before = os.environ.get(key)
    os.environ[key] = value
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(key, None)
        else:
            os.environ[key] = before


def is_library(path: str) -> bool:
    """Whether an ``LD_PRELOAD`` entry is this library, under any of its names."""
    file = Path(path)
    return file.name == "libvramctl.so" or (file.name.startswith(PRELOAD) and file.parent.parts[-2:] == ("vramctl", "dropin"))
