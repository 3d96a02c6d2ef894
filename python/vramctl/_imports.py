"""Has something done when a module is imported, without importing it: one finder in front of the others.

Nothing but the interpreter's own modules is needed, so that a program can have this from its start at no cost.
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
    """Calls `function(module)` when the module `name` has been executed: now, if it has been, and after each reload.

    What `function` raises is logged and does not reach the program. The same function is not registered twice.
    """
    functions = _waiting.setdefault(name, [])
    if function in functions:
        return
    functions.append(function)
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
    module = sys.modules.get(name)
    # One that is being executed has passed our finder, or began before it was there and lacks what is looked for.
    if module is not None and not getattr(getattr(module, "__spec__", None), "_initializing", False):
        _call(function, module)


def _call(function: Callable[[Any], object], module: ModuleType) -> None:
    try:
        function(module)
    except Exception:
        import logging

        logging.getLogger("vramctl").warning(
            "vramctl: %s is left as it is, because of an error", module.__name__, exc_info=True
        )


class _Finder:
    """Finds what the other finders find, and has the module's loader say when it has executed it."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        # Another tool's finder may ask all finders in turn, this one again among them.
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
    """Has the loader of `spec` execute its module and then call who waits for it. The loader is afterwards as before."""
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None or isinstance(loader, type):
        return  # the interpreter's own loaders are classes, shared by all their modules

    def exec_module(module: ModuleType) -> None:
        # Loaders of archives serve several modules.
        if module.__name__ == spec.name:
            vars(loader).pop("exec_module", None)
        execute(module)
        if module.__name__ == spec.name:
            for function in _waiting.get(spec.name, ()):
                _call(function, module)

    try:
        loader.exec_module = exec_module  # type: ignore[union-attr,method-assign]
    except AttributeError:
        pass  # a loader that takes no attributes: its module is imported as ever, and nobody is told
