"""The package `vramctl` that this one is a part of.

Where a program finds this package (``PYTHONPATH``), it need not find that one, or may find another version of it: `vramctl
run` works for interpreters into which nothing was installed. So it is loaded from where it lies around this one.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

#: The directory of `vramctl`, which has this package's in it.
DIRECTORY = Path(__file__).resolve().parents[2]


def _load() -> ModuleType:
    if "vramctl" in sys.modules:
        return sys.modules["vramctl"]
    spec = importlib.util.spec_from_file_location(
        "vramctl", DIRECTORY / "__init__.py", submodule_search_locations=[str(DIRECTORY)]
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"the package vramctl should be in {DIRECTORY}; install it again")
    module = importlib.util.module_from_spec(spec)
    sys.modules["vramctl"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules["vramctl"]
        raise
    return module


vramctl = _load()
