"""Imports the enclosing `vramctl` package.

`import vramctl` alone may find another version or none, because `vramctl run` also serves interpreters into which nothing
was installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: The directory of the `vramctl` package.
DIRECTORY = Path(__file__).resolve().parents[2]

# site/ redirects to the package without exposing anything else beside it.
_site = str(DIRECTORY / "site")
sys.path.insert(0, _site)
try:
    import vramctl
finally:
    sys.path.remove(_site)

__all__ = ["DIRECTORY", "Invalid", "NotPreloaded", "vramctl"]


class Invalid(vramctl.errors.Invalid, AssertionError):
    """An invalid argument that torch_memory_saver refuses by an assertion."""


class NotPreloaded(vramctl.errors.NotPreloaded, AssertionError):
    """The same of a missing library."""
