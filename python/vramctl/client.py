"""Pauses and resumes other processes over their control sockets. Needs neither the library nor a GPU nor torch.

``docs/protocol.md`` in the project describes the protocol: one Unix socket per process, one JSON object per line.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import json
import os
import re
import socket
import stat
import struct
import threading
import time
import urllib.parse
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from . import _request, errors
from ._request import Backup, Tags
from .types import Hello, Progress, Report, Status, Trimmed

if TYPE_CHECKING:
    from types import TracebackType

__all__ = ["Client", "Process", "processes"]

_VERSION = 1
#: How often to check, in seconds, that a silent process still exists. If it died while a forked child holds its socket, the
#: connection neither answers nor closes.
_LOOK_AFTER = 1.0
#: Far more bytes than the longest reply has.
_LONGEST_ANSWER = 64 << 20
#: Default timeout, in seconds, for requests that a process answers at once.
_PATIENCE = 5.0
#: "No limit" in the protocol, in milliseconds.
_FOR_EVER = 10**12
_CREDENTIALS = struct.Struct("3i")


class _Directory:
    """The socket directory, opened and checked: not a symbolic link, owned by the user, closed to others.

    All access goes through its descriptor, so the directory we checked is the one we use, and its path may be longer than
    a socket address allows.
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
        if about.st_uid != user and user != 0:  # root may use anyone's
            why = f"owned by user {about.st_uid}, not by you; set VRAMCTL_DIR to a directory you own"
        elif stat.S_IMODE(about.st_mode) & 0o077:
            why = (
                f"open to other users (mode {stat.S_IMODE(about.st_mode):o}); chmod 700 it if only you use it, else set "
                "VRAMCTL_DIR to a directory of your own"
            )
        if why is not None:
            self.close()
            raise errors.Invalid(f"the directory of the control sockets cannot be used: {path}: {why}")

    def close(self) -> None:
        os.close(self._open)

    def connect(self, name: str) -> tuple[socket.socket, int]:
        """Connects to a socket. Returns it with the peer's process id in our PID namespace (0 if it is not visible)."""
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
        """The listening processes. Removes stale sockets along the way."""
        return sorted(self.sockets())

    def sockets(self) -> dict[int, str]:
        """The same, with the names of their sockets: ``<pid>.sock``, or ``<pid>-<PID namespace>.sock`` if another process has that name."""
        listen = {name: self._listens(name) for name in os.listdir(self._open) if _SOCKET.fullmatch(name)}
        refusing = [name for name, listens in listen.items() if listens is None]
        if refusing:
            time.sleep(0.05)  # a process whose socket was closed may be replacing it
        for name in refusing:
            listen[name] = self._listens(name)
            if listen[name] is None:
                with contextlib.suppress(OSError):
                    os.unlink(name, dir_fd=self._open)
        # The plain names last: they win.
        return {pid: name for name, pid in sorted(listen.items(), key=lambda one: -len(one[0])) if pid}

    def _listens(self, name: str) -> int | None:
        """The process that listens on a socket; None if nobody does, 0 if the socket is gone."""
        pid = int(re.split("[-.]", name)[0])
        try:
            control, seen_as = self.connect(name)
            control.close()
        except ConnectionRefusedError:
            return None
        except FileNotFoundError:
            return 0
        except (OSError, errors.Error):
            return pid  # the first real request reports other errors
        # In another PID namespace, it has another pid; and another process may listen on its behalf.
        return seen_as if seen_as and _pid_within(seen_as) == pid else pid


#: The names of sockets.
_SOCKET = re.compile(r"[0-9]+(-[0-9]+)?\.sock")


def _pid_within(pid: int) -> int | None:
    """The pid of a process in its own PID namespace."""
    try:
        status = Path(f"/proc/{pid}/status").read_text(errors="replace")
        return next(int(line.split()[-1]) for line in status.splitlines() if line.startswith("NSpid:"))
    except (OSError, StopIteration, ValueError):
        return None


