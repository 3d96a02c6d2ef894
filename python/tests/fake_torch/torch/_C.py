from __future__ import annotations


def _accelerator_setAllocatorSettings(settings: str) -> None:
    from .cuda import memory

    memory.apply_settings(settings)
