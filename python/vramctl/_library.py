"""Calls into the preloaded library, whose functions are looked up in the process's global scope.

Never load the file again: a second copy would have its own, empty registry.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import json
import os
from collections.abc import Mapping, Sequence
from typing import Any, Callable

from . import _request, errors

_text, _size, _code = ctypes.c_char_p, ctypes.c_size_t, ctypes.c_int32
_pointer = ctypes.POINTER


class Range(ctypes.Structure):
    """`VramctlRange`."""

    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


class Tag(ctypes.Structure):
    """`VramctlTag`."""

    _fields_ = [("tag", ctypes.c_char_p), ("backup", ctypes.c_int32)]


class PauseOptions(ctypes.Structure):
    """`VramctlPauseOptions`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("tags", ctypes.POINTER(Tag)),
        ("tag_count", ctypes.c_size_t),
        ("timeout_ms", ctypes.c_int64),
        ("unused", ctypes.POINTER(Range)),
        ("unused_count", ctypes.c_size_t),
    ]


class ResumeOptions(ctypes.Structure):
    """`VramctlResumeOptions`."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("tags", ctypes.POINTER(ctypes.c_char_p)),
        ("tag_count", ctypes.c_size_t),
        ("timeout_ms", ctypes.c_int64),
    ]


class Segment(ctypes.Structure):
    """`VramctlSegment`."""

    _fields_ = [("address", ctypes.c_void_p), ("bytes", ctypes.c_size_t), ("live_bytes", ctypes.c_size_t)]


#: The functions of `include/vramctl.h` that this package uses, with their argument types.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "region_begin": (_text, ctypes.c_int32),
    "region_end": (),
    "current_tag": (_text, _size, _pointer(_size)),
    "pause_with": (_pointer(PauseOptions),),
    "resume_with": (_pointer(ResumeOptions),),
    "status_json": (_text, _size, _pointer(_size)),
    "last_report_json": (_text, _size, _pointer(_size)),
    "last_error_json": (_text, _size, _pointer(_size)),
    "backup_pointer": (ctypes.c_void_p, _pointer(ctypes.c_void_p), _pointer(_size)),
    "set_memory_margin": (ctypes.c_uint64,),
    "set_retain": (_text, ctypes.c_int32),
    "set_disk_directory": (_text,),
    "cache_wait": (_pointer(ctypes.c_int32),),
    "cache_report": (_pointer(Segment), _size),
    "cache_answer": (_text,),
    "trim": (ctypes.c_int64,),
    "prefix_cache_wait": (_pointer(ctypes.c_uint64),),
    "prefix_cache_answer": (ctypes.c_uint64, ctypes.c_int32),
    "prefix_cache_idle": (ctypes.c_int32,),
    "cache_unused_begin": (_pointer(ctypes.c_int32),),
    "cache_unused_end": (),
    "set_watch": (ctypes.c_uint64, ctypes.c_int32),
}

BACKUPS = {"default": 0, "discard": 1, "host": 2, "disk": 3}

_BUFFER_TOO_SMALL = errors.BufferTooSmall.number


class Library:
    """The preloaded library's functions. Thread-safe. Calls release the GIL, so other Python threads run during a pause."""

    def __init__(self, scope: ctypes.CDLL) -> None:
        self._scope = scope
        self._functions: dict[str, Callable[..., int]] = {}
        scope.vramctl_version.restype = _text
        scope.vramctl_last_error.restype = _text
        self.version: str = scope.vramctl_version().decode()

    def has(self, name: str) -> bool:
        """Whether the library has the function `vramctl_NAME`."""
        return hasattr(self._scope, f"vramctl_{name}")

    def call(self, name: str, *arguments: Any) -> None:
        """Calls `vramctl_NAME` and raises its error."""
        code = self._function(name)(*arguments)
        if code != 0:
            raise self._error(code)

    def read(self, name: str) -> str:
        """Returns the text that `vramctl_NAME` writes into a buffer."""
        function, needed, capacity = self._function(name), _size(), 4096
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            code = function(buffer, capacity, ctypes.byref(needed))
            if code == 0:
                return buffer.value.decode()
            if code != _BUFFER_TOO_SMALL:
                raise self._error(code)
            # The text may grow before the next call.
            capacity = needed.value + 1024

    def json(self, name: str) -> dict[str, Any]:
        """Returns the JSON object that `vramctl_NAME` writes."""
        return dict(json.loads(self.read(name)))

    def _function(self, name: str) -> Callable[..., int]:
        function = self._functions.get(name)
        if function is None:
            try:
                function = getattr(self._scope, f"vramctl_{name}")
            except AttributeError:
                raise errors.Unsupported(
                    f"the preloaded library ({self.path() or 'path unknown'}, version {self.version}) has no "
                    f"vramctl_{name}: it is older than this Python package. Start the program with the `vramctl run` "
                    "of the same installation"
                ) from None
            function.argtypes, function.restype = _FUNCTIONS[name], _code
            self._functions[name] = function
        return function

    def _error(self, code: int) -> errors.Error:
        message = (self._scope.vramctl_last_error() or b"").decode(errors="replace") or f"error {code}"
        reply: dict[str, Any] = {}
        # Read the thread's last error before another call overwrites it.
        if self.has("last_error_json"):
            with contextlib.suppress(errors.Error, ValueError):  # the message has the same facts
                reply = self.json("last_error_json")
        return errors._from_number(code, message, reply)

    def path(self) -> str | None:
        """The file that the library was loaded from; None if the loader does not know."""

        class Info(ctypes.Structure):
            _fields_ = [
                ("file", ctypes.c_char_p),
                ("base", ctypes.c_void_p),
                ("symbol", ctypes.c_char_p),
                ("address", ctypes.c_void_p),
            ]

        info = Info()
        address = ctypes.cast(self._scope.vramctl_version, ctypes.c_void_p)
        self._scope.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(Info)]
        if not self._scope.dladdr(address, ctypes.byref(info)) or not info.file:
            return None
        return os.fsdecode(info.file)


