"""Inference engines, whose memory gets its tags by itself: what they have in common.

A module of this package wraps the few functions in which its engine makes weights, KV cache and CUDA graphs. It does so
only where the library is preloaded, and only in the versions that it knows; in others it says once that all of the
engine's memory stays under the process's own tag. Tags: `weights`, `kv_cache`, `cuda_graph`.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import logging
import sys
from typing import Any, Callable, Iterator, Optional

import vramctl
from vramctl._imports import when_imported

logger = logging.getLogger("vramctl")


def announce(name: str) -> None:
    """Says to the library which engine lives in this process: then a pause from outside does not discard its KV cache
    without asking it."""
    set_engine = getattr(ctypes.CDLL(None), "vramctl_set_engine", None)
    if set_engine is not None:
        set_engine(name.encode())


# ---- pools ----


@contextlib.contextmanager
def tagged(tag: str) -> Iterator[None]:
    """What torch allocates inside gets the tag, in segments of its own; what of it is free again at the end goes back.

    A pool for each time, and not one for each tag: so what was needed while a model was loaded is not held for ever.
    """
    with vramctl.region(tag, pool=False), vramctl._torch.pool_for_once(tag):
        yield


@contextlib.contextmanager
def tagged_if_possible(tag: str) -> Iterator[None]:
    """The same for a program that has not asked for it: where it cannot be done, the program runs on without the tag."""
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(tagged(tag))
        except Exception as error:  # whatever it is, it is not the program's affair
            say_once("memory gets no tag %s, but the process's own: %s", tag, error)
        yield


# ---- wrapping ----

#: On a function that wraps another: which one.
_MARK = "_vramctl_wraps"


def wrap(owner: Any, name: str, around: Callable[..., Any]) -> bool:
    """Puts `around(original, *arguments)` in place of the function `owner.name`. False: there is none. Once a function."""
    original = vars(owner).get(name)
    static = isinstance(original, staticmethod)
    if static:
        original = original.__func__
    if not callable(original):
        return False
    if hasattr(original, _MARK):
        return True

    @functools.wraps(original)
    def wrapper(*arguments: Any, **keywords: Any) -> Any:
        return around(original, *arguments, **keywords)

    setattr(wrapper, _MARK, original)
    setattr(owner, name, staticmethod(wrapper) if static else wrapper)
    return True


_said = set()


def say_once(text: str, *arguments: Any) -> None:
    """A warning, the first time."""
    if text not in _said:
        _said.add(text)
        logger.warning("vramctl: " + text, *arguments)


# ---- CUDA graphs ----


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


# ---- what workers hand each other ----


def leave_to_cuda(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    """What is allocated inside is handed over by CUDA IPC, which works with CUDA's own memory only."""
    with thread_region(None):
        return original(*arguments, **keywords)


def share_expert_buffers() -> None:
    """DeepEP's buffers are of `cudaMalloc`, and a handle of each is asked for at once, where both engines make them."""
    when_imported("deep_ep", _wrap_expert_buffers)


def _wrap_expert_buffers(module: Any) -> None:
    # The newer ElasticBuffer has memory of NCCL's.
    buffer = getattr(module, "Buffer", None)
    if buffer is None or not wrap(buffer, "__init__", leave_to_cuda):
        say_once("DeepEP has no Buffer as is known here; if it cannot share its memory, start with `vramctl run --no-tag`")


_graph_tag: Optional[str] = None


def tag_graphs(tag: Optional[str]) -> None:
    """From now on, the memory of CUDA graphs that torch captures gets the tag; None: it is left to CUDA."""
    global _graph_tag
    _graph_tag = tag
    import torch

    graph = torch.cuda.CUDAGraph
    # Both or none: a region that is begun must be ended.
    if {"capture_begin", "capture_end"} <= set(vars(graph)):
        wrap(graph, "capture_begin", _capture_begin)
        wrap(graph, "capture_end", _capture_end)
    else:
        say_once(
            "torch %s captures graphs otherwise than is known here; their memory gets the process's own tag", torch.__version__
        )


def _capture_begin(original: Callable[..., Any], graph: Any, *arguments: Any, **keywords: Any) -> Any:
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(thread_region(_graph_tag))
        except Exception as error:  # as above
            say_once("memory of CUDA graphs gets the process's own tag: %s", error)
        done = original(graph, *arguments, **keywords)
        graph._vramctl_region = stack.pop_all()
    return done


def _capture_end(original: Callable[..., Any], graph: Any, *arguments: Any, **keywords: Any) -> Any:
    with vars(graph).pop("_vramctl_region", None) or contextlib.nullcontext():
        return original(graph, *arguments, **keywords)


def version_of(package: str) -> str:
    """An engine's version, for messages."""
    return str(getattr(sys.modules.get(package), "__version__", "of unknown version"))
