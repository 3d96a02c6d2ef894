"""Returns the memory that torch has cached, when somebody asks: `vramctl trim`, `vramctl.trim()`.

A daemon thread of this package waits in the library, without the interpreter lock, and does what it is asked. A pending call on the
main thread would not do: an idle server's main thread waits in a system call and runs none, and idle is when a trim is wanted. Nor
would the library's own threads: one that waits for the interpreter lock when the interpreter exits would be killed there.

Other threads keep running: torch's allocator and the garbage collector work in any thread. The library has put this thread into the
relaxed capture mode, so that its frees do not invalidate the captures of others. `torch.cuda.synchronize()` would invalidate them, so
it is not called.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import threading
from typing import Any

from . import _library, _torch, errors

_TRIM = 2  # VRAMCTL_CACHE_TASK_TRIM
_MOST_ROUNDS = 3
#: A round that returns less is the last.
_WORTH_ANOTHER = 1 << 30

_lock = threading.Lock()
#: Whether this process has the thread.
_is_served = False


def _start_anew() -> None:
    """In a forked child: it has no such thread, and a thread that it does not have either may have held the lock."""
    global _lock, _is_served
    _lock, _is_served = threading.Lock(), False


os.register_at_fork(after_in_child=_start_anew)


def ensure() -> None:
    """Starts the thread if torch uses CUDA and the thread is not running."""
    if _torch.is_used():
        serve()


def serve() -> None:
    """Starts the thread, if this process has none. Idempotent."""
    global _is_served
    library = _library.find()
    with _lock:
        if library is None or not library.has("cache_wait") or _is_served:
            return
        # Announces the thread: requests from now on wait for it. Later, this call would answer the thread's first task.
        library.call("cache_answer", None)
        threading.Thread(target=_work, args=(library,), name="vramctl-trim", daemon=True).start()
        _is_served = True


def _work(library: _library.Library) -> None:
    # The program's signals are for the program's threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    task = ctypes.c_int32()
    try:
        while True:
            library.call("cache_wait", ctypes.byref(task))
            problem = None
            try:
                _do(library, task.value)
            except Exception as error:
                problem = f"{type(error).__name__}: {error}".encode(errors="replace").replace(b"\0", b" ")
            library.call("cache_answer", problem)
    except errors.Error:
        logging.getLogger("vramctl").warning("vramctl: torch's cache cannot be returned any more", exc_info=True)


def _do(library: _library.Library, task: int) -> None:
    torch = _torch.loaded()
    if torch is None or not _torch.is_used():
        raise errors.Unsupported("torch's own allocator is not in use")
    _report(library)
    if task != _TRIM:
        return
    before = _reserved(torch)
    for _ in range(_MOST_ROUNDS):
        gc.collect()
        torch.cuda.empty_cache()
        after = _reserved(torch)
        if before - after < _WORTH_ANOTHER:
            break
        before = after
    _report(library)


def _report(library: _library.Library) -> None:
    segments = _torch.segments()
    library.call(
        "cache_report", (_library.Segment * len(segments))(*(_library.Segment(*each) for each in segments)), len(segments)
    )


def _reserved(torch: Any) -> int:
    return sum(int(torch.cuda.memory_reserved(device)) for device in range(torch.cuda.device_count()))
