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
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from . import _request, errors
from ._request import Backup, Tags
from ._types import Hello, Progress, Report, Status

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Client", "Process", "processes"]

_VERSION = 1
#: How often a silent process is looked at: one that died while a forked child of it still holds its socket would never
#: answer, and never hang up.
_LOOK_AFTER = 1.0
#: How long, in seconds, a process may take to answer a question that needs no work.
_PATIENCE = 5.0
#: In milliseconds: a time that does not come.
_FOR_EVER = 10**12
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
def _directory(path: str) -> Iterator[_Directory | None]:
    """The directory of the sockets; None: there is none yet, so no process has managed memory."""
    try:
        directory = _Directory(path)
    except FileNotFoundError:
        yield None
        return
    try:
        yield directory
    finally:
        directory.close()


@dataclass(frozen=True)
class _Place:
    """Where a process listens."""

    folder: str
    file: str
    #: The process, where it was chosen by its id.
    pid: int | None = None

    @classmethod
    def of(cls, pid: int) -> _Place:
        return cls(_directory_path(), f"{pid}.sock", pid)

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid is not None else f"the process at {self.folder}/{self.file}"

    def connect(self) -> tuple[socket.socket, int]:
        """As `_Directory.connect`; what goes wrong says what to do about it."""
        with _directory(self.folder) as directory:
            try:
                if directory is None:
                    raise FileNotFoundError
                return directory.connect(self.file)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise errors.NoProcess(self._nobody()) from error
            except (socket.timeout, BlockingIOError) as error:
                raise errors.Busy(f"{self} does not take the connection; is it stopped?") from error
            except OSError as error:
                raise errors.Disconnected(f"{self} does not answer: {error}") from error

    def _nobody(self) -> str:
        if self.pid is None:
            return f"nobody listens at {self.folder}/{self.file}: the process has ended, or another directory is meant"
        if os.path.exists(f"/proc/{self.pid}"):
            return f"{self} is not managed: it was not started under `vramctl run`, or has not allocated GPU memory yet"
        return f"there is no process {self.pid}"


