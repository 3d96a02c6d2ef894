"""Regions: the tag and policy of what is allocated.

A region belongs to the context that has entered it (`contextvars`), as a decimal context does: each task of asyncio has its own regions. The
library and torch know threads only, so a thread is put into the regions of what it is about to run: when a region begins or ends, and, once
one has begun in a loop, around each of the loop's callbacks.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import inspect
import logging
import threading
import types
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from typing import TYPE_CHECKING, Any, TypeVar

from . import _library, _torch

if TYPE_CHECKING:
    from ._request import Backup

_log = logging.getLogger("vramctl")

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: The regions that this context has entered, the innermost last.
_entered: contextvars.ContextVar[tuple[Region, ...]] = contextvars.ContextVar("vramctl.regions", default=())


class Region(contextlib.AbstractContextManager[None]):
    """A context, or a decorator of a function, a coroutine function or a generator."""

    def __init__(self, tag: str | None, backup: Backup, device: Any, pool: bool) -> None:
        self._tag, self._backup, self._device, self._pool = tag, backup, device, pool
        #: The thread that has entered it.
        self._thread: int | None = None
        self._is_in_loop = False
        self._has_ended = False

    def __enter__(self) -> None:
        self._begin()
        _follow_the_loop()

    def __exit__(self, *_: object) -> None:
        self._end()

    def __call__(self, function: _Function) -> _Function:
        """Each call of the function is in a region of its own: all of it, also where it goes on after it has waited or given a value."""

        def run(*arguments: Any, **keywords: Any) -> Any:
            with self._anew():
                return function(*arguments, **keywords)

        def generate(*arguments: Any, **keywords: Any) -> Generator[Any, Any, Any]:
            return (yield from _steps(self, function(*arguments, **keywords)))

        async def wait(*arguments: Any, **keywords: Any) -> Any:
            return await _steps(self, function(*arguments, **keywords))

        async def generate_and_wait(*arguments: Any, **keywords: Any) -> AsyncIterator[Any]:
            generator = function(*arguments, **keywords)
            step = generator.asend(None)
            while True:
                try:
                    given = await _steps(self, step)
                except StopAsyncIteration:
                    return
                try:
                    step = generator.asend((yield given))
                except GeneratorExit:
                    await _steps(self, generator.aclose())
                    raise
                except BaseException as error:
                    step = generator.athrow(error)

        wrapper: Callable[..., Any] = run
        if inspect.isasyncgenfunction(function):
            wrapper = generate_and_wait
        elif inspect.iscoroutinefunction(function):
            wrapper = wait
        elif inspect.isgeneratorfunction(function):
            wrapper = generate
        return functools.wraps(function)(wrapper)  # type: ignore[return-value]

    def _anew(self) -> Region:
        return Region(self._tag, self._backup, self._device, self._pool)

    def _begin(self) -> None:
        _library.get()  # or it is said that there is none
        if self._thread is not None:
            raise RuntimeError("a region is entered once: call vramctl.region() for each `with`")
        self._settings = _library.tag(self._tag), _library.backup(self._backup)
        self._scope = _torch.Scope(self._tag, self._backup, self._device, self._pool)
        self._scope.open()
        self._thread, self._is_in_loop = threading.get_ident(), asyncio._get_running_loop() is not None
        regions = (*_entered.get(), self)
        try:
            _go_to(regions)
        except BaseException:
            self._has_ended = True
            self._scope.close()
            raise
        _entered.set(regions)

    def _end(self) -> None:
        """Ends this one, wherever it is among those of the thread: the others stay as they are. In another thread or context, as when a generator
        that was left is cleared away, the thread leaves it at its next step.
        """
        self._has_ended = True
        _entered.set(tuple(region for region in _entered.get() if region is not self))
        try:
            _go_to(_entered.get())
        finally:
            self._scope.close()

    def _applies_here(self) -> bool:
        # A context that was copied for another thread has it, too, but that thread has not entered it.
        return not self._has_ended and self._thread == threading.get_ident()

    @contextlib.contextmanager
    def _applied(self) -> Iterator[None]:
        """The calling thread's allocations are of this region."""
        library = _library.get()
        library.call("region_begin", *self._settings)
        try:
            with self._scope.entered():
                yield
        finally:
            library.call("region_end")


class _Thread(threading.local):
    def __init__(self) -> None:
        #: The regions that this thread is in, the innermost last, and how each is left.
        self.regions: list[tuple[Region, contextlib.AbstractContextManager[None]]] = []


_thread = _Thread()


def _go_to(regions: tuple[Region, ...]) -> None:
    """Puts this thread into those of the regions that apply to it, and into no other."""
    now = _thread.regions
    if not now and not regions:
        return
    wanted = [region for region in regions if region._applies_here()]
    same = 0
    while same < min(len(now), len(wanted)) and now[same][0] is wanted[same]:
        same += 1
    while len(now) > same:
        now.pop()[1].__exit__(None, None, None)
    for region in wanted[same:]:
        applied = region._applied()
        applied.__enter__()
        now.append((region, applied))


def refresh() -> None:
    """Leaves what another thread or context has ended."""
    _go_to(_entered.get())


@types.coroutine
def _steps(region: Region, running: Any) -> Generator[Any, Any, Any]:
    """Runs a coroutine or a generator, with each of its steps in a region like this one."""
    step, given = running.send, None
    while True:
        one = region._anew()
        one._begin()
        try:
            made = step(given)
        except StopIteration as end:
            return end.value
        finally:
            one._end()
        try:
            given = yield made
            step = running.send
        except GeneratorExit:
            one = region._anew()
            one._begin()
            try:
                running.close()
            finally:
                one._end()
            raise
        except BaseException as error:
            step, given = running.throw, error


def _go_to_safely(regions: tuple[Region, ...]) -> None:
    try:
        _go_to(regions)
    except Exception:  # it would end the loop
        _log.warning("memory may get the wrong tag, because entering or leaving a region failed", exc_info=True)


def _follow_the_loop() -> None:
    """Has the thread that runs the loop be in the regions of each callback, so also of each step of a task, while it runs."""
    loop = asyncio._get_running_loop()
    if loop is None:
        return
    if isinstance(loop, asyncio.BaseEventLoop):
        _follow_handles()
    elif not hasattr(loop, "_vramctl_follows"):
        with contextlib.suppress(AttributeError):  # it takes no other method
            _follow_other(loop)


@functools.cache
def _follow_handles() -> None:
    """In all of asyncio's own loops."""
    run = asyncio.Handle._run

    @functools.wraps(run)
    def _run(self: Any) -> None:
        _go_to_safely(self._context.get(_entered, ()))
        try:
            run(self)
        finally:
            _go_to_safely(_entered.get())  # those in which the loop runs

    asyncio.Handle._run = _run  # type: ignore[method-assign]


def _follow_other(loop: Any) -> None:
    """In a loop with handles of its own, such as uvloop's. Its tasks are asyncio's, whose steps come through this method. Those that wait for
    their first step already are not followed.
    """
    call_soon = loop.call_soon

    @functools.wraps(call_soon)
    def follow(callback: Callable[..., object], *arguments: Any, context: contextvars.Context | None = None) -> Any:
        return call_soon(_call, callback, arguments, context=contextvars.copy_context() if context is None else context)

    loop._vramctl_follows = True
    loop.call_soon = follow


def _call(callback: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    _go_to_safely(_entered.get())
    try:
        callback(*arguments)
    finally:
        _go_to_safely(tuple(region for region in _entered.get() if not region._is_in_loop))