def _directory_path() -> str:
    if os.environ.get("VRAMCTL_DIR"):
        return os.path.abspath(os.environ["VRAMCTL_DIR"])  # the program may change its directory
    if os.environ.get("XDG_RUNTIME_DIR"):
        return os.path.join(os.environ["XDG_RUNTIME_DIR"], "vramctl")
    return f"/tmp/vramctl-{os.geteuid()}"


@contextlib.contextmanager
def _directory(path: str) -> Iterator[_Directory | None]:
    """The socket directory; None if it does not exist yet, so no process has managed memory."""
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
    #: The process id, if the caller gave one.
    pid: int | None = None

    @classmethod
    def of(cls, pid: int) -> _Place:
        folder, file = _directory_path(), f"{pid}.sock"
        if not os.path.exists(os.path.join(folder, file)):
            with contextlib.suppress(errors.Error, OSError), _directory(folder) as directory:
                file = directory.sockets().get(pid, file) if directory is not None else file
        return cls(folder, file, pid)

    def __str__(self) -> str:
        return f"process {self.pid}" if self.pid is not None else f"the process at {self.folder}/{self.file}"

    def connect(self) -> tuple[socket.socket, int]:
        """`_Directory.connect`, with errors that say what to do."""
        with _directory(self.folder) as directory:
            try:
                if directory is None:
                    raise FileNotFoundError
                return directory.connect(self.file)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                raise errors.NoProcess(self._nobody()) from error
            except (socket.timeout, BlockingIOError) as error:
                raise errors.Busy(f"{self} does not accept the connection; is it stopped?") from error
            except OSError as error:
                raise errors.Disconnected(f"{self} does not answer: {error}") from error

    def _nobody(self) -> str:
        if self.pid is None:
            return f"nothing listens at {self.folder}/{self.file}: the process has ended, or the path is wrong"
        if os.path.exists(f"/proc/{self.pid}"):
            return f"{self} is not managed: it was not started under `vramctl run`, or has not allocated GPU memory yet"
        return f"there is no process {self.pid}"


