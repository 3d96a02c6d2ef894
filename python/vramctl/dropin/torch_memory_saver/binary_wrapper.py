"""torch_memory_saver's C functions, as the library exports them."""

from __future__ import annotations

import ctypes
from typing import Any

_text, _flag, _bytes = ctypes.c_char_p, ctypes.c_bool, ctypes.POINTER(ctypes.c_uint8)

#: Name, result, arguments.
_FUNCTIONS: tuple[tuple[str, Any, list[Any]], ...] = (
    ("tms_pause", ctypes.c_int, [_text]),
    ("tms_resume", ctypes.c_int, [_text]),
    ("tms_get_current_tag", _text, []),
    ("tms_set_current_tag", None, [_text]),
    ("tms_get_interesting_region", _flag, []),
    ("tms_set_interesting_region", None, [_flag]),
    ("tms_get_enable_cpu_backup", _flag, []),
    ("tms_set_enable_cpu_backup", None, [_flag]),
    ("tms_get_cpu_backup_backend", _text, []),
    ("tms_set_cpu_backup_backend", None, [_text]),
    ("tms_get_enable_disk_backup", _flag, []),
    ("tms_set_enable_disk_backup", None, [_flag]),
    ("tms_get_retain_cpu_backup", _flag, []),
    ("tms_set_retain_cpu_backup", None, [_flag]),
    ("tms_set_disk_backup_dir", None, [_text]),
    ("tms_get_cpu_backup_pointer", _bytes, [_bytes, ctypes.c_uint64]),
    ("set_memory_margin_bytes", None, [ctypes.c_uint64]),
)


class BinaryWrapper:
    """The process's library; call its functions as ``cdll.tms_…``."""

    def __init__(self, path_binary: str | None = None, path: str | None = None) -> None:
        """`path_binary` or `path`: the library's file; None if it is preloaded."""
        self.cdll = ctypes.CDLL(path_binary or path)
        for name, result, arguments in _FUNCTIONS:
            function = getattr(self.cdll, name)
            function.restype, function.argtypes = result, arguments

    def set_config(
        self,
        *,
        tag: str,
        interesting_region: bool,
        enable_cpu_backup: bool,
        cpu_backup_backend: str | None = None,
        enable_disk_backup: bool = False,
    ) -> None:
        """Configures future allocations of the calling thread in its current region."""
        self.cdll.tms_set_current_tag(tag.encode())
        self.cdll.tms_set_interesting_region(interesting_region)
        self.cdll.tms_set_enable_cpu_backup(enable_cpu_backup)
        self.cdll.tms_set_enable_disk_backup(enable_disk_backup)
        if cpu_backup_backend is not None:
            self.cdll.tms_set_cpu_backup_backend(cpu_backup_backend.encode())
