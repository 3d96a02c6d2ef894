"""Tags the memory of inference engines: the code that the adapters share.

Each engine has one module, which starts with a table: what we hook, through which interface, in which versions, and what
happens in a version that lacks it. `tests/contract_engines.py` checks the tables against the engines' sources. Nothing is
hooked unless the library is preloaded. Tags: `weights`, `kv_cache`, `cuda_graph`.

Our failures never reach the engine: they are logged once, and the engine's own function runs.
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

#: Hooks that use no interface of the engine.
BY_NAME = "by name"
READ = "read, not hooked"


@dataclasses.dataclass(frozen=True)
class Place:
    """A name in an engine's sources, as `package.module:Class.method`, and the versions that have it."""

    name: str
    since: str
    #: None: still in the newest known version.
    until: str | None = None

    @property
    def module(self) -> str:
        return self.name.partition(":")[0]

    @property
    def path(self) -> str:
        """The name within its module."""
        return self.name.partition(":")[2]


@dataclasses.dataclass(eq=False)
class Hook:
    """A row of an engine's table."""

    #: What the hook does.
    what: str
    #: The engine's interface that it uses.
    through: str
    #: Where it applies. A version may have several of these.
    places: tuple[Place, ...]
    #: What happens in a version that has none of them.
    without: str
    #: Replaces the original, and is called as `around(original, *arguments)`. None: the row replaces nothing.
    around: Any = None


def around(hook: Hook) -> Callable[[_AnyFunction], _AnyFunction]:
    """Decorator: makes the function a row's `around`."""

    def decorate(function: _AnyFunction) -> _AnyFunction:
        hook.around = function
        return function

    return decorate


def present(package: ModuleType, hooks: tuple[Hook, ...]) -> list[tuple[Hook, Place]]:
    """The functions to hook in this version of an engine. Warns once about missing ones, unless they came later."""
    found: list[tuple[Hook, Place]] = []
    for hook in hooks:
        if hook.around is not None:
            if not hooks_all(package, hook):
                lacks(package, hook)
            found += [(hook, place) for place in hook.places if defines(package, place)]
    return found


def hooks_all(package: ModuleType, hook: Hook) -> bool:
    """Whether this version has a place of the hook, or is older than what needs it."""
    return any(defines(package, place) for place in hook.places) or all(is_before(package, one.since) for one in hook.places)


def is_before(package: ModuleType, since: str) -> bool:
    """Whether this version of an engine is older. One without a known number is not."""
    version = re.match(r"\d+(\.\d+)*", str(getattr(package, "__version__", "")))
    return version is not None and [int(part) for part in version[0].split(".")] < [int(part) for part in since.split(".")]


def defines(package: ModuleType, place: Place) -> bool:
    """Whether this version's sources define the name. Reads them, to leave importing to the engine."""
    inside = os.path.join(*place.module.split(".")[1:])
    for folder in package.__path__:
        for file in (f"{inside}.py", os.path.join(inside, "__init__.py")):
            with contextlib.suppress(OSError), open(os.path.join(folder, file), encoding="utf-8", errors="replace") as source:
                text = source.read()
                return all(re.search(rf"^\s*(class|def) {part}\b", text, re.MULTILINE) for part in place.path.split("."))
    return False


def lacks(package: ModuleType, hook: Hook) -> None:
    """Warns that this version of an engine lacks what the table lists."""
    version = getattr(package, "__version__", "(version unknown)")
    say_once(f"{package.__name__} {version} lacks {hook.places[0].path} ({hook.what}): {hook.without}")


# ---- hooking ----


class _Original:
    """An engine's function, for one call; records the outcome."""

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


class Final(Exception):
    """Raised by a hook from an error after which the engine's own function would be wrong, too. The engine gets that error."""


def guarded(around: Function) -> Function:
    """`around` as a safe hook: its own errors are logged once, and the engine continues without it, unless it raises `Final`."""

    @functools.wraps(around)
    def hook(function: Function, *arguments: Any, **keywords: Any) -> Any:
        original = _Original(function)
        try:
            return around(original, *arguments, **keywords)
        except Final as final:
            raise (final.__cause__ or final) from None
        except Exception as error:
            if original.error is error:
                raise
            name = getattr(function, "__qualname__", repr(function))
            say_once(f"{name} runs without vramctl because of an error", exc_info=True)
        if original.error is not None:
            raise original.error
        return original.result if original.returned else function(*arguments, **keywords)

    return hook


#: Attribute of our wrappers: the original function.
MARK = "_vramctl_wraps"


def wrap(owner: Any, name: str, around: Function) -> bool:
    """Replaces the function `owner.name` by `around(original, *arguments)`. Idempotent. False if there is no such function."""
    original = vars(owner).get(name)
    static = isinstance(original, staticmethod)
    if isinstance(original, staticmethod):
        original = original.__func__
    if not callable(original):
        return False
    if hasattr(original, MARK):
        return True
    hook = guarded(around)

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return hook(original, *arguments, **keywords)

    setattr(wrapper, MARK, original)
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)
    if isinstance(owner, ModuleType):
        _replace_imported(owner, original, wrapper)
    return True


def _replace_imported(owner: ModuleType, original: Any, wrapper: Any) -> None:
    """Replaces the function in modules of the package that have already imported it."""
    package = owner.__name__.partition(".")[0]
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == package:
            for attribute in [name for name, value in list(getattr(module, "__dict__", {}).items()) if value is original]:
                setattr(module, attribute, wrapper)


