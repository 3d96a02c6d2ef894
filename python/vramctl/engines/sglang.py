"""SGLang: tags for its memory where its own memory saver is off.

Known version: 0.5.16. Where the memory saver is on (`enable_memory_saver`), it rules, through the `torch_memory_saver` of
this package. Where it is off, SGLang is started as if it were on, with regions that keep their contents, because nobody
tells SGLang to forget its cache when its memory is paused from outside.
"""

from __future__ import annotations

import contextlib
import enum
import functools
import importlib
import os
from typing import Any, Callable, ContextManager, Iterator, Optional

import vramctl
from vramctl import engines
from vramctl._imports import when_imported


class _Saver(enum.IntFlag):
    """The setting `enable_memory_saver` where it is on, with whose regions it means. So that reaches the processes that
    SGLang starts for this engine, and no others. An enum, because msgspec, by which SGLang tells its settings, encodes
    numbers of no other class; it shows up there as a number in place of `true`.
    """

    #: Equal to True: frameworks compare what an engine says of its settings with what they asked for.
    ON = 1
    #: Regions of ours: it was off.
    OURS = 2


_SETTINGS = "sglang.srt.server_args"
_ADAPTER = "sglang.srt.utils.torch_memory_saver_adapter"
#: Where a tokenizer makes the buffer in which it hands images over (--mm-feature-transport=cuda_ipc).
_IMAGES = "sglang.srt.utils.cuda_ipc_transport_utils"


def install() -> None:
    """Has SGLang use this library in this process. Does nothing where the library is not preloaded."""
    if not vramctl.is_preloaded():
        return
    when_imported(_SETTINGS, _wrap_settings)
    when_imported(_ADAPTER, _wrap_adapter)
    when_imported(_IMAGES, _wrap_images)
    engines.share_expert_buffers()
    folders = getattr(importlib.import_module("sglang"), "__path__", ())
    for name in (_SETTINGS, _ADAPTER):
        file = os.path.join(*name.split(".")[1:]) + ".py"
        if not any(os.path.exists(os.path.join(folder, file)) for folder in folders):
            _unknown(name)


def _unknown(what: str) -> None:
    engines.say_once(
        "SGLang %s has no %s as the version that is known (0.5.16); what it allocates stays under the process's own tag, and can "
        "be paused with that",
        engines.version_of("sglang"),
        what,
    )


def _wrap_settings(module: Any) -> None:
    settings = getattr(module, "ServerArgs", None)
    known = getattr(settings, "__dataclass_fields__", {})
    if "enable_memory_saver" not in known or not engines.wrap(settings, "__post_init__", _decide):
        _unknown("ServerArgs.enable_memory_saver")
    elif not hasattr(module, "get_global_server_args"):
        _unknown("get_global_server_args")


def _decide(original: Callable[..., Any], settings: Any, *arguments: Any, **keywords: Any) -> Any:
    asked, saver = settings.enable_memory_saver, _Saver.ON
    # Settings are copied, and in a copy of those that were decided on the saver is on already.
    if not asked or (isinstance(asked, _Saver) and _Saver.OURS in asked):
        saver |= _Saver.OURS
        # Should the regions turn out not to be ours, contents are kept all the same.
        settings.enable_weights_cpu_backup = True
    settings.enable_memory_saver = saver
    return original(settings, *arguments, **keywords)


def _wrap_adapter(module: Any) -> None:
    adapter = getattr(module, "TorchMemorySaverAdapter", None)
    if adapter is None or not engines.wrap(adapter, "create", functools.partial(_create, adapter)):
        _unknown("TorchMemorySaverAdapter.create")


def _wrap_images(module: Any) -> None:
    pool = getattr(module, "MmItemMemoryPool", None)
    if pool is None or not engines.wrap(pool, "__init__", engines.leave_to_cuda):
        _unknown("MmItemMemoryPool")


#: The last setting that a memory saver was asked for with in this process.
_last: Optional[_Saver] = None


def _create(base: type, original: Callable[..., Any], enable: Any) -> Any:
    """What SGLang calls, in each of its processes, to get the memory saver that its settings ask for."""
    global _last
    if not enable:
        return original(enable)
    if isinstance(enable, _Saver):
        _last = enable
    # Those who capture graphs ask last, with `setting and …`, of which no more is left than that it is on.
    saver = _last or _Saver.ON
    engines.announce("sglang")
    handed_over = _hands_over_graphs()
    if handed_over:
        engines.tag_graphs(None)
    elif handed_over is not None and _Saver.OURS in saver:
        engines.tag_graphs("cuda_graph")
    return _regions(base)() if _Saver.OURS in saver else original(enable)


def _hands_over_graphs() -> Optional[bool]:
    """Whether workers hand each other memory of their CUDA graphs (custom all-reduce), which works with CUDA's own only. None:
    this process has no engine yet. The one that captures graphs has, before it asks for a memory saver.
    """
    try:
        settings = importlib.import_module(_SETTINGS).get_global_server_args()
    except (AttributeError, ValueError):
        return None
    return (
        getattr(settings, "tp_size", 1) > 1
        and not getattr(settings, "disable_custom_all_reduce", False)
        # Told that graphs are pausable, SGLang itself keeps them to each worker.
        and os.environ.get("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "").lower() not in ("1", "true")
    )


def _hands_over_cache() -> bool:
    """Whether Mooncake moves the KV cache by NVLink: from a pool of its own, or by CUDA IPC. SGLang reads it so, too."""
    return os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "").upper() in ("TRUE", "NVLINK", "BAREX", "INTRA_NODE_NVLINK")


@functools.lru_cache(maxsize=None)
def _regions(base: type) -> type:
    """SGLang's interface to a memory saver, with regions of ours."""

    class Regions(base):  # type: ignore[valid-type, misc]
        enabled = True

        def region(self, tag: str, enable_cpu_backup: bool = False) -> ContextManager[None]:
            if tag == "kv_cache" and _hands_over_cache():
                # No pool of ours, either: torch would take it, and not SGLang's inside.
                return engines.thread_region(None)
            return engines.tagged_if_possible(tag)

        @contextlib.contextmanager
        def cuda_graph(self, **settings: Any) -> Iterator[None]:
            # Every capture is tagged, this one among them.
            import torch

            settings.pop("tag", None)
            with torch.cuda.graph(**settings):
                yield

        def disable(self) -> ContextManager[None]:
            return vramctl.unmanaged()

        def configure_subprocess(self) -> ContextManager[None]:
            return contextlib.nullcontext()

        def pause(self, tag: str) -> None:
            _known(vramctl.pause, tag)

        def resume(self, tag: str) -> None:
            _known(vramctl.resume, tag)

    return Regions


def _known(work: Callable[[str], Any], tag: str) -> None:
    """SGLang pauses all three tags, whether there is something under each or not."""
    if vramctl.status().tag(tag) is not None:
        work(tag)
