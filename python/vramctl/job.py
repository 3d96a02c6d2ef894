"""Pauses and resumes jobs: all processes that were started together, as one.

Runs ``vramctl operate``, which coordinates them (``docs/protocol.md``, "Operations"). If this program dies meanwhile, none of them is left
half paused.
"""

from __future__ import annotations

import _thread
import asyncio
import contextlib
import copy
import functools
import inspect
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Callable, Generic, TypeVar

from . import _request, errors
from ._request import Backup
from .client import processes
from .types import JobReport, Ledger, Report, Status, StepsReport

if TYPE_CHECKING:
    from types import ModuleType, TracebackType

__all__ = ["Job", "ledger", "swap"]

_T = TypeVar("_T")

_log = logging.getLogger("vramctl")

#: The version of the command's requests (``docs/protocol.md``, "Operations").
_VERSION = 1


class Job:
    """All processes with a name (``vramctl run --name``); without a name, those of the only job there is.

    `ranks`: how many processes there must be; else, as many as when the job was last paused or resumed.

    Either all processes are paused or resumed, or none is; then the exception says which one failed, and why. If a process ends or is
    stopped after that has been decided, the exception's `committed` is True: the others are paused or resumed. Each method
    has an asyncio form, whose name ends in ``_async``. Each call has a thread of its own meanwhile. Thread-safe.

    A program cannot hold its own job (`errors.Invalid`), because a thread that is held may have the interpreter lock.
    """

    def __init__(self, name: str | None = None, *, ranks: int | None = None) -> None:
        if not (name is None or isinstance(name, str)):
            raise TypeError(f"a job has a name, a str, and not {name!r}; for one process, use vramctl.Client")
        if not (ranks is None or isinstance(ranks, int)):
            raise TypeError(f"ranks must be the number of the job's processes, or None, not {ranks!r}")
        self._target: str | dict[str, Any] = "only" if name is None else {"name": name}
        self._ranks = ranks
        _commands()  # an interpreter that ends imports nothing any more

    def pause(
        self,
        tags: str | Iterable[str] | None = None,
        *,
        backup: Backup = "default",
        force: bool = False,
        engine: str | None = None,
        registered: str = "refuse",
        hold: bool = True,
        hold_timeout: float = 10.0,
        guard: bool = False,
        shared: bool = False,
        nccl: bool = False,
        timeout: float | None = None,
    ) -> JobReport:
        """Returns the GPU memory of the tags (None: all) to the driver.

        `hold`: hold the processes, which then need not be idle, until everything is resumed; `hold_timeout` is how many seconds to wait for
        their calls and work in flight. False: they are not held and must be idle, and `timeout` is how long to wait for work in flight.

        `engine`: the URL of the inference engine. If its KV cache is to be discarded, it must be idle, else `errors.Busy` is raised,
        and it resets its prefix cache first.

        `shared`: also hold other processes that have the memory open (CUDA IPC), instead of raising `errors.Shared`. They set aside what
        they have open, and continue by themselves when it is resumed. They are in the report, with `Report.missing`. Only with `hold`.

        `nccl`: without `tags`, also NCCL's own memory (the tag ``nccl``), which all ranks of the job give up together.

        `backup`, `force`, `registered`, `guard`: as in `Client.pause`. Raises as that does, and `errors.NoProcess` if a process is missing.
        """
        if isinstance(tags, Mapping):
            raise errors.Invalid("a job has one policy for all tags: pass backup, and pause the others by themselves")
        return self._transition(
            "pause",
            tags,
            backup=_policy(backup),
            force=force,
            engines=None if engine is None else [engine],
            registered=_request.registered(registered),
            guard=guard,
            shared=shared,
            nccl=nccl,
            hold=_request.held(hold),
            hold_ms=_limit(hold_timeout) if hold else None,
            timeout_ms=None if timeout is None else _limit(timeout),
        )

    def resume(self, tags: str | Iterable[str] | None = None, *, timeout: float | None = 0.0) -> JobReport:
        """Restores the memory of the tags and its contents.

        `tags`: None means all, except what the job's processes have paused themselves: that stays paused.
        `timeout`: seconds to wait for memory that others hold; None waits indefinitely. Raises as `Client.resume` does.
        """
        return self._transition("resume", tags, timeout_ms=_limit(timeout))

    def suspend(
        self,
        *,
        backup: Backup = "default",
        force: bool = False,
        registered: str = "refuse",
        shared: bool = False,
        hold_timeout: float = 10.0,
    ) -> dict[int, StepsReport]:
        """Takes the job off its GPUs entirely: pauses all tags, then has the driver checkpoint the rest. Returns reports by process id.

        `resume` brings it back. The arguments are those of `pause`, but `registered` cannot be ``keep``. With `shared`, processes of other
        jobs that have its memory open stay on their GPUs: they are only held, and are in the report with `StepsReport.missing`. Raises
        `errors.NotRestorable` if the driver could not restore it; nothing has changed then, unless `committed` is set: all tags are paused.
        """
        return self._steps(
            "suspend",
            backup=_policy(backup),
            force=force,
            registered=_request.registered(registered),
            shared=shared,
            hold_ms=_limit(hold_timeout),
        )

    def move(
        self, to: int | str | Iterable[int | str], *, swap: str | None = None, hold_timeout: float = 10.0
    ) -> dict[int, StepsReport]:
        """Moves the job to other GPUs of the same model, where its work continues. Returns reports by process id.

        `to`: index in ``nvidia-smi``, UUID or bus id; one for each GPU of the job. `swap`: the name of a job to exchange GPUs with. If
        the job cannot be moved, it continues where it was, and the exception says why. If the driver refuses to restore some of the
        processes, the exception names those that have moved.
        """
        gpus = [to] if isinstance(to, (int, str)) else list(to)
        other = None if swap is None else {"name": swap}
        return self._steps("move", to=[str(gpu) for gpu in gpus], swap=other, hold_ms=_limit(hold_timeout))

    async def suspend_async(self, **options: Any) -> dict[int, StepsReport]:
        """`suspend`, for asyncio. When cancelled, it still completes."""
        return await _in_thread(lambda: self.suspend(**options))

    async def move_async(self, to: int | str | Iterable[int | str], **options: Any) -> dict[int, StepsReport]:
        """`move`, for asyncio. When cancelled, it still completes."""
        return await _in_thread(lambda: self.move(to, **options))

    def _steps(self, operation: str, **fields: Any) -> dict[int, StepsReport]:
        outcome = self._operate(operation, ranks=self._ranks, waiting=os.getpid(), **fields)
        return {process["pid"]: StepsReport._from(process["report"]) for process in outcome["processes"]}

    def status(self) -> dict[int, Status]:
        """The managed memory of each process, by its id."""
        outcome = self._operate("status", target="all" if self._target == "only" else self._target)
        return {process["pid"]: Status._from(process) for process in outcome["processes"]}

    def paused(
        self, tags: str | Iterable[str] | None = None, *, resume_timeout: float | None = None, **options: Any
    ) -> _Paused:
        """A context in which the job is paused, also for ``async with``. At its end the job is resumed, whatever happens; also if a process
        has ended meanwhile, or the pause raises an exception with `committed`. Nothing interrupts the resume: cancellations and ^C are
        raised after it.

        `resume_timeout`: as `timeout` of `resume`. The other arguments are those of `pause`.
        """
        return _Paused(self, tags, resume_timeout, options)

    async def pause_async(self, tags: str | Iterable[str] | None = None, **options: Any) -> JobReport:
        """`pause`, for asyncio. When cancelled, it still completes."""
        return await _in_thread(lambda: self.pause(tags, **options))

    async def resume_async(self, tags: str | Iterable[str] | None = None, *, timeout: float | None = 0.0) -> JobReport:
        """`resume`, for asyncio. When cancelled, it still completes."""
        return await _in_thread(lambda: self.resume(tags, timeout=timeout))

    async def status_async(self) -> dict[int, Status]:
        """`status`, for asyncio."""
        return await _in_thread(self.status)

    def _transition(self, operation: str, tags: str | Iterable[str] | None, **fields: Any) -> JobReport:
        chosen = [tag for tag in _request.names(tags) if tag is not None]
        # This program waits for the command: if it were held itself, it might wait for ever.
        waiting = os.getpid() if operation == "pause" else None
        outcome = self._operate(operation, ranks=self._ranks, tags=chosen, waiting=waiting, **fields)
        reports = {process["pid"]: Report._from(process["report"]) for process in outcome["processes"]}
        job: dict[str, Any] = next(iter(outcome["jobs"]), {})
        return JobReport(reports, job.get("attempts", 0), job.get("ms", 0.0))

    def _resumption(self, tags: str | Iterable[str] | None, timeout: float | None) -> _Work[dict[str, Any]]:
        """A resume that will be needed, whatever becomes of this program and of the job's processes."""
        left = copy.copy(self)
        left._ranks = None  # those that are left, if one has ended meanwhile
        chosen = [tag for tag in _request.names(tags) if tag is not None]
        return left._operation("resume", tags=chosen, self_paused=False, timeout_ms=_limit(timeout), detached=True)

    def _operate(self, operation: str, **fields: Any) -> dict[str, Any]:
        return self._operation(operation, **fields).ended()

    def _operation(self, operation: str, **fields: Any) -> _Work[dict[str, Any]]:
        return _Operation({"operation": operation, "target": self._target, **fields})


