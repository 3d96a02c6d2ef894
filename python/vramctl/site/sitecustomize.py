"""Python runs this at its start where `vramctl run` has put this directory on PYTHONPATH.

It asks to be told when an inference engine is imported, if the library is preloaded in this process, and does nothing
else. Then it runs the `sitecustomize` that would have run in its place.
"""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False  # the module `typing` is of no use to a short program
if TYPE_CHECKING:
    from types import ModuleType

_here = os.path.dirname(os.path.abspath(__file__))


def _watch_for_engines() -> None:
    # Where nothing was preloaded, nothing is imported. Whether it was the library is looked at when an engine is there:
    # it may have any name, and looking for its functions takes modules that a short program does without.
    if not os.environ.get("LD_PRELOAD"):
        return
    import importlib.util

    # By its path: the package itself is imported when it is needed.
    path = os.path.join(os.path.dirname(_here), "_imports.py")
    spec = importlib.util.spec_from_file_location("vramctl._imports", path)
    assert spec is not None and spec.loader is not None  # of a file there is always one
    imports = sys.modules.get(spec.name)
    if imports is None:
        imports = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = imports
        spec.loader.exec_module(imports)

    def install(module: ModuleType) -> None:
        importlib.import_module("vramctl.engines." + module.__name__).install()

    for engine in ("vllm", "sglang"):
        imports.when_imported(engine, install)


def _run_the_next() -> None:
    """Runs the `sitecustomize` that comes behind this directory on the path, under that name."""
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


# The next one may look for its next one in turn, and find this one again.
if "_vramctl_sitecustomize" not in sys.modules:
    sys.modules["_vramctl_sitecustomize"] = sys.modules[__name__]
    try:
        _watch_for_engines()
    except Exception as error:
        # The program is to run in any case.
        sys.stderr.write(f"vramctl: engines' memory gets no tags of its own: {error}\n")
    _run_the_next()