class Client:
    """A client for another managed process.

    `target`: a process id (int or digits); a unique process name (``vramctl run --name``, else the program's name); the
    path of a socket (a `Path`, or a string with a slash that no process has as its name); or None for the only managed process.

    `patience`: timeout in seconds for requests that need no work (`hello`, `status`, `set_tag`); None waits as long as the
    process lives.

    Raises `errors.NoProcess`, `errors.SeveralProcesses`, `errors.Invalid` if the socket directory is unsafe or not yours,
    and `errors.Busy` if the process, or another one that may have the name, does not answer in time.

    Thread-safe, also from `progress` callbacks: each request has its own connection. Pauses and resumes of one process are
    serialized; other requests do not wait for them.
    """

    def __init__(self, target: int | str | os.PathLike[str] | None = None, *, patience: float | None = _PATIENCE) -> None:
        self._patience = patience
        self._place = _find(target, patience)
        self._open: set[socket.socket] = set()
        self._closed = False
        #: A process accepts few connections at a time, so quick requests take turns.
        self._asking = threading.Lock()
        control, seen_as = self._place.connect()
        control.close()
        #: The process id and start time, because ids are reused.
        self._process = (seen_as, _started(seen_as))

    def __enter__(self) -> Client:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Closes the client. Its requests in other threads raise `errors.Disconnected`. The process finishes a pause or
        resume in progress, but stops waiting for the device's work or for memory.
        """
        self._closed = True
        for control in list(self._open):
            with contextlib.suppress(OSError):
                control.shutdown(socket.SHUT_RDWR)

    def hello(self) -> Hello:
        """Identifies the process."""
        return Hello._from(self._question("hello", "hello"))

    def status(self) -> Status:
        """The process's managed memory. Works during a pause or resume, too."""
        return Status._from(self._question("status", "status"))

    def events(self, since: int = 0) -> dict[str, Any]:
        """What has happened to the process's memory, from an event's number on, as a dict (``docs/protocol.md``: ``events``).

        Ask again from ``next``, at once if there is ``more``. The process must have ``VRAMCTL_TRACE=1``, or have been asked to `record`,
        else ``on`` is false.
        """
        return self._question("events", "events", since=since)

    def record(self) -> bool:
        """Has the process record `events` from now on. Returns whether it begins now: False if it recorded some already."""
        return bool(self._question("record", "recording")["begun"])

    def pause(
        self,
        tags: Tags = None,
        *,
        backup: Backup = "default",
        force: bool = False,
        registered: str = "refuse",
        hold: bool = True,
        hold_timeout: float = 10.0,
        guard: bool = False,
        timeout: float | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Returns the GPU memory of the tags to the driver. All or nothing; pausing a paused tag is a no-op.

        `tags`: one tag, several, None for all, or a mapping of tags to policies, where the key None means all others.

        `backup`: ``host``, ``disk`` or ``discard``; overrides the policy of every allocation. Not allowed with a mapping.

        `force`: discard an inference engine's KV cache even if its prefix cache still describes it. Reset the engine's
        prefix cache first, or it will serve data that no longer exists. Without `force`, this raises `errors.PrefixCache`.

        `registered`: what to do with memory that another process, a network card or NCCL has registered: ``refuse`` (raise
        `errors.Registered`), ``keep`` (pause the rest) or ``take`` (pause it too).

        `hold`: hold the process, which then need not be idle: its calls that start GPU work wait until everything is resumed. False: it is
        not held, and must be idle. A process cannot hold itself (`errors.Invalid`), because a waiting thread may have the interpreter lock.

        `hold_timeout`: how many seconds to wait for calls and work in flight of a held process, at most `timeout`; after that,
        `errors.Busy` is raised and the process continues.

        `guard`: map a small block of GPU memory (62 MiB per GPU) under the paused addresses, so that a stray access, which is likely
        only without `hold`, does not destroy the CUDA context. Best effort: see `Report.unguarded_bytes`. The report of the resume says
        if something wrote there (`Report.guard_written_bytes`).

        `timeout`: seconds to wait for the device's work; None waits for `hold_timeout`, or indefinitely. It does not limit copying.

        `progress`: called in this thread, at most every 50 ms. If it raises, the pause continues but this call ends.

        Raises `errors.UnknownTag`, `errors.HostMemory`, `errors.Disk`, `errors.Busy`, `errors.Capturing`, `errors.Driver`,
        `errors.Work`, and `errors.Disconnected` if the process goes away.
        """
        policies = _request.policies(tags, backup)
        request: dict[str, Any] = {"request": "pause"}
        if None not in policies:
            request["tags"] = list(policies)
        others: str = backup
        if isinstance(tags, Mapping):
            others = policies.pop(None, "default")
            # In the protocol, null or a missing policy means each allocation's own.
            request["backups"] = {tag: None if policy == "default" else policy for tag, policy in policies.items()}
        if others != "default":
            request["backup"] = others
        if force:
            request["force"] = True
        if _request.registered(registered) != "refuse":
            request["registered"] = registered
        if guard:
            request["guard"] = True
        if _request.held(hold):
            request["hold_ms"] = _request.milliseconds(hold_timeout if timeout is None else min(hold_timeout, timeout))
        return self._transition(request, _request.milliseconds(timeout), progress)

    def resume(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        timeout: float | None = 0.0,
        progress: Callable[[Progress], None] | None = None,
    ) -> Report:
        """Restores the memory of the tags and its contents. All or nothing; resuming an active tag is a no-op.

        `tags`: None means all, except what the process has paused itself: that stays paused.
        `timeout`: seconds to wait for memory that other processes hold; None waits indefinitely. Disconnecting ends the wait.
        `progress`: as in `pause`. Raises `errors.UnknownTag`, `errors.DeviceMemory` (how much is needed, how much is free,
        who holds the rest), `errors.Disk`, `errors.Driver`, and `errors.Disconnected` if the process goes away.
        """
        request: dict[str, Any] = {"request": "resume"}
        chosen = _request.names(tags)
        if None not in chosen:
            request |= {"tags": chosen, "self_paused": True}
        timeout_ms = _request.milliseconds(timeout)
        # Without a timeout in the request, a resume does not wait.
        return self._transition(request, _FOR_EVER if timeout_ms is None else timeout_ms, progress)

    def trim(self, *, timeout: float = 10.0) -> Trimmed:
        """Has torch in the process return the GPU memory that it has cached. A background thread there does it; the process keeps running.

        `timeout`: seconds to wait. After that, raises `errors.Busy`; a trim that has begun continues. Raises `errors.Invalid` if the
        process is held, or does not use torch.
        """
        timeout_ms = _request.milliseconds(timeout)
        return Trimmed._from(self._ask({"request": "trim", "timeout_ms": timeout_ms}, "trimmed", None, None))

    def set_tag(self, tag: str | None) -> str | None:
        """Sets the tag of future allocations outside regions; None leaves them to CUDA. Existing allocations keep their tag.
        Raises `errors.Invalid` for an invalid tag.
        """
        answer: str | None = self._question("set-tag", "tag", tag=tag).get("tag")
        return answer

    def _question(self, name: str, wanted: str, **fields: Any) -> dict[str, Any]:
        """A request that the process answers at once."""
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
                # A process that refuses the connection says why and hangs up, perhaps before we have sent the request.
                # So read its answer first, and report the send error only if there is none.
                unsent = error
            for reply in self._replies(control, deadline, unsent):
                kind = reply.get("reply")
                if kind == "error":
                    raise errors._from_reply(reply)
                if kind == wanted:
                    return reply
                if kind != "progress":
                    raise errors.Internal(f"unexpected reply from {self._place}: {kind!r}")
                if progress is not None:
                    progress(Progress._from(reply))
        raise errors.Disconnected(f"{self._place} {f'does not answer: {unsent}' if unsent else 'ended before it answered'}")

    @contextlib.contextmanager
    def _connection(self) -> Iterator[socket.socket]:
        """Connects to the process, if it is still the same one."""
        try:
            control, seen_as = self._place.connect()
        except errors.NoProcess as error:
            raise errors.Disconnected(f"{self._place} has ended") from error
        with control:
            if (seen_as, _started(seen_as)) != self._process:
                raise errors.Disconnected(f"{self._place} has ended, and another process now has its id")
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
        """The replies, line by line, until the process closes the connection."""
        unread, has_ended = bytearray(), False
        while True:
            left = _LOOK_AFTER if deadline is None else min(_LOOK_AFTER, deadline - time.monotonic())
            if left <= 0:
                raise errors.Busy(f"{self._place} gave no answer in time; is it stopped?")
            try:
                control.settimeout(0 if has_ended else left)
                part = control.recv(1 << 16)
            except (socket.timeout, BlockingIOError):
                if has_ended:
                    return
                # It may have answered, and then ended, since the line above.
                has_ended = self._process[0] != 0 and not os.path.exists(f"/proc/{self._process[0]}")
                continue
            except OSError as error:
                raise errors.Disconnected(f"{self._place} does not answer: {unsent or error}") from error
            if not part:
                self._check_open()
                return
            unread += part
            if b"\n" not in part:
                # Who answers may be another user's program, if root asks.
                if len(unread) > _LONGEST_ANSWER:
                    raise errors.Internal(f"invalid reply from {self._place}: it does not end")
                continue
            *lines, rest = bytes(unread).split(b"\n")
            unread = bytearray(rest)
            for line in lines:
                try:
                    yield dict(json.loads(line))
                except (ValueError, TypeError) as error:
                    raise errors.Internal(f"invalid reply from {self._place}: {error}") from error


@dataclass(frozen=True)
class Process:
    """A managed process, from `processes`."""

    pid: int
    #: None if it did not answer.
    hello: Hello | None
    #: None if it did not answer.
    status: Status | None
    #: Why it did not answer; None if it did.
    error: errors.Error | None

    @property
    def name(self) -> str | None:
        """Its name; None if it did not answer."""
        return self.hello.name if self.hello is not None else None


def processes(*, patience: float = _PATIENCE) -> list[Process]:
    """This user's managed processes, sorted by id, with their status. Asks all of them in parallel; a process that does not
    answer within `patience` seconds (a stopped one, say) has an `error` instead of a status.

    Raises `errors.Invalid` if the socket directory is not safe to use.
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
            # The status reply includes the fields of hello.
            reply = client._question("status", "status")
        return Process(pid, Hello._from(reply), Status._from(reply), None)
    except errors.Error as error:
        return Process(pid, None, None, error)


def _find(target: int | str | os.PathLike[str] | None, patience: float | None) -> _Place:
    if isinstance(target, str) and target.isascii() and target.isdigit():
        target = int(target)
    if isinstance(target, int):
        return _Place.of(target)
    if not (target is None or isinstance(target, (str, os.PathLike))):
        raise TypeError(f"a process is chosen by its id, its name or the path of its socket, not by {target!r}")
    if isinstance(target, os.PathLike) or (isinstance(target, str) and _is_path(target)):
        path = Path(os.path.abspath(target))
        return _Place(str(path.parent), path.name)
    found = processes(patience=_PATIENCE if patience is None else patience)
    meant = found if target is None else [process for process in found if process.name == target]
    there = "; there are " + ", ".join(f"{process.name or '?'} (pid {process.pid})" for process in found) if found else ""
    if target is not None:
        silent = [process.pid for process in found if process.error is not None and _may_be_called(target, process.pid)]
        if silent:
            raise errors.Busy(
                f"process {', '.join(map(str, silent))} does not answer and may be named {target}. If it is stopped, continue "
                f"it (kill -CONT), or give the id of the process you mean{there}",
                {"pids": silent},
            )
    pids = {"pids": [process.pid for process in meant]}
    if len(meant) == 1:
        return _Place.of(meant[0].pid)
    if meant:
        what = "there are several managed processes" if target is None else f"several processes are named {target}"
        raise errors.SeveralProcesses(f"{what}; give the id of one{there}", pids)
    if found:
        raise errors.NoProcess(f"no managed process is named {target}{there}", pids)
    raise errors.NoProcess(
        f"no process is managed (looked in {_directory_path()}). Start a program with `vramctl run -- COMMAND`; it appears "
        "after its first GPU allocation. If it uses another VRAMCTL_DIR or XDG_RUNTIME_DIR, set VRAMCTL_DIR to its directory",
        pids,
    )


def _is_path(target: str) -> bool:
    """Whether a string is the path of a socket. A process's name may have a slash, too, as those of models do."""
    if "/" not in target or os.path.exists(target):
        return "/" in target
    found = processes(patience=_PATIENCE)
    return not any(one.name == target or (one.error is not None and _may_be_called(target, one.pid)) for one in found)


def _may_be_called(name: str, pid: int) -> bool:
    """Whether an unresponsive process may have this name: not if it has ended or was started with another name."""
    try:
        control, seen_as = _Place.of(pid).connect()
        with control:
            bound_to = control.getpeername()
    except errors.NoProcess:
        return False
    except errors.Error:
        return True
    if seen_as and not os.path.exists(f"/proc/{seen_as}"):
        return False
    # The address has the name: `….+<name>.new`, or `….-<name>.new` with that of the program, which may have changed.
    kind, its = _name_in_address(bound_to)
    if kind == "-":
        # It was that of its script, if the program is Python.
        with contextlib.suppress(OSError):
            return name in (its, Path(f"/proc/{seen_as}/comm").read_text(errors="replace").strip())
    if kind:
        return its == name
    try:
        variables = Path(f"/proc/{seen_as}/environ").read_bytes().split(b"\0")
    except OSError:
        return True
    given = next((variable for variable in variables if variable.startswith(b"VRAMCTL_NAME=")), b"").partition(b"=")[2]
    return given in (b"", os.fsencode(name))


def _name_in_address(address: str) -> tuple[str, str]:
    """The kind and the name; empty if the name is too long."""
    _, _, rest = os.path.basename(address).partition(".")
    if not rest.endswith(".new") or rest[0] not in "+-":
        return "", ""
    return rest[0], urllib.parse.unquote(rest[1 : -len(".new")])


def _started(pid: int) -> str | None:
    """When a process started; None if it is not visible."""
    try:
        # Split after the name, which may contain anything.
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return None