def _choose_a_name(pids: Iterable[int]) -> str:
    """What to tell a program that has not said which of several jobs it means."""
    names = sorted({process.name for process in processes() if process.name is not None and process.pid in set(pids)})
    if not names:
        return "several jobs are managed; choose one by its name: vramctl.Job(NAME)"
    listed = ", ".join(names)
    if len(names) == 1:
        return f"several processes that are no job have the name {listed}; choose all of them: vramctl.Job({names[0]!r})"
    return f"several jobs are managed: {listed}; choose one by its name: vramctl.Job({names[0]!r})"


def swap(
    out: str | Job,
    into: str | Job,
    *,
    out_tags: str | Iterable[str] | None = None,
    in_tags: str | Iterable[str] | None = None,
    backup: Backup = "default",
    force: bool = False,
    engine: str | None = None,
    registered: str = "refuse",
    hold_timeout: float = 10.0,
    timeout: float | None = None,
) -> tuple[JobReport, JobReport]:
    """Has two jobs change places on their GPUs: pauses `out` while `into` is resumed, both directions of the link busy at once.

    All or nothing, for both: if it fails or this program dies, `out` runs on and `into` stays paused, both with their contents; the exception
    says which runs. Contents of `out` that were to be discarded may be gone then. `out_tags` and `in_tags`: None means all. The other
    arguments are those of `Job.pause`. Returns the reports of the pause and of the resume.
    """
    leaving, coming = (job if isinstance(job, Job) else Job(job) for job in (out, into))
    outcome = leaving._operate(
        "swap",
        ranks=leaving._ranks,
        tags=[tag for tag in _request.names(out_tags) if tag is not None],
        coming=coming._target,
        coming_ranks=coming._ranks,
        coming_tags=[tag for tag in _request.names(in_tags) if tag is not None],
        backup=_policy(backup),
        force=force,
        engines=None if engine is None else [engine],
        registered=_request.registered(registered),
        hold_ms=_limit(hold_timeout),
        timeout_ms=None if timeout is None else _limit(timeout),
        waiting=os.getpid(),
    )

    def report(verb: str) -> JobReport:
        processes, jobs = ([one for one in outcome[what] if one["verb"] == verb] for what in ("processes", "jobs"))
        job: dict[str, Any] = next(iter(jobs), {})
        reports = {process["pid"]: Report._from(process["report"]) for process in processes}
        return JobReport(reports, job.get("attempts", 0), job.get("ms", 0.0))

    return report("pause"), report("resume")


