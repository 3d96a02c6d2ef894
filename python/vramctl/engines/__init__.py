"""Inference engines, whose memory gets its tags by itself: what the adapters have in common.

Each engine has one module here, which begins with a table: what is hooked, through which of the engine's interfaces, in
which versions, and what happens in a version that lacks it. `tests/contract_engines.py` holds the tables against the
engines' own sources. Nothing is hooked unless the library is preloaded. Tags: `weights`, `kv_cache`, `cuda_graph`.

A failure of ours never reaches the engine: it is logged once, and the engine's own function runs as if we were not there.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, Callable, TypeVar

import vramctl
from vramctl._imports import when_imported

logger = logging.getLogger("vramctl")

Function = Callable[..., Any]
_AnyFunction = TypeVar("_AnyFunction", bound=Function)


# ---- the tables ----

#: Interfaces that are none.
BY_NAME = "by name"
READ = "read, not hooked"


@dataclasses.dataclass(frozen=True)
class Place:
    """A name in an engine's sources, as `package.module:Class.method`, and the versions that have it."""

    name: str
    since: str
    #: None: the newest known version has it too.
    until: str | None = None

    @property
    def module(self) -> str:
        return self.name.partition(":")[0]

    @property
    def path(self) -> str:
        """The name inside its module."""
        return self.name.partition(":")[2]


@dataclasses.dataclass(eq=False)
class Hook:
    """A row of an engine's table."""

    #: What we do there.
    what: str
    #: Through which interface of the engine.
    through: str
    #: Where. One version has one of these, or several at once.
    places: tuple[Place, ...]
    #: What happens in a version that has none of them.
    without: str
    #: Called as `around(original, *arguments)` in place of the original. None: nothing is called in place of it.
    around: Any = None


def around(hook: Hook) -> Callable[[_AnyFunction], _AnyFunction]:
    """Decorates the function of a row of a table."""

    def decorate(function: _AnyFunction) -> _AnyFunction:
        hook.around = function
        return function

    return decorate


def present(package: ModuleType, hooks: tuple[Hook, ...]) -> list[tuple[Hook, Place]]:
    """The functions to hook in this version of an engine. Says once what it lacks."""
    found: list[tuple[Hook, Place]] = []
    for hook in hooks:
        if hook.around is not None:
            places = [place for place in hook.places if defines(package, place)]
            if not places:
                lacks(package, hook)
            found += [(hook, place) for place in places]
    return found


def defines(package: ModuleType, place: Place) -> bool:
    """Whether this version's sources define the name. They are read, because importing them is the engine's affair."""
    inside = os.path.join(*place.module.split(".")[1:])
    for folder in package.__path__:
        for file in (f"{inside}.py", os.path.join(inside, "__init__.py")):
            with contextlib.suppress(OSError), open(os.path.join(folder, file), encoding="utf-8", errors="replace") as source:
                text = source.read()
                return all(re.search(rf"^\s*(class|def) {part}\b", text, re.MULTILINE) for part in place.path.split("."))
    return False


def lacks(package: ModuleType, hook: Hook) -> None:
    """Says that this version of an engine is not as the table says."""
    version = getattr(package, "__version__", "of unknown version")
    say_once(f"{package.__name__} {version} lacks {hook.places[0].path} ({hook.what}): {hook.without}")


# ---- hooking ----


class _Original:
    """An engine's function for one call, which remembers what became of it."""

    def __init__(self, function: Function) -> None:
        self.function = function
        self.returned = False
        self.result: Any = None
        self.error: BaseException | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        try:
            self.result = self.function(*arguments, **keywords)
        except BaseException as error:
            self.error = error
            raise
        self.returned = True
        return self.result


def guarded(around: Function) -> Function:
    """`around` for use as a hook: what fails in it, other than the original, is logged once and the engine goes on without."""

    @functools.wraps(around)
    def hook(function: Function, *arguments: Any, **keywords: Any) -> Any:
        original = _Original(function)
        try:
            return around(original, *arguments, **keywords)
        except Exception as error:
            if original.error is error:
                raise
            name = getattr(function, "__qualname__", repr(function))
            say_once(f"{name} runs as if vramctl were not there, because of an error", exc_info=True)
        if original.error is not None:
            raise original.error
        return original.result if original.returned else function(*arguments, **keywords)

    return hook


#: On a function that wraps another: which one.
_MARK = "_vramctl_wraps"


def wrap(owner: Any, name: str, around: Function) -> bool:
    """Puts `around(original, *arguments)` in place of the function `owner.name`. False: there is none. Once a function."""
    original = vars(owner).get(name)
    static = isinstance(original, staticmethod)
    if isinstance(original, staticmethod):
        original = original.__func__
    if not callable(original):
        return False
    if hasattr(original, _MARK):
        return True
    hook = guarded(around)

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return hook(original, *arguments, **keywords)

    setattr(wrapper, _MARK, original)
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)
    if isinstance(owner, ModuleType):
        _replace_imported(owner, original, wrapper)
    return True


