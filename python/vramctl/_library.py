"""The library that is preloaded in this process, found through the loader and never loaded a second time.

A second copy would have a map of its own, with no allocation in it. So nothing here opens a file: the functions are
looked up in the global scope, where a preloaded library is, and nowhere else.
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


#: The functions of `include/vramctl.h` that this package uses, with the types of their arguments.
_FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "region_begin": (_text, ctypes.c_int32),
    "region_end": (),
    "current_tag": (_text, _size, _pointer(_size)),
    "pause_tags": (_pointer(Tag), _size, ctypes.c_int64, _pointer(Range), _size),
    "resume_tags": (_pointer(_text), _size, ctypes.c_int64),
    "status_json": (_text, _size, _pointer(_size)),
    "last_report_json": (_text, _size, _pointer(_size)),
    "last_error_json": (_text, _size, _pointer(_size)),
    "backup_pointer": (ctypes.c_void_p, _pointer(ctypes.c_void_p), _pointer(_size)),
    "set_memory_margin": (ctypes.c_uint64,),
    "set_retain": (_text, ctypes.c_int32),
    "set_disk_directory": (_text,),
}

BACKUPS = {"default": 0, "discard": 1, "host": 2, "disk": 3}

_BUFFER_TOO_SMALL = errors.BufferTooSmall.number


class Library:
    """The functions of the preloaded library. Each may be called from any thread at any time.

    A call releases the interpreter's lock while it runs, so other Python threads go on during a pause.
    """

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
        """Calls `vramctl_NAME`; what it does not carry out is raised."""
        code = self._function(name)(*arguments)
        if code != 0:
            raise self._error(code)

    def read(self, name: str) -> str:
        """The text that `vramctl_NAME` writes into a buffer."""
        function, needed, capacity = self._function(name), _size(), 4096
        while True:
            buffer = ctypes.create_string_buffer(capacity)
            code = function(buffer, capacity, ctypes.byref(needed))
            if code == 0:
                return buffer.value.decode()
            if code != _BUFFER_TOO_SMALL:
                raise self._error(code)
            # It may be longer the next time.
            capacity = needed.value + 1024

    def json(self, name: str) -> dict[str, Any]:
        """The object that `vramctl_NAME` writes as JSON."""
        return dict(json.loads(self.read(name)))

    def _function(self, name: str) -> Callable[..., int]:
        function = self._functions.get(name)
        if function is None:
            try:
                function = getattr(self._scope, f"vramctl_{name}")
            except AttributeError:
                raise errors.Unsupported(
                    f"the preloaded library ({self.path() or 'of unknown path'}, version {self.version}) has no "
                    f"vramctl_{name}: it is older than this Python package. Start the program with the `vramctl run` "
                    "of the same installation"
                ) from None
            function.argtypes, function.restype = _FUNCTIONS[name], _code
            self._functions[name] = function
        return function

    def _error(self, code: int) -> errors.Error:
        message = (self._scope.vramctl_last_error() or b"").decode(errors="replace") or f"error {code}"
        reply: dict[str, Any] = {}
        # What the thread's last error is must be asked before anything else fails in it.
        if self.has("last_error_json"):
            with contextlib.suppress(errors.Error, ValueError):  # the message says the same
                reply = self.json("last_error_json")
        return errors._from_number(code, message, reply)

    def path(self) -> str | None:
        """The file that the library was loaded from; None where the loader does not say."""

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
    """The preloaded library; None: there is none. What is preloaded cannot change, so it is looked for once."""
    scope = ctypes.CDLL(None)
    return Library(scope) if hasattr(scope, "vramctl_version") else None


_opened: Library | None = None


def open(path: str) -> None:
    """Has this module use a library that is not preloaded, where none is. It answers none of CUDA's functions, and manages
    what it is asked for itself: as torch's pluggable allocator.
    """
    global _opened
    if find() is None and _opened is None:
        # Not into the global scope: what the dynamic linker binds later would find its functions, and what is bound already
        # would not.
        _opened = Library(ctypes.CDLL(path))


def get() -> Library:
    """The preloaded library, or the one that was opened; raises `NotPreloaded` with the way out."""
    library = find() or _opened
    if library is None:
        raise errors.NotPreloaded(
            "libvramctl.so is not preloaded in this process, so its GPU memory is not managed. "
            "Start the program with `vramctl run -- python …`"
        )
    return library


def tag(name: str | None) -> bytes | None:
    """A tag as the library takes it; it says itself what is wrong with the rest."""
    if name is None:
        return None
    if not isinstance(name, str):
        raise TypeError(f"a tag is a str or None, not {type(name).__name__}")
    encoded = name.encode()
    if b"\0" in encoded:
        raise errors.Invalid("a tag has no NUL in it")
    return encoded


def backup(name: str) -> int:
    """A backup policy as the library takes it."""
    return BACKUPS[_request.checked(name)]


def milliseconds(seconds: float | None) -> int:
    """A timeout as the library takes it."""
    limit = _request.milliseconds(seconds)
    return -1 if limit is None else limit


def tags(policies: Mapping[str | None, str]) -> Any:
    """Tags and their policies as an array of `VramctlTag`."""
    return (Tag * len(policies))(*(Tag(tag(name), backup(policy)) for name, policy in policies.items()))


def ranges(found: Sequence[tuple[int, int]]) -> Any:
    """(address, bytes) pairs as an array of `VramctlRange`."""
    return (Range * len(found))(*(Range(*pair) for pair in found))
