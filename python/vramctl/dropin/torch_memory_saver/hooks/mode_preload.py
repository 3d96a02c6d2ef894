"""Hook mode ``preload``: the library is preloaded, and answers the CUDA runtime's functions."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from .._vramctl import vramctl
from ..utils import PRELOAD, get_binary_path_from_package, is_library


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Processes that are started inside have the library preloaded. Under `vramctl run` they have anyway, and nothing is
    changed. The environment is the process's: do not start processes that should not have it in another thread meanwhile.
    """
    before = os.environ.get("LD_PRELOAD")
    present = [path for path in re.split("[ :]", before or "") if path]
    if any(map(is_library, present)):
        yield
        return
    library = str(get_binary_path_from_package(PRELOAD))
    if re.search("[ :]", library):
        raise vramctl.errors.Invalid(
            f"LD_PRELOAD takes no path with a space or colon in it, and the library is at {library}: set VRAMCTL_LIB to a "
            "symbolic link to it"
        )
    os.environ["LD_PRELOAD"] = ":".join([library, *present])
    try:
        yield
    finally:
        if before is None:
            os.environ.pop("LD_PRELOAD", None)
        else:
            os.environ["LD_PRELOAD"] = before
