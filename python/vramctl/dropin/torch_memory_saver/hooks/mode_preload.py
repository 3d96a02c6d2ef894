"""Hook mode ``preload``: the preloaded library intercepts the CUDA runtime."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator

from .._vramctl import NotPreloaded, vramctl
from ..utils import PRELOAD, change_env, get_binary_path_from_package, is_library
from .base import HookUtilBase


class HookUtilModePreload(HookUtilBase):
    """The preloaded library."""

    def get_path_binary(self) -> str:
        if not vramctl.is_preloaded():
            raise NotPreloaded(
                "the library is not preloaded in this process, so GPU memory cannot be paused. Start the program with "
                "`vramctl run -- python …`, start this process inside torch_memory_saver.configure_subprocess(), or set "
                'torch_memory_saver.hook_mode = "torch"'
            )
        return vramctl.library_path()


@contextlib.contextmanager
def configure_subprocess() -> Iterator[None]:
    """Preloads the library into processes started inside. A no-op under `vramctl run`, which does that already. Sets the
    process's environment, so processes that other threads start meanwhile get the library, too.
    """
    present = [path for path in re.split("[ :]", os.environ.get("LD_PRELOAD", "")) if path]
    if any(map(is_library, present)):
        yield
        return
    library = str(get_binary_path_from_package(PRELOAD))
    if re.search("[ :]", library):
        raise vramctl.errors.Invalid(
            f"LD_PRELOAD cannot hold paths with spaces or colons, and the library is at {library}: set VRAMCTL_LIB to a "
            "symbolic link to it"
        )
    with change_env("LD_PRELOAD", ":".join([library, *present])):
        yield