@functools.cache
def find() -> Library | None:
    """The preloaded library; None if there is none. Cached, because that cannot change."""
    scope = ctypes.CDLL(None)
    return Library(scope) if hasattr(scope, "vramctl_version") else None


_opened: Library | None = None


def open(path: str) -> None:
    """Loads the library if none is preloaded. It then intercepts no CUDA functions and manages only what is allocated through
    it, as torch's pluggable allocator.
    """
    global _opened
    if find() is None and _opened is None:
        # Keep it out of the global scope: symbols bound from now on would resolve to it, symbols bound earlier would not.
        _opened = Library(ctypes.CDLL(path))


def get() -> Library:
    """The preloaded library, or the one that was opened. Raises `NotPreloaded`."""
    library = find() or _opened
    if library is None:
        raise errors.NotPreloaded(
            "libvramctl.so is not preloaded in this process, so its GPU memory is not managed. "
            "Start the program with `vramctl run -- python …`"
        )
    return library


def tag(name: str | None) -> bytes | None:
    """Encodes a tag for the library, which does the rest of the validation."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"a tag must be a str or None, not {type(name).__name__}")
    encoded = name.encode()
    if b"\0" in encoded:
        raise errors.Invalid("a tag must not contain NUL")
    return encoded


def backup(name: str) -> int:
    """Encodes a backup policy for the library."""
    return BACKUPS[_request.checked(name)]


def milliseconds(seconds: float | None) -> int:
    """Encodes a timeout for the library: -1 means no limit."""
    limit = _request.milliseconds(seconds)
    return -1 if limit is None else limit


def tags(policies: Mapping[str | None, str]) -> Any:
    """An array of `VramctlTag`."""
    return (Tag * len(policies))(*(Tag(tag(name), backup(policy)) for name, policy in policies.items()))


def ranges(found: Sequence[tuple[int, int]]) -> Any:
    """An array of `VramctlRange` from (address, bytes) pairs."""
    return (Range * len(found))(*(Range(*pair) for pair in found))