def _replace_imported(owner: ModuleType, original: Any, wrapper: Any) -> None:
    """Modules of the same package may have imported the function from its own before we came."""
    package = owner.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for attribute in [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is original]:
                setattr(module, attribute, wrapper)


_to_wrap: dict[Place, Hook] = {}


def wrap_when_imported(hook: Hook, place: Place) -> None:
    """Hooks by name: for engines that have no interface for it."""
    _to_wrap[place] = hook
    when_imported(place.module, _wrap_in)


def _wrap_in(module: ModuleType) -> None:
    for place, hook in list(_to_wrap.items()):
        if place.module == module.__name__:
            *owners, name = place.path.split(".")
            owner: Any = module
            for part in owners:
                owner = getattr(owner, part, None)
            if owner is None or not wrap(owner, name, hook.around):
                lacks(sys.modules[module.__name__.partition(".")[0]], hook)


_said: set[str] = set()


def say_once(text: str, *arguments: Any, exc_info: bool = False) -> None:
    """A warning, the first time."""
    if text not in _said:
        _said.add(text)
        logger.warning("vramctl: " + text, *arguments, exc_info=exc_info)


def announce(name: str) -> None:
    """Tells the library which engine lives in this process. A pause from outside then does not discard its KV cache without
    asking it."""
    set_engine = getattr(ctypes.CDLL(None), "vramctl_set_engine", None)
    if set_engine is not None:
        set_engine(name.encode())


# ---- regions ----


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """What torch allocates inside gets the tag, in segments of its own. What of it is free again at the end goes back.

    The pool is for this time only, and not one for each tag, so that memory needed only while a model loads is not held for
    ever.
    """
    with vramctl.region(tag, pool=False), vramctl._torch.pool_for_once(tag):
        yield


@contextlib.contextmanager
def thread_region(tag: str | None) -> Iterator[None]:
    """A region and nothing else. Torch has a pool for each graph, and an engine may capture thousands of pieces of graphs:
    to ask torch for its settings each time, as `vramctl.region` does, would take longer than the capture."""
    library = vramctl._library.get()
    library.call("region_begin", vramctl._library.tag(tag), vramctl._library.backup("default"))
    try:
        yield
    finally:
        library.call("region_end")


@contextlib.contextmanager
def if_possible(region: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """A region around code of the engine's. If it cannot be begun or ended, the engine runs on without it."""
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(region)
    except Exception as error:
        say_once("memory keeps the process's own tag, because a region could not be entered: %s", error)
    try:
        yield
    finally:
        try:
            stack.close()
        except Exception as error:
            say_once("memory may get a wrong tag, because a region could not be left: %s", error)


def leave_to_cuda(original: Function, *arguments: Any, **keywords: Any) -> Any:
    """What is allocated inside is handed to other processes by CUDA IPC, which works with CUDA's own memory only."""
    with if_possible(thread_region(None)):
        return original(*arguments, **keywords)


# ---- what engines share ----

EXPERT_BUFFERS = Hook(
    what="leaves DeepEP's buffers to CUDA, which shares them by CUDA IPC",
    through=BY_NAME,
    places=(Place("deep_ep:Buffer.__init__", "1.0"),),
    without="if it cannot share its memory, start with `vramctl run --no-tag`",
    around=leave_to_cuda,
)

GRAPHS = Hook(
    what="tags the memory of CUDA graphs `cuda_graph`",
    through=BY_NAME,
    places=(Place("torch.cuda:CUDAGraph.capture_begin", "2.0"), Place("torch.cuda:CUDAGraph.capture_end", "2.0")),
    without="their memory keeps the process's own tag",
)


def share_expert_buffers() -> None:
    """DeepEP asks for a handle of each buffer as soon as it is made. Its newer `ElasticBuffer` has memory of NCCL's."""
    wrap_when_imported(EXPERT_BUFFERS, EXPERT_BUFFERS.places[0])


_graph_tag: str | None = None


def tag_graphs(tag: str | None) -> None:
    """From now on, the memory of CUDA graphs that torch captures gets the tag; None: it is left to CUDA."""
    global _graph_tag
    _graph_tag = tag
    torch = vramctl._torch.required()
    graph = torch.cuda.CUDAGraph
    # Both or none: a region that is begun must be ended.
    if {"capture_begin", "capture_end"} <= set(vars(graph)):
        wrap(graph, "capture_begin", _capture_begin)
        wrap(graph, "capture_end", _capture_end)
    else:
        lacks(torch, GRAPHS)


def _capture_begin(original: Function, graph: Any, *arguments: Any, **keywords: Any) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(if_possible(thread_region(_graph_tag)))
        done = original(graph, *arguments, **keywords)
        graph._vramctl_region = stack.pop_all()
    return done


def _capture_end(original: Function, graph: Any, *arguments: Any, **keywords: Any) -> Any:
    with vars(graph).pop("_vramctl_region", None) or contextlib.nullcontext():
        return original(graph, *arguments, **keywords)
