"""Pausing and resuming other processes, over their control sockets.

The protocol is described in the project's ``docs/protocol.md``: a Unix socket for each process, one JSON object a line.
Nothing here needs the library, a GPU or torch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from . import errors
from ._types import Hello, Progress, Report, Status

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Literal

    Policy = Literal["default", "discard", "host", "disk"]

__all__ = ["Client", "Process", "processes"]

_VERSION = 1
#: How often a silent process is looked at: one that died while a forked child of it still holds its socket would never
#: answer, and never hang up.
_LOOK_AFTER = 1.0
#: How long, in seconds, a process may take to answer a question that needs no work.
_PATIENCE = 5.0
#: In seconds.
_FOR_EVER = 1e9
_CREDENTIALS = struct.Struct("3i")


class _Directory:
    """The directory of the sockets, open and found safe: no symbolic link, owned by the user, closed to others.

    Everything inside goes through its descriptor: what was checked is what is used, and the length of its path does not
    matter to the address of a socket.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self._open = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            why = "a symbolic link; set VRAMCTL_DIR to the directory itself" if os.path.islink(path) else error.strerror
            raise errors.Invalid(f"the directory of the control sockets cannot be used: {path}: {why}") from error
        about, user = os.fstat(self._open), os.geteuid()
        self._owner = about.st_uid
        why = None
        if about.st_uid != user and user != 0:  # root may look into anybody's
            why = f"owned by user {about.st_uid}, not by you; set VRAMCTL_DIR to a directory of yours"
        elif stat.S_IMODE(about.st_mode) & 0o077:
            why = f"open to other users (mode {stat.S_IMODE(about.st_mode):o}); chmod 700 it"
        if why is not None:
            self.close()
            raise errors.Invalid(f"the directory of the control sockets cannot be used: {path}: {why}")

    def close(self) -> None:
        os.close(self._open)

    def connect(self, name: str) -> tuple[socket.socket, int]:
        """A connection to the socket of this name, and the id of the process as it is seen from here (0: it is not)."""
        control = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            control.settimeout(_PATIENCE)
            control.connect(f"/proc/self/fd/{self._open}/{name}")
            credentials = control.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            pid, user, _ = _CREDENTIALS.unpack(credentials)
            if user not in (self._owner, 0):
                raise errors.Invalid(f"{self.path}/{name}: user {user} answers there")
            return control, pid
        except BaseException:
            control.close()
            raise

    def pids(self) -> list[int]:
        """The processes that listen. Sockets that nobody listens on any more are removed on the way."""
        found = []
        for name in os.listdir(self._open):
            pid = name[: -len(".sock")]
            if not name.endswith(".sock") or not pid.isascii() or not pid.isdigit():
                continue
            try:
                self.connect(name)[0].close()
            except ConnectionRefusedError:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._open)
                continue
            except FileNotFoundError:
                continue
            except (OSError, errors.Error):
                pass  # whatever else is wrong with it is for the one who talks to it to say
            found.append(int(pid))
        return sorted(found)


def _directory_path() -> str:
    if os.environ.get("VRAMCTL_DIR"):
        return os.environ["VRAMCTL_DIR"]
    if os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(os.environ["XDG_RUNTIME_DIR"], "vramctl")
    return f"/tmp/vramctl-{os.geteuid()}"


@contextlib.contextmanager
def _directory(path: str | None = None) -> Iterator[_Directory | None]:
    """The directory of the sockets; None: there is none yet, so no process has managed memory."""
    try:
        directory = _Directory(path if path is not None else _directory_path())
    except FileNotFoundError:
        yield None
        return
    try:
        yield directory
    finally:
        directory.close()


