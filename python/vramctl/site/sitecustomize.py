"""Python runs this at startup in programs under `vramctl run`, which puts this directory on PYTHONPATH.

It registers import hooks for inference engines and torch if something is preloaded, then runs the `sitecustomize` it hides.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # importing `typing` would slow down short programs
if TYPE_CHECKING:
    from types import ModuleType

_here = os.path.dirname(os.path.abspath(__file__))


def _watch_for_engines() -> None:
    # Import nothing if nothing is preloaded. Whether it is our library is checked once an engine is imported: the file may
    # have any name, and looking up its functions needs modules that would slow down short programs.
    if not os.environ.get("LD_PRELOAD"):
        return
    import importlib.util

    # Load it by path, so that the package itself is imported only when needed.
    path = os.path.join(os.path.dirname(_here), "_imports.py")
    spec = importlib.util.spec_from_file_location("vramctl._imports", path)
    assert spec is not None and spec.loader is not None  # always true for a .py file
    imports = sys.modules.get(spec.name)
    if imports is None:
        imports = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = imports
        spec.loader.exec_module(imports)

    def install(module: ModuleType) -> None:
        importlib.import_module("vramctl.engines." + module.__name__).install()

    for engine in ("vllm", "sglang"):
        imports.when_imported(engine, install)

    imports.serve_torch()


def _run_the_next() -> None:
    """Runs the next `sitecustomize` on the path, under its own name."""
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    places = [os.path.realpath(place or os.curdir) for place in sys.path]
    own = os.path.realpath(_here)
    behind = places.index(own) + 1 if own in places else 0
    spec = PathFinder.find_spec("sitecustomize", [place for place in places[behind:] if place != own])
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


# The next one may search for its own successor and find this one again.
if "_vramctl_sitecustomize" not in sys.modules:
    sys.modules["_vramctl_sitecustomize"] = sys.modules[__name__]
    try:
        _watch_for_engines()
    except Exception as error:
        # The program must run regardless.
        sys.stderr.write(f"vramctl: cannot tag the memory of inference engines: {error}\n")
    _run_the_next()
