"""What the hook modes have in common."""

from __future__ import annotations

from typing import Any, Literal

HookMode = Literal["preload", "torch"]


class HookUtilBase:
    """How a process reaches the library, and how torch gets its memory from it."""

    @staticmethod
    def create(hook_mode: HookMode) -> HookUtilBase:
        """That of a mode."""
        from .mode_preload import HookUtilModePreload
        from .mode_torch import HookUtilModeTorch

        modes: dict[str, type[HookUtilBase]] = {"preload": HookUtilModePreload, "torch": HookUtilModeTorch}
        return modes[hook_mode]()

    def get_path_binary(self) -> str:
        """The library's file."""
        raise NotImplementedError

    def get_allocator(self) -> Any:
        """Torch's allocator for regions; None: torch's calls of the CUDA runtime are intercepted."""
        return None