class Client:
    """A connection to one managed process.

    `target`: a process id; the name of a process (``vramctl run --name``, else the program's), which must be the only one
    of that name; the path of a socket (a `Path`, or a text with a slash in it); or None for the only managed process that
    there is. A number is an id also as a text.

    `patience`: how long, in seconds, the process may take for answers that need no work (`hello`, `status`, `set_tag`);
    None: as long as it lives.

    Raises `errors.NoProcess`, `errors.SeveralProcesses`, `errors.Invalid` where the directory of the sockets is not safe
    to use or belongs to somebody else, and `errors.Busy` where the process does not answer in time.

    Threads may share a client; their requests wait for each other. Requests of two clients do as the protocol says: a
    `status` is answered during a pause. Use it in a ``with`` statement, or `close` it.
    """

    def __init__(self, target: int | str | os.PathLike[str] | None = None, *, patience: float | None = _PATIENCE) -> None:
        self._patience = patience
        self._lock = threading.Lock()
        self._control: socket.socket | None = None
        self._unread = b""
        self._control, self._seen_as, self._name = _connect(target, patience)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection. A pause or resume under way goes on to its end."""
        control, self._control = self._control, None
        if control is not None:
            control.close()

    def hello(self) -> Hello:
        """Who the process is."""
        return Hello._from(self._ask({"request": "hello"}, "hello", self._patience))

    def status(self) -> Status:
        """What it has under management. Answered during a pause or resume of another client, too."""
        return Status._from(self._ask({"request": "status"}, "status", self._patience))

    def pause(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        backup: Policy = "default",
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Gives the GPU memory of the tags (None: all) back to the driver: all of it or, after an error, nothing.

        `backup`: ``host``, ``disk`` or ``discard``, in place of each allocation's own policy. `timeout`: how long to wait for
        the device's work, in seconds; None: as long as it takes. Copying is not limited by it. `progress` is called, in
        this thread, with how far it has come, every 50 ms at most.

        What is paused already is left alone. Raises `errors.UnknownTag`, `errors.HostMemory`, `errors.Disk`, `errors.Busy`,
        `errors.Capturing`, `errors.Driver`, `errors.Work`, and `errors.Disconnected` where the process goes away.
        """
        request = self._transition("pause", tags, timeout, progress)
        if backup != "default":
            request["backup"] = backup
        return Report._from(self._ask(request, "done", None, progress))

    def resume(
        self,
        tags: str | Sequence[str] | None = None,
        *,
        timeout: float | None = 0.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Gives the process the memory of the tags (None: all) and its contents again: all of it or, after an error, nothing.

        `timeout`: how long to wait for memory that others hold, in seconds; None: without limit. Leaving ends the wait.
        `progress` is as in `pause`. Raises `errors.UnknownTag`, `errors.DeviceMemory` (with what is needed, what is free and
        who has the rest), `errors.Disk`, `errors.Driver`, and `errors.Disconnected` where the process goes away.
        """
        # Left out, a resume does not wait; so without limit is a time that does not come.
        request = self._transition("resume", tags, _FOR_EVER if timeout is None else timeout, progress)
        return Report._from(self._ask(request, "done", None, progress))

    def set_tag(self, tag: str | None) -> str | None:
        """Sets the tag of allocations outside regions from now on; None: those are left to CUDA. What there is keeps its
        tag. Raises `errors.Invalid` for what is no tag.
        """
        answer: str | None = self._ask({"request": "set-tag", "tag": tag}, "tag", self._patience).get("tag")
        return answer

    @staticmethod
    def _transition(
        name: str, tags: str | Sequence[str] | None, timeout: float | None, progress: Callable[..., None] | None
    ) -> dict[str, Any]:
        request: dict[str, Any] = {"request": name, "progress": progress is not None}
        if tags is not None:
            request["tags"] = [tags] if isinstance(tags, str) else list(tags)
            if not request["tags"]:
                raise errors.Invalid(f"no tag to {name}; None means all")
        if timeout is not None:
            if not timeout >= 0:
                raise errors.Invalid(f"a timeout is a number of seconds from 0 on, or None: not {timeout!r}")
            request["timeout_ms"] = -int(-min(timeout, _FOR_EVER) * 1000 // 1)
        return request

    def _ask(
        self,
        request: dict[str, Any],
        wanted: str,
        patience: float | None,
        progress: Callable[[Progress], None] | None = None,
    ) -> dict[str, Any]:
        """Sends a request and waits for its answer, at most `patience` seconds."""
        line = json.dumps({"version": _VERSION, **request}).encode() + b"\n"
        with self._lock:
            if self._control is None:
                raise errors.Disconnected(f"the connection to {self._name} is closed")
            deadline = None if patience is None else time.monotonic() + patience
            finished = False
            try:
                unsent = None
                try:
                    self._control.settimeout(patience)
                    self._control.sendall(line)
                except OSError as error:
                    # A process that refuses the connection says why and hangs up, perhaps before the request is out.
                    # So the answer counts, and that the request did not get through only where there is none.
                    unsent = error
                while True:
                    reply = self._read(deadline, unsent)
                    kind = reply.get("reply")
                    if kind == "progress":
                        if progress is not None:
                            progress(Progress._from(reply))
                        continue
                    finished = True
                    if kind == "error":
                        raise errors._from_reply(reply)
                    if kind != wanted:
                        raise errors.Internal(f"{self._name} gave an answer that does not fit the question: {kind!r}")
                    return reply
            finally:
                if not finished:
                    # The answer may still come, and must not be taken for that of the next request.
                    self.close()

    def _read(self, deadline: float | None, unsent: OSError | None) -> dict[str, Any]:
        """The next line of the process."""
        control = self._control
        while b"\n" not in self._unread:
            if control is None or self._control is None:
                raise errors.Disconnected(f"the connection to {self._name} was closed")
            left = _LOOK_AFTER if deadline is None else min(_LOOK_AFTER, deadline - time.monotonic())
            if left <= 0:
                raise errors.Busy(f"{self._name} gave no answer in time; is it stopped?")
            try:
                control.settimeout(left)
                part = control.recv(1 << 16)
            except socket.timeout:
                if self._seen_as and not os.path.exists(f"/proc/{self._seen_as}"):
                    raise errors.Disconnected(f"{self._name} ended before it answered") from None
                continue
            except OSError as error:
                raise errors.Disconnected(f"{self._name} does not answer: {unsent or error}") from error
            if not part:
                why = f"does not answer: {unsent}" if unsent else "ended before it answered"
                raise errors.Disconnected(f"{self._name} {why}")
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        try:
            reply = json.loads(line)
            return dict(reply)
        except (ValueError, TypeError) as error:
            raise errors.Internal(f"{self._name} gave an answer that is not understood: {error}") from error


@dataclass(frozen=True)
class Process:
    """A managed process as `processes` found it."""

    #: Its id.
    pid: int
    #: Who it is; None where it did not say.
    hello: Hello | None
    #: What it has; None where it did not say.
    status: Status | None
    #: Why it did not say; None where it did.
    error: errors.Error | None

    @property
    def name(self) -> str | None:
        """Its name; None where it did not say."""
        return self.hello.name if self.hello is not None else None


def processes(*, patience: float = _PATIENCE) -> list[Process]:
    """The managed processes of this user, by id, and what they have. All are asked at once; one that does not answer
    within `patience` seconds (because it is stopped, say) has an `error` in place of its status.

    Raises `errors.Invalid` where the directory of the sockets is not safe to use.
    """
    with _directory() as directory:
        pids = directory.pids() if directory is not None else []
    if not pids:
        return []
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(len(pids), 64)) as threads:
        return list(threads.map(lambda pid: _look(pid, patience), pids))


def _look(pid: int, patience: float | None) -> Process:
    try:
        with Client(pid, patience=patience) as client:
            # A status says also who the process is.
            reply = client._ask({"request": "status"}, "status", patience)
        return Process(pid, Hello._from(reply), Status._from(reply), None)
    except errors.Error as error:
        return Process(pid, None, None, error)


def _connect(target: int | str | os.PathLike[str] | None, patience: float | None) -> tuple[socket.socket, int, str]:
    """A connection, the process's id as seen from here, and what to call it in messages."""
    if isinstance(target, str) and target.isascii() and target.isdigit():
        target = int(target)
    if isinstance(target, int):
        return _connect_to(None, f"{target}.sock", target)
    if isinstance(target, os.PathLike) or (isinstance(target, str) and "/" in target):
        path = Path(os.fspath(target))
        return _connect_to(str(path.parent), path.name, None)
    found = processes(patience=_PATIENCE if patience is None else patience)
    meant = found if target is None else [process for process in found if process.name == target]
    there = "; there are " + ", ".join(f"{process.name or '?'} (pid {process.pid})" for process in found) if found else ""
    pids = {"pids": [process.pid for process in meant]}
    if len(meant) == 1:
        return _connect_to(None, f"{meant[0].pid}.sock", meant[0].pid)
    if meant:
        what = "several processes are managed" if target is None else f"several processes are called {target}"
        raise errors.SeveralProcesses(f"{what}; give the id of one{there}", pids)
    if found:
        raise errors.NoProcess(f"no managed process is called {target}{there}", pids)
    raise errors.NoProcess(
        f"no process is managed (looked in {_directory_path()}). Start a program with `vramctl run -- COMMAND`; it shows once "
        "it has allocated GPU memory. If it runs with another VRAMCTL_DIR or XDG_RUNTIME_DIR, set VRAMCTL_DIR to its directory",
        pids,
    )


def _connect_to(folder: str | None, name: str, pid: int | None) -> tuple[socket.socket, int, str]:
    called = f"process {pid}" if pid is not None else f"the process at {folder}/{name}"
    with _directory(folder) as directory:
        try:
            if directory is None:
                raise FileNotFoundError
            return (*directory.connect(name), called)
        except (FileNotFoundError, ConnectionRefusedError) as error:
            if pid is None:
                why = f"nobody listens at {folder}/{name}: the process has ended, or another directory is meant"
            elif os.path.exists(f"/proc/{pid}"):
                why = (
                    f"process {pid} is not managed: it was not started under `vramctl run`, or has not allocated GPU memory yet"
                )
            else:
                why = f"there is no process {pid}"
            raise errors.NoProcess(why) from error
        except socket.timeout as error:
            raise errors.Busy(f"{called} does not take the connection; is it stopped?") from error
        except OSError as error:
            raise errors.Disconnected(f"{called} does not answer: {error}") from error