_to_wrap: dict[Place, Hook] = {}


def wrap_when_imported(found: list[tuple[Hook, Place]]) -> None:
    """Hooks by name, where the engine has no interface for it. All at once, since a module may have been imported before."""
    _to_wrap.update({place: hook for hook, place in found})
    for _, place in found:
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
    """Logs a warning the first time."""
    if text not in _said:
        _said.add(text)
        logger.warning("vramctl: " + text, *arguments, exc_info=exc_info)


def announce(name: str, tags_cache: bool) -> None:
    """Tells the library which engine runs in this process, so that it refuses to discard the KV cache from outside while
    the engine's prefix cache still describes it. `tags_cache`: all of the cache gets the tag `kv_cache`."""
    library = ctypes.CDLL(None)
    set_engine = getattr(library, "vramctl_set_engine", None)
    if set_engine is not None:
        set_engine(name.encode())
        library.vramctl_set_engine_tags_cache(int(tags_cache and not _misses_regions))


#: A region could not be entered, so what was allocated there has the process's tag.
_misses_regions = False


# ---- regions ----


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """Tags what torch allocates inside, in separate segments.

    Uses a temporary pool instead of the tag's permanent one, so that memory needed only while a model loads is returned.
    """
    with vramctl.region(tag, pool=False), vramctl._torch.pool_for_once(tag):
        yield


@contextlib.contextmanager
def tagged_in_place(tag: str) -> Iterator[None]:
    """Tags what torch allocates inside, in torch's own pool, for memory whose contents are kept.

    While any other pool is entered, torch returns no free memory to CUDA, not even to allocate more (pytorch#159674): a model whose layers are
    converted after they are loaded would not fit where it does without us. The region begins and ends without free segments, so that few share
    memory with others; what they share is kept with this tag.
    """
    _empty_cache()
    with vramctl.region(tag, pool=False):
        yield
    _empty_cache()


def _empty_cache() -> None:
    torch = vramctl._torch.loaded()
    if torch is not None:
        torch.cuda.empty_cache()


@contextlib.contextmanager
def thread_region(tag: str | None) -> Iterator[None]:
    """A region without torch's pools, for CUDA graphs: torch gives each graph its own pool. An engine may capture thousands
    of graph pieces, and asking torch for its settings each time, as `vramctl.region` does, would take longer than the
    capture."""
    library = vramctl._library.get()
    library.call("region_begin", vramctl._library.tag(tag), vramctl._library.backup("default"))
    try:
        yield
    finally:
        library.call("region_end")


def _misses_a_region() -> None:
    global _misses_regions
    _misses_regions = True
    set_tags_cache = getattr(ctypes.CDLL(None), "vramctl_set_engine_tags_cache", None)
    if set_tags_cache is not None:
        set_tags_cache(0)


@contextlib.contextmanager
def if_possible(region: contextlib.AbstractContextManager[None]) -> Iterator[None]:
    """A best-effort region around the engine's code: if entering or leaving fails, warn and carry on."""
    stack = contextlib.ExitStack()
    try:
        stack.enter_context(region)
    except Exception as error:
        say_once("memory keeps the process's tag, because entering a region failed: %s", error)
        _misses_a_region()
    try:
        yield
    finally:
        try:
            stack.close()
        except Exception as error:
            say_once("memory may get the wrong tag, because leaving a region failed: %s", error)


def with_the_process_s_tag(original: Function, *arguments: Any, **keywords: Any) -> Any:
    """For memory that other ranks open by CUDA IPC, whichever region it is made in. The engines' own calls pause each rank alone, by
    the tags of their regions, and one rank alone cannot pause such memory; from outside, all are paused together."""
    with if_possible(thread_region(os.environ.get("VRAMCTL_TAG") or None)):
        return original(*arguments, **keywords)


# ---- what engines share ----

EXPERT_BUFFERS = Hook(
    what="keeps DeepEP's buffers, which ranks share, out of `weights` and `cuda_graph`",
    through=BY_NAME,
    places=(Place("deep_ep:Buffer.__init__", "1.0"),),
    without="if they are made while the model loads, the engine cannot release `weights`: start with `vramctl run --no-tag`",
    around=with_the_process_s_tag,
)

GRAPHS = Hook(
    what="tags the memory of CUDA graphs `cuda_graph`",
    through=BY_NAME,
    places=(Place("torch.cuda:CUDAGraph.capture_begin", "2.0"), Place("torch.cuda:CUDAGraph.capture_end", "2.0")),
    without="graph memory keeps the process's tag",
)


def leave_graph_buffers_unregistered() -> None:
    """NCCL registers the buffers of captured collectives by their physical memory, which a resume replaces. Workers inherit this."""
    os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")


def tag_expert_buffers() -> None:
    """DeepEP's newer `ElasticBuffer` uses NCCL's memory and needs no hook."""
    wrap_when_imported([(EXPERT_BUFFERS, EXPERT_BUFFERS.places[0])])


_graph_tag: str | None = None


def tag_graphs(tag: str) -> None:
    """Tags the memory of CUDA graphs that torch captures from now on."""
    global _graph_tag
    _graph_tag = tag
    torch = vramctl._torch.required()
    graph = torch.cuda.CUDAGraph
    # Both or neither: each region must end.
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
