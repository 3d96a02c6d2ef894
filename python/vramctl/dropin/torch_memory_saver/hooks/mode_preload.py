"""Hook mode ``preload``: the preloaded library intercepts the CUDA runtime."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from .._vramctl import vramctl
from ..utils import PRELOAD, get_binary_path_from_package, is_library


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Preloads the library into processes started inside. A no-op under `vramctl run`, which does that already. Sets the
    process's environment, so processes that other threads start meanwhile get the library, too.
    """
    before = os.environ.get("LD_PRELOAD")
    present = [path for path in re.split("[ :]", before or "") if path]
    if any(map(is_library, present)):
        yield
        return
    library = str(get_binary_path_from_package(PRELOAD))
    if re.search("[ :]", library):
        raise vramctl.errors.Invalid(
            f"LD_PRELOAD cannot hold paths with spaces or colons, and the library is at {library}: set VRAMCTL_LIB to a "
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
