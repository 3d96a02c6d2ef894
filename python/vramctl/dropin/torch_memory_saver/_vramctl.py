"""The package `vramctl` that this one is a part of.

Where a program finds this package (``PYTHONPATH``), it need not find that one, or may find another version of it: `vramctl
run` works for interpreters into which nothing was installed. So the one around this package is imported.
"""

from __future__ import annotations

import sys
from pathlib import Path

#: The directory of `vramctl`, which has this package's in it.
DIRECTORY = Path(__file__).resolve().parents[2]

# What is there leads to the package, and to nothing else that lies beside it.
_site = str(DIRECTORY / "site")
sys.path.insert(0, _site)
try:
    import vramctl
finally:
    sys.path.remove(_site)

__all__ = ["DIRECTORY", "vramctl"]
