"""Resets an idle engine's prefix cache when somebody is about to take its memory, so that its KV cache need not be kept.

Only for programs that share their GPUs or are to be saved (`vramctl run --share`, `--image`), unless they keep their caches (`--keep-cache`). A daemon thread waits in the
library, and passes each request on to the engine's own loop, which alone may reset the cache, and answers. The library keeps the contents if
the loop does not answer, or if any call has started device work since the reset.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable

from .. import _library, errors
from . import say_once

#: As long as the library waits for an answer.
_WITHIN_S = 0.2

_is_served = False
_is_idle = False


def _start_anew() -> None:
    """In a forked child, which does not have the thread."""
    global _is_served, _is_idle
    _is_served = _is_idle = False


os.register_at_fork(after_in_child=_start_anew)


class Request:
    """Somebody is about to take memory of this engine."""

    def __init__(self, library: _library.Library, number: int) -> None:
        self._library, self._number = library, number
        self._until = time.monotonic() + _WITHIN_S

    def answer(self, reset: Callable[[], object]) -> None:
        """On the engine's loop: resets the prefix cache if that can still be of use. Then waits until the program is held, at most 0.2 s.

        `reset` returns whether it did. Whoever asks has the answer also if it raises.
        """
        is_reset = False
        try:
            is_reset = time.monotonic() < self._until and bool(reset())
        finally:
            self._library.call("prefix_cache_answer", self._number, int(is_reset))


def is_wanted() -> bool:
    """Whether somebody may ask."""
    library = _library.find()
    if library is None or not library.has("prefix_cache_idle"):
        return False
    try:
        library.call("prefix_cache_idle", 0)
    except errors.Invalid:
        return False
    return True


def serve(pass_on: Callable[[Request], object]) -> None:
    """Has requests passed on to the engine's loop, from any thread. Idempotent."""
    global _is_served
    library = _library.find()
    if library is not None and not _is_served:
        threading.Thread(target=_work, args=(library, pass_on), name="vramctl-prefix-cache", daemon=True).start()
        _is_served = True


def set_idle(is_idle: bool) -> None:
    """On the engine's loop: whether it has no requests now."""
    global _is_idle
    if is_idle != _is_idle:
        _library.get().call("prefix_cache_idle", int(is_idle))
        _is_idle = is_idle


def _work(library: _library.Library, pass_on: Callable[[Request], object]) -> None:
    # The program's signals are for the program's threads.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    number = ctypes.c_uint64()
    try:
        while True:
            library.call("prefix_cache_wait", ctypes.byref(number))
            pass_on(Request(library, number.value))
    except Exception:
        say_once("an idle engine's KV cache is kept from now on, because of an error", exc_info=True)