class Client:
    """Another managed process.

    `target`: a process id; the name of a process (``vramctl run --name``, else the program's), which must be the only one
    of that name; the path of a socket (a `Path`, or a text with a slash in it); or None for the only managed process that
    there is. A number is an id also as a text.

    `patience`: how long, in seconds, the process may take for answers that need no work (`hello`, `status`, `set_tag`);
    None: as long as it lives.

    Raises `errors.NoProcess`, `errors.SeveralProcesses`, `errors.Invalid` where the directory of the sockets is not safe
    to use or belongs to somebody else, and `errors.Busy` where the process does not answer in time, or another one that may
    have the name does not.

    Threads may share a client, and a `progress` callback may use it: each request has a connection of its own. Pauses and
    resumes of one process wait for each other; the other requests do not wait for them.
    """

    def __init__(self, target: int | str | os.PathLike[str] | None = None, *, patience: float | None = _PATIENCE) -> None:
        self._patience = patience
        self._place = _find(target, patience)
        self._open: set[socket.socket] = set()
        self._closed = False
        #: A process takes few connections at a time, so what is answered at once is asked one after the other.
        self._asking = threading.Lock()
        control, seen_as = self._place.connect()
        control.close()
        #: The process, and when it started: another one may have its id some day.
        self._process = (seen_as, _started(seen_as))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Ends this client, and its requests in other threads: they raise `errors.Disconnected`. The process carries on with
        a pause or resume, but no longer waits for the device's work or for memory.
        """
        self._closed = True
        for control in list(self._open):
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def hello(self) -> Hello:
        """Who the process is."""
        return Hello._from(self._question("hello", "hello"))

    def status(self) -> Status:
        """What it has under management. Answered during a pause or resume, too."""
        return Status._from(self._question("status", "status"))

    def pause(
        self,
        tags: Tags = None,
        *,
        backup: Backup = "default",
        force: bool = False,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Gives the GPU memory of the tags back to the driver: all of it or, after an error, nothing.

        `tags`: one; several; None for all; or a mapping of tags to policies, in which the key None stands for all others.

        `backup`: ``host``, ``disk`` or ``discard``, in place of each allocation's own policy. Not with a mapping, which has
        its own.

        `force`: discard an inference engine's KV cache even if its prefix cache still describes it. Have the engine reset its
        prefix cache first, or it answers with what is no longer there. Without `force` that is `errors.PrefixCache`.

        `timeout`: how long to wait for the device's work, in seconds; None: as long as it takes. Copying is not limited by it.

        `progress` is called, in this thread, with how far it has come, every 50 ms at most. If it raises, nobody waits for
        the pause any more, and it goes on to its end.

        What is paused already is left alone. Raises `errors.UnknownTag`, `errors.HostMemory`, `errors.Disk`, `errors.Busy`,
        `errors.Capturing`, `errors.Driver`, `errors.Work`, and `errors.Disconnected` where the process goes away.
        """
        policies = _request.policies(tags, backup)
        request: dict[str, Any] = {"request": "pause"}
        if None not in policies:
            request["tags"] = list(policies)
        others: str = backup
        if isinstance(tags, Mapping):
            others = policies.pop(None, "default")
            # In the protocol, an allocation's own policy is what null stands for, or what is left out.
            request["backups"] = {tag: None if policy == "default" else policy for tag, policy in policies.items()}
        if others != "default":
            request["backup"] = others
        if force:
            request["force"] = True
        return self._transition(request, _request.milliseconds(timeout), progress)

    def resume(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        timeout: float | None = 0.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Gives the process the memory of the tags (None: all) and its contents again: all of it or, after an error, nothing.

        `timeout`: how long to wait for memory that others hold, in seconds; None: without limit. Leaving ends the wait.
        `progress` is as in `pause`. Raises `errors.UnknownTag`, `errors.DeviceMemory` (with what is needed, what is free and
        who has the rest), `errors.Disk`, `errors.Driver`, and `errors.Disconnected` where the process goes away.
        """
        request: dict[str, Any] = {"request": "resume"}
        chosen = _request.names(tags)
        if None not in chosen:
            request["tags"] = chosen
        timeout_ms = _request.milliseconds(timeout)
        # Left out, a resume does not wait.
        return self._transition(request, _FOR_EVER if timeout_ms is None else timeout_ms, progress)

    def set_tag(self, tag: str | None) -> str | None:
        """Sets the tag of allocations outside regions from now on; None: those are left to CUDA. What there is keeps its
        tag. Raises `errors.Invalid` for what is no tag.
        """
        answer: str | None = self._question("set-tag", "tag", tag=tag).get("tag")
        return answer

    def _question(self, name: str, wanted: str, **fields: Any) -> dict[str, Any]:
        """What the process answers at once."""
        with self._asking:
            return self._ask({"request": name, **fields}, wanted, self._patience, None)

    def _transition(
        self, request: dict[str, Any], timeout_ms: int | None, progress: Callable[[Progress], None] | None
    ) -> Report:
        if timeout_ms is not None:
            request["timeout_ms"] = timeout_ms
        if progress is not None:
            request["progress"] = True
        return Report._from(self._ask(request, "done", None, progress))

    def _ask(
        self,
        request: dict[str, Any],
        wanted: str,
        patience: float | None,
        progress: Callable[[Progress], None] | None,
    ) -> dict[str, Any]:
        """Sends a request and waits for its answer, at most `patience` seconds."""
        line = json.dumps({"version": _VERSION, **request}).encode() + b"\n"
        deadline = None if patience is None else time.monotonic() + patience
        with self._connection() as control:
            unsent = None
            try:
                control.settimeout(patience)
                control.sendall(line)
            except OSError as error:
                # A process that refuses the connection says why and hangs up, perhaps before the request is out.
                # So the answer counts, and that the request did not get through only where there is none.
                unsent = error
            for reply in self._replies(control, deadline, unsent):
                kind = reply.get("reply")
                if kind == "error":
                    raise errors._from_reply(reply)
                if kind == wanted:
                    return reply
                if kind != "progress":
                    raise errors.Internal(f"{self._place} gave an answer that does not fit the question: {kind!r}")
                if progress is not None:
                    progress(Progress._from(reply))
        raise errors.Disconnected(f"{self._place} {f'does not answer: {unsent}' if unsent else 'ended before it answered'}")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """A connection to the process, if it is still there."""
        try:
            control, seen_as = self._place.connect()
        except errors.NoProcess as error:
            raise errors.Disconnected(f"{self._place} has ended") from error
        with control:
            if (seen_as, _started(seen_as)) != self._process:
                raise errors.Disconnected(f"{self._place} has ended, and another process has its id")
            self._open.add(control)
            try:
                self._check_open()
                yield control
            finally:
                self._open.discard(control)

    def _check_open(self) -> None:
        if self._closed:
            raise errors.Disconnected(f"the client of {self._place} was closed")

    def _replies(self, control: socket.socket, deadline: float | None, unsent: OSError | None) -> Iterator[dict[str, Any]]:
        """What the process says, line by line, until it hangs up."""
        unread = b""
        while True:
            left = _LOOK_AFTER if deadline is None else min(_LOOK_AFTER, deadline - time.monotonic())
            if left <= 0:
                raise errors.Busy(f"{self._place} gave no answer in time; is it stopped?")
            try:
                control.settimeout(left)
                part = control.recv(1 << 16)
            except socket.timeout:
                if self._process[0] and not os.path.exists(f"/proc/{self._process[0]}"):
                    return
                continue
            except OSError as error:
                raise errors.Disconnected(f"{self._place} does not answer: {unsent or error}") from error
            if not part:
                self._check_open()
                return
            *lines, unread = (unread + part).split(b"\n")
            for line in lines:
                try:
                    yield dict(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise errors.Internal(f"{self._place} gave an answer that is not understood: {error}") from error


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
    with _directory(_directory_path()) as directory:
        pids = directory.pids() if directory is not None else []
    if not pids:
        return []
    with concurrent.futures.ThreadPoolExecutor(max_workers=min(len(pids), 64)) as threads:
        return list(threads.map(lambda pid: _look(pid, patience), pids))


def _look(pid: int, patience: float | None) -> Process:
    try:
        with Client(pid, patience=patience) as client:
            # A status says also who the process is.
            reply = client._question("status", "status")
        return Process(pid, Hello._from(reply), Status._from(reply), None)
    except errors.Error as error:
        return Process(pid, None, None, error)


def _find(target: int | str | os.PathLike[str] | None, patience: float | None) -> _Place:
    if isinstance(target, str) and target.isascii() and target.isdigit():
        target = int(target)
    if isinstance(target, int):
        return _Place.of(target)
    if isinstance(target, os.PathLike) or (isinstance(target, str) and "/" in target):
        path = Path(os.path.abspath(target))
        return _Place(str(path.parent), path.name)
    found = processes(patience=_PATIENCE if patience is None else patience)
    meant = found if target is None else [process for process in found if process.name == target]
    there = "; there are " + ", ".join(f"{process.name or '?'} (pid {process.pid})" for process in found) if found else ""
    if target is not None:
        silent = [process.pid for process in found if process.error is not None and _may_be_called(target, process.pid)]
        if silent:
            raise errors.Busy(
                f"process {', '.join(map(str, silent))} does not answer, and may be one that is called {target}: continue it if "
                f"it is stopped (kill -CONT), or give the id of the one that is meant{there}",
                {"pids": silent},
            )
    pids = {"pids": [process.pid for process in meant]}
    if len(meant) == 1:
        return _Place.of(meant[0].pid)
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


def _may_be_called(name: str, pid: int) -> bool:
    """Whether a process that does not say its name may have this one: unless it has ended, or was started with another."""
    try:
        control, seen_as = _Place.of(pid).connect()
        control.close()
    except errors.NoProcess:
        return False
    except errors.Error:
        return True
    if seen_as and not os.path.exists(f"/proc/{seen_as}"):
        return False
    try:
        variables = Path(f"/proc/{seen_as}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    given = next((variable for variable in variables if variable.startswith(b"VRAMCTL_NAME=")), b"").partition(b"=")[2]
    return given in (b"", os.fsencode(name))


def _started(pid: int) -> str | None:
    """When a process started; None: it cannot be seen."""
    try:
        # Behind its name, which may have anything in it.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
