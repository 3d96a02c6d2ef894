"""Python runs this at startup in programs under `vramctl run`, which puts this directory on PYTHONPATH.

It registers import hooks for inference engines and torch if something is preloaded, then runs the `sitecustomize` it hides.

Any Python runs it, back to 2.7, so it has neither annotations nor anything else that those before 3.9 do not know.
"""

# mypy: disable-error-code="no-untyped-def,no-untyped-call"

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))


def _watch_for_engines():
    # Import nothing if nothing is preloaded. Whether it is our library is checked once an engine is imported: the file may
    # have any name, and looking up its functions needs modules that would slow down short programs.
    if not os.environ.get("LD_PRELOAD") or sys.version_info < (3, 9):
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

    def install(module):
        importlib.import_module("vramctl.engines." + module.__name__).install()

    for engine in ("vllm", "sglang"):
        imports.when_imported(engine, install)

    imports.serve_torch()


def _run_the_next():
    """Runs the next `sitecustomize` on the path, under its own name."""
    places = [os.path.realpath(place or os.curdir) for place in sys.path]
    own = os.path.realpath(_here)
    behind = places.index(own) + 1 if own in places else 0
    there = [place for place in places[behind:] if place != own]
    if sys.version_info < (3, 5):
        _run_in_old_python(there)
        return
    from importlib.machinery import PathFinder
    from importlib.util import module_from_spec

    spec = PathFinder.find_spec("sitecustomize", there)
    if spec is None or spec.loader is None:
        return
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


def _run_in_old_python(places):
    import imp

    try:
        found = imp.find_module("sitecustomize", places)
    except ImportError:
        return
    # This one must not be taken for it, and executed again.
    del sys.modules["sitecustomize"]
    try:
        imp.load_module("sitecustomize", *found)  # type: ignore[arg-type]
    finally:
        if found[0] is not None:
            found[0].close()


# The next one may search for its own successor and find this one again.
if "_vramctl_sitecustomize" not in sys.modules:
    sys.modules["_vramctl_sitecustomize"] = sys.modules[__name__]
    try:
        _watch_for_engines()
    except Exception:
        # The program must run regardless.
        sys.stderr.write("vramctl: cannot tag the memory of inference engines: %s\n" % sys.exc_info()[1])
    _run_the_next()
