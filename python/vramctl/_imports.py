"""Post-import hooks: runs a callback when a module is imported, through a finder in front of the others.

Imports nothing but modules that the interpreter loads anyway, because it runs at the start of every program.
"""

from __future__ import annotations

import sys
import threading

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

_waiting: dict[str, list[Callable[[Any], object]]] = {}
_searching = threading.local()


def when_imported(name: str, function: Callable[[Any], object]) -> None:
    """Calls `function(module)` after the module `name` has executed: at once if it already has, and after each reload.

    Exceptions from `function` are logged and never reach the program. Registering a function twice is a no-op.
    """
    functions = _waiting.setdefault(name, [])
    if function in functions:
        return
    functions.append(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    # A module that is still executing either went through our finder, or started before it and is incomplete.
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(function, module)


def serve_torch() -> None:
    """Makes `vramctl trim` work from the moment that torch uses CUDA, here or in a forked child."""
    when_imported("torch", _when_torch_uses_cuda)


def _when_torch_uses_cuda(torch: Any) -> None:
    # Not earlier: importing the package takes more than 1% of the time that importing torch takes. At once if torch uses CUDA already.
    when_initialized = getattr(torch.cuda, "_lazy_call", None)
    if when_initialized is not None:
        when_initialized(_serve)


def _serve() -> None:
    # Torch holds a lock that is not reentrant. An exception here would make the program's first use of CUDA fail.
    try:
        from vramctl import _trim

        _trim.serve()
    except Exception:
        _complain("torch")


def _call(function: Callable[[Any], object], module: ModuleType) -> None:
    try:
        function(module)
    except Exception:
        _complain(module.__name__)


def _complain(name: str) -> None:
    import logging

    logging.getLogger("vramctl").warning("vramctl: left %s unchanged because of an error", name, exc_info=True)


class _Finder:
    """Delegates to the other finders and watches the loader of the module they find."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Another tool's finder may ask all finders in turn, including this one.
        busy = _searching.__dict__.setdefault("names", set())
        if name not in _waiting or name in busy:
            return None
        busy.add(name)
        try:
            for finder in list(sys.meta_path):
                search = None if finder is self else getattr(finder, "find_spec", None)
                spec: ModuleSpec | None = search and search(name, path, target)
                if spec is not None:
                    _watch(spec)
                    return spec
        finally:
            busy.discard(name)
        return None


def _watch(spec: ModuleSpec) -> None:
    """Makes the loader of `spec` run the callbacks after it executes the module, then restores the loader."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return  # built-in loaders are classes, shared by all their modules

    def exec_module(module: ModuleType) -> None:
        # An archive's loader serves several modules.
        if module.__name__ == spec.name:
            vars(loader).pop("exec_module", None)
        execute(module)
        if module.__name__ == spec.name:
            for function in _waiting.get(spec.name, ()):
                _call(function, module)

    try:
        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]
    except AttributeError:
        pass  # a loader with fixed attributes: import the module without callbacks
