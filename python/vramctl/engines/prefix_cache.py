"""Resets an idle engine's prefix cache when somebody is about to take its memory, so that its KV cache need not be kept.

Only for programs that share their GPUs or are to be saved (`vramctl run --share`, `--image`), unless they keep their caches (`--keep-cache`). A daemon thread waits in the
library, and passes each request on to the engine's own loop, which alone may reset the cache, and answers. The library keeps the contents if
the loop does not answer, or if any call has started device work since the reset.

An engine with several workers has its loop in a process without a GPU (`Workers`), and its KV cache in the workers' processes, each of which asks
the loop over a socket (`ask_loop_of`). What a worker's library sees is enough for that worker: a block that is described after the reset is written
by its calls after the reset.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import queue
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from .. import _library, errors
from . import say_once

#: As long as the library waits for an answer.
_WITHIN_S = 0.2

#: How often the loop looks whether a worker for which it waits has ended.
_LOOK_EVERY_S = 1.0

#: In place of a request's number, for a worker that has not asked.
_UNASKED = "0"

_is_served = False
_is_idle = False


def _start_anew() -> None:
    """In a forked child, which does not have the thread."""
    global _is_served, _is_idle, _has_loop, _is_unused, _has_listened, _workers
    _is_served = _is_idle = _has_loop = _is_unused = _has_listened = False
    _workers = None


os.register_at_fork(after_in_child=_start_anew)


class Request:
    """Somebody is about to take memory of this engine."""

    def __init__(self, library: _library.Library, number: int) -> None:
        self._library, self._number = library, number
        self._until = time.monotonic() + _WITHIN_S

    def answer(self, is_idle: Callable[[], bool], reset: Callable[[], object]) -> None:
        """On the engine's loop: resets the prefix cache if the engine is idle and that can still be of use. Then waits until the program is held, at
        most 0.2 s.

        `reset` returns whether it did. Whoever asks has the answer also if it raises.
        """
        is_late, is_reset = time.monotonic() >= self._until, False
        try:
            is_reset = not is_late and is_idle() and bool(reset())
        finally:
            self._library.call("prefix_cache_answer", self._number, int(is_reset))
        if is_late and is_idle():
            # It may be asked again: the loop says no more by itself before it has had a request.
            self._library.call("prefix_cache_idle", 1)


#: The engine's loop is in this process, or will be.
_has_loop = False
#: The KV cache is there, or about to be, and no request has used it.
_is_unused = False


def note_loop() -> None:
    """An engine begins whose loop is in this process."""
    global _has_loop
    _has_loop = True


@contextlib.contextmanager
def unused() -> Iterator[None]:
    """Around the allocation of an engine's KV cache, which is filled with zeros. Until `end_unused` it is worth nothing; in a process without the loop,
    which cannot know when the first request comes, until it is there."""
    global _is_unused
    library, counts = _library.find(), ctypes.c_int32()
    if library is not None and library.has("cache_unused_begin"):
        with contextlib.suppress(errors.Invalid):
            library.call("cache_unused_begin", ctypes.byref(counts))
    _is_unused = _is_unused or bool(counts.value)
    try:
        yield
    finally:
        if not _has_loop:
            end_unused()


def end_unused() -> None:
    """The engine is about to use its KV cache for a request, or nobody knows when it does. Idempotent."""
    global _is_unused
    if _is_unused:
        _library.get().call("cache_unused_end")
        _is_unused = False


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
        _is_served = True
        _start(lambda: _work(library, pass_on))


def set_idle(is_idle: bool) -> None:
    """On the engine's loop: whether it has no requests now."""
    global _is_idle
    if is_idle != _is_idle:
        _library.get().call("prefix_cache_idle", int(is_idle))
        _is_idle = is_idle


def _work(library: _library.Library, pass_on: Callable[[Request], object]) -> None:
    number = ctypes.c_uint64()
    while True:
        library.call("prefix_cache_wait", ctypes.byref(number))
        pass_on(Request(library, number.value))


# ---- an engine with several workers ----


def _address(pid: int) -> str:
    """Of the socket of an engine's loop: an abstract one, which ends with its process. Containers may share a network and have the same process
    ids, so it names their PID namespace, as those of CUDA do."""
    return f"\0vramctl-prefix-cache-{os.stat('/proc/self/ns/pid').st_ino}-{pid}"


def _peer(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end."""
    found = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, user, _ = struct.unpack("3i", found)
    return pid, user


def _is_child(pid: int) -> bool:
    """Whether that is a child of this process that has not ended."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state, parent = file.read().rpartition(b")")[2].split()[:2]
    except OSError:
        return False
    return int(parent) == os.getpid() and state not in (b"Z", b"X")