def ledger() -> list[Ledger]:
    """Who uses the memory of each GPU of this machine: by tag, by library, and other processes.

    Runs the command line, which asks NVML and all managed processes. Raises an error if NVML reports no GPU.
    """
    return [Ledger._from(gpu) for gpu in _Operation({"operation": "gpus"}).ended()["gpus"]]


class _Paused(contextlib.AbstractContextManager[JobReport]):
    def __init__(
        self, job: Job, tags: str | Iterable[str] | None, resume_timeout: float | None, options: Mapping[str, Any]
    ) -> None:
        # A generator of tags is needed twice.
        self._tags = tags if tags is None or isinstance(tags, (str, Mapping)) else list(tags)
        self._job, self._timeout, self._options = job, resume_timeout, options
        #: The resume, once the job may be paused.
        self._resumption: _Work[dict[str, Any]] | None = None

    def __enter__(self) -> JobReport:
        if not isinstance(self._tags, Mapping):  # which the pause refuses
            # Now, because there may be neither a process nor a descriptor to be had when it is needed.
            self._resumption = self._job._resumption(self._tags, self._timeout).prepare()
        try:
            return self._job.pause(self._tags, **self._options)
        except BaseException as error:
            # The pause may be done nevertheless: a process has died at its end, the command was killed, or ^C has come just after it.
            if not isinstance(error, errors.Error) or error.committed is not False:
                with contextlib.suppress(errors.NoProcess):  # nobody is left
                    self._resume()
            elif self._resumption is not None:
                self._resumption.drop()
            raise

    def __exit__(self, *_: object) -> None:
        self._resume()

    async def __aenter__(self) -> JobReport:
        entering = _Work(self.__enter__)
        try:
            await entering.start().end()
        except BaseException as left:
            leaving = _Work(lambda: self._leave(entering))
            if isinstance(left, GeneratorExit):  # the task was dropped, and cannot wait
                leaving.start()
                raise
            await leaving.outlast()
            raise left from leaving.error
        return entering.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        resuming = _Work(self._resume)
        if isinstance(error, GeneratorExit) and not _may_wait():
            resuming.start()
            if not _loop_is_running():
                resuming.ended()
            return
        interrupted = await resuming.outlast()
        if interrupted is not None:
            raise interrupted from resuming.error
        resuming.result()

    def _leave(self, entering: _Work[JobReport]) -> None:
        entering.ended()  # after a failure, it has resumed the job itself
        self._resume()

    def _resume(self) -> None:
        resumption = self._resumption
        assert resumption is not None  # it was entered
        # In another thread, and not stopped by what interrupts this one.
        _Work(resumption.carry_out).ended()