class Workers:
    """For an engine's loop: the workers in whose processes its KV cache is. They send `ask N` and `done N`, and get `reset N` or `kept N`, and
    `idle` or `busy`."""

    def __init__(self, pass_on: Callable[[Workers], object]) -> None:
        self._pass_on = pass_on
        #: What workers have sent, and when: `end` if one has ended.
        self._told: queue.SimpleQueue[tuple[float, socket.socket, str, str]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        #: Each with its worker's process. A connection in an image does not know that any more.
        self._connections: dict[socket.socket, int] = {}
        self._is_idle = False
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(_address(os.getpid()))
        self._listener.listen()
        _start(self._accept)

    def set_idle(self, is_idle: bool) -> None:
        """On the engine's loop: whether it has no requests now."""
        with self._lock:
            if is_idle != self._is_idle:
                self._is_idle = is_idle
                for connection in self._connections:
                    _send(connection, self._standing())

    def answer(self, is_idle: Callable[[], bool], reset: Callable[[], object]) -> None:
        """On the engine's loop: resets the prefix cache if the engine is idle, a worker has asked for it and that can still be of use. Then waits until each
        worker that has asked is held, or has waited for that, at most 0.2 s: meanwhile nothing is sent to any worker that could come between its reset and what
        its library sees from then on."""
        asked: dict[socket.socket, str] = {}
        with contextlib.suppress(queue.Empty):
            while True:
                when, connection, word, number = self._told.get_nowait()
                if word == "ask" and time.monotonic() < when + _WITHIN_S:
                    asked[connection] = number
                elif word == "ask":
                    self._tell_idle(connection, is_idle)
        if not asked:
            return
        is_reset = False
        try:
            is_reset = is_idle() and bool(reset())
        finally:
            # The others' caches are worth nothing either: of a job that is held, they may be the next to go, and cannot be asked any more.
            told = {**dict.fromkeys(self._there(), _UNASKED), **asked} if is_reset else asked
            word = "reset" if is_reset else "kept"
            sent = {connection: number for connection, number in told.items() if _send(connection, f"{word} {number}")}
        until, parked = time.monotonic() + _WITHIN_S, sent if is_reset else {}
        while parked:
            try:
                when, connection, word, number = self._told.get(timeout=_LOOK_EVERY_S)
            except queue.Empty:
                # A child of a worker's may keep the connection of one that has ended.
                there = self._there()
                parked = {connection: number for connection, number in parked.items() if _is_child(there.get(connection, 0))}
                continue
            if word == "end" or (word == "done" and parked.get(connection) == number):
                parked.pop(connection, None)
            elif word == "ask" and when >= until:
                _send(connection, f"kept {number}")
                self._tell_idle(connection, is_idle)
            elif word == "ask" and _send(connection, f"reset {number}"):
                parked[connection] = number

    def _tell_idle(self, connection: socket.socket, is_idle: Callable[[], bool]) -> None:
        """After a request that came to nothing, and not because the engine has requests: a worker whose loop does not answer counts as busy until that
        says otherwise, which it does by itself only after it has had a request."""
        if is_idle():
            _send(connection, "idle")

    def _there(self) -> dict[socket.socket, int]:
        with self._lock:
            return dict(self._connections)

    def _standing(self) -> str:
        return "idle" if self._is_idle else "busy"

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            pid, user = _peer(connection)
            # Others could keep the loop waiting.
            if user != os.getuid() or not _is_child(pid):
                connection.close()
                continue
            with self._lock:
                self._connections[connection] = pid
                _send(connection, self._standing())
            _start(functools.partial(self._hear, connection))

    def _hear(self, connection: socket.socket) -> None:
        try:
            for line in _lines(connection):
                word, number = line.split()
                self._told.put((time.monotonic(), connection, word, number))
                if word == "ask":
                    self._pass_on(self)
        finally:
            with self._lock:
                del self._connections[connection]
            self._told.put((time.monotonic(), connection, "end", ""))


_has_listened = False
_workers: Workers | None = None


def workers(pass_on: Callable[[Workers], object]) -> Workers | None:
    """On the engine's loop: its workers, which have requests passed on to it, from any thread. None if an earlier call has failed."""
    global _has_listened, _workers
    if not _has_listened:
        _has_listened = True
        _workers = Workers(pass_on)
    return _workers


def ask_loop_of(pid: int) -> None:
    """In a worker: has the loop in another process asked. Idempotent."""
    global _is_served
    library = _library.find()
    if library is not None and not _is_served:
        _is_served = True
        _start(lambda: _listen_to(library, pid))


def _listen_to(library: _library.Library, pid: int) -> None:
    connection = _connect(pid)
    if connection is None:
        return
    try:
        _start(lambda: _ask(library, connection))
        for line in _lines(connection):
            word, *number = line.split()
            if number:
                library.call("prefix_cache_answer", int(number[0]), int(word == "reset"))
                _send(connection, f"done {number[0]}")
            else:
                library.call("prefix_cache_idle", int(word == "idle"))
    finally:
        connection.close()
        library.call("prefix_cache_idle", 0)


def _connect(pid: int) -> socket.socket | None:
    """Connects to an engine's loop, which listens once its workers are ready. None if it never does."""
    for _ in range(3600):
        connection = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            connection.connect(_address(pid))
            if _peer(connection) == (pid, os.getuid()):
                return connection
        connection.close()
        if os.getppid() != pid:
            break
        time.sleep(1)
    return None


def _ask(library: _library.Library, connection: socket.socket) -> None:
    number = ctypes.c_uint64()
    while True:
        library.call("prefix_cache_wait", ctypes.byref(number))
        _send(connection, f"ask {number.value}")


def _lines(connection: socket.socket) -> Iterator[str]:
    """What the other end sends, until it ends."""
    with contextlib.suppress(ConnectionError), connection.makefile("r") as lines:
        yield from lines


def _send(connection: socket.socket, line: str) -> bool:
    """Whether it was sent. Never waits: whoever has left so much unread reads no more, and is hung up on."""
    try:
        connection.send(line.encode() + b"\n", socket.MSG_DONTWAIT)
    except OSError:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        return False
    return True


def _start(work: Callable[[], object]) -> None:
    def guarded() -> None:
        # The program's signals are for the program's threads.
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
        try:
            work()
        except Exception:
            say_once("an idle engine's KV cache is kept from now on, because of an error", exc_info=True)

    threading.Thread(target=guarded, name="vramctl-prefix-cache", daemon=True).start()