def _loop_is_running() -> bool:
    """Whether a loop of asyncio's runs in this thread."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _may_wait() -> bool:
    """Whether the coroutine that calls this, at a `GeneratorExit`, may wait: one that is closed cannot, but an async generator may."""
    frame = inspect.currentframe()
    frame = frame.f_back if frame is not None else None
    while frame is not None and frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return frame is not None and bool(frame.f_code.co_flags & inspect.CO_ASYNC_GENERATOR)


class _Work(Generic[_T]):
    """Work in a thread of its own, which completes whatever happens to those that wait for it: cancellations, ^C, the end of a loop.

    ^C can come between any two steps of the main thread, also when it has just taken a lock inside of `threading.Condition`, which stays
    taken then. So whoever waits shares no such lock with the thread, not even that of `threading.Thread.start` or a
    `concurrent.futures.Future`. A loop's executor has few threads besides, and as many waiting resumes would keep the pause from starting
    that makes room.
    """

    def __init__(self, work: Callable[[], _T]) -> None:
        self._work, self._claimed = work, threading.Lock()
        self._has_ended = False
        self._result: list[_T] = []
        #: Wake those that wait, once each.
        self._wakes: list[Callable[[], object]] = []
        #: What has failed, once it has ended.
        self.error: BaseException | None = None

    def prepare(self) -> _Work[_T]:
        """Takes what it will need."""
        return self

    def drop(self) -> None:
        """It is not needed any more, and was not started."""

    def start(self) -> _Work[_T]:
        """Starts it, unless it has started."""
        if self._claimed.locked():
            return self
        if sys.is_finalizing():  # a thread that is started now never runs
            self._run()
            return self
        started = threading.Lock()
        started.acquire()
        try:
            _thread.start_new_thread(self._start_thread, (started,))
            started.acquire()
        except RuntimeError:  # there can be no more threads: too many, or the interpreter ends
            self._run()
        return self

    def _start_thread(self, started: threading.Lock) -> None:
        """In a thread of its own, because only the main thread gets ^C."""
        try:
            threading.Thread(target=self._run, name="vramctl-job", daemon=False).start()
            started.release()
        except RuntimeError:
            started.release()
            self._run()

    def carry_out(self) -> _T:
        """Does it in this thread."""
        return self._work()

    def _run(self) -> None:
        if not self._claimed.acquire(blocking=False):
            return
        try:
            self._result.append(self._work())
        except BaseException as error:
            self.error = error
        self._has_ended = True
        for wake in self._wakes:
            with contextlib.suppress(RuntimeError):  # its loop is closed
                wake()

    def stop(self) -> None:
        """Asks it to end soon. Most cannot."""

    def result(self) -> _T:
        """Of what has ended: what it returned, or raises what it raised."""
        if self.error is not None:
            raise self.error
        return self._result[0]

    def ended(self) -> _T:
        """Waits for its result. What interrupts the wait, like ^C, asks it to stop, and is raised after its end."""
        interrupted: BaseException | None = None
        while True:
            try:
                if self._has_ended:
                    break
                if interrupted is not None:
                    self.stop()
                self._wait()
            except BaseException as error:
                interrupted = error
        if interrupted is not None:
            raise interrupted from self.error
        return self.result()

    def _wait(self) -> None:
        """Starts it and waits in this thread until it has ended."""
        self.start()
        woken = threading.Lock()
        woken.acquire()
        self._wakes.append(woken.release)
        # Else, it may have looked for those that wait before this one was there.
        if not self._has_ended:
            woken.acquire()

    async def end(self) -> None:
        """Waits until it has ended."""
        if not _loop_is_running():  # nobody would wake this task
            self._wait()
            return
        loop = asyncio.get_running_loop()
        woken = loop.create_future()  # `asyncio.Event` has a lock
        self._wakes.append(lambda: loop.call_soon_threadsafe(_wake, woken))
        if not self._has_ended:
            await woken

    async def outlast(self) -> BaseException | None:
        """Starts it and waits until it has ended. Returns what has interrupted the wait, a cancellation or ^C, to be raised now."""
        interrupted = None
        while True:
            try:
                if self._has_ended:
                    return interrupted
                await self.start().end()
            except GeneratorExit:  # the task was dropped, and cannot wait
                raise
            except BaseException as error:
                interrupted = error


def _wake(woken: asyncio.Future[None]) -> None:
    if not woken.done():  # those that waited for it may have been cancelled
        woken.set_result(None)


async def _in_thread(work: Callable[[], _T]) -> _T:
    running = _Work(work).start()
    await running.end()
    return running.result()


def _policy(backup: str) -> str | None:
    return None if _request.checked(backup) == "default" else backup


def _limit(seconds: float | None) -> int:
    """In milliseconds. None: without end."""
    limit = _request.milliseconds(seconds)
    return 10**12 if limit is None else limit


class _Operation(_Work[dict[str, Any]]):
    """An operation of the command line, and its outcome. Fields that are None are left out.

    The command runs in a session of its own: the terminal's ^C does not reach it there, nor do ^Z and a hangup. `stop` does, and so does the
    end of this program. Then it ends what it waits for, and undoes what it has begun.
    """

    def __init__(self, request: Mapping[str, Any]) -> None:
        super().__init__(self._run_command)
        given = {name: value for name, value in request.items() if value is not None}
        self._request = {"version": _VERSION, **given}
        self._command: _Command | None = None
        self._is_told = self._stopped = False
        self._changing = threading.Lock()

    def prepare(self) -> _Operation:
        try:
            self._command = _Command()
        except OSError as error:
            failed = errors.Internal(f"vramctl {self._request['operation']} cannot be started: {error.strerror or error}")
            failed.committed = False
            raise failed from error
        return self

    def drop(self) -> None:
        if self._command is not None:
            self._command.tell("")  # a child that this program has forked may keep its stdin open
            self._command.close()

    def stop(self) -> None:
        with self._changing:
            self._stopped = True
            self._cancel()

    def _cancel(self) -> None:
        if self._is_told and self._command is not None:
            # Not by closing its stdin: a child that this program has forked would keep it open.
            self._command.tell("")

    def _run_command(self) -> dict[str, Any]:
        if self._command is None:
            self.prepare()
        command = self._command
        assert command is not None
        outcome: dict[str, Any] | None = None
        with contextlib.closing(command):
            command.tell(json.dumps(self._request))
            with self._changing:
                self._is_told = True
                if self._stopped:  # before it could be told
                    self._cancel()
            for line in command.replies():
                reply = json.loads(line)
                if reply["reply"] == "outcome":
                    outcome = reply
                elif "text" in reply:
                    _log.log(_LEVELS.get(reply["reply"], logging.INFO), "%s", reply["text"])
            with self._changing:
                self._is_told = False
            code = command.wait()
        if outcome is None:
            why = command.complaints() or f"it ended with {code}"
            if code < 0:
                why = f"ended by signal {-code}; `vramctl status` shows what has become of it"
            error: errors.Error = errors.Internal(f"vramctl {self._request['operation']}: {why}")
            error.committed = False if code == 2 else None  # 2: it does not know operations
            raise error
        if outcome.get("error"):
            error = errors._from_reply(outcome["error"])
            if isinstance(error, errors.SeveralProcesses):
                # The command's words are for people at a terminal.
                error = errors.SeveralProcesses(_choose_a_name(error.pids), error.numbers)
            error.committed = outcome["committed"]
            raise error
        return outcome


class _Command:
    """``vramctl operate`` or ``coordinate``, which waits for its first line. Without one, it ends with this program."""

    def __init__(self, word: str = "operate") -> None:
        self._child = subprocess.Popen(
            [_commands().command(), word],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            start_new_session=True,
        )
        self._complaints = b""

    def tell(self, line: str) -> None:
        assert self._child.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it says why
            os.write(self._child.stdin.fileno(), line.encode() + b"\n")

    def replies(self) -> Iterator[bytes]:
        """Its replies, line by line."""
        assert self._child.stdout is not None and self._child.stderr is not None
        replies, complaints = self._child.stdout.fileno(), self._child.stderr.fileno()
        speaking, unread = select.poll(), b""
        speaking.register(replies, select.POLLIN)
        speaking.register(complaints, select.POLLIN)
        while True:
            # Also once it has ended, what it has complained of comes first.
            for descriptor, _ in sorted(speaking.poll(), key=lambda ready: ready[0] == replies):
                part = os.read(descriptor, 1 << 16)
                if descriptor == complaints:
                    self._complaints += part
                    if not part:
                        speaking.unregister(complaints)
                    continue
                *lines, unread = (unread + part).split(b"\n")
                yield from lines
                if not part:
                    return

    def complaints(self) -> str:
        """What it has written to stderr."""
        return self._complaints.decode(errors="replace").strip()

    def wait(self) -> int:
        return self._child.wait()

    def close(self) -> None:
        """Waits for its end, which it comes to without a request."""
        with self._child:
            pass


@functools.cache
def _commands() -> ModuleType:
    """The module that finds the command line: not imported with this one, because `python -m vramctl` runs it."""
    from . import __main__

    return __main__


_LEVELS = {"warning": logging.WARNING, "failure": logging.ERROR}
