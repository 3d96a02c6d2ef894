"""SGLang: tags its memory when its memory saver is off.

With `--enable-memory-saver`, the saver is in charge, through this package's `torch_memory_saver`. Without it, SGLang's
regions are no-ops; we make them tag memory. Their contents are kept by default, because a pause from outside does not tell
SGLang to flush its cache.
"""

from __future__ import annotations

import collections
import contextlib
import importlib
import os
from typing import Any

import vramctl
from vramctl import engines
from vramctl._imports import when_imported
from vramctl.engines import Hook, Place, prefix_cache

#: SGLang's plugin hooks.
REGISTRY = "sglang.srt.plugins.hook_registry"

_HOOK = "around-hook of `sglang.srt.plugins`"

PLUGIN = Hook(
    what="registers the hooks below",
    through="entry point `sglang.srt.plugins`, or SGLang's import under `vramctl run`",
    places=(Place(f"{REGISTRY}:HookRegistry.register", "0.5.12"),),
    without="the functions below are wrapped by name",
)
REGIONS = Hook(
    what="tags weights and KV cache when SGLang's memory saver is off",
    through=_HOOK,
    places=(Place("sglang.srt.utils.torch_memory_saver_adapter:TorchMemorySaverAdapter.create", "0.5.12"),),
    without="all memory keeps the process's tag and can be paused by it",
)
SETTINGS = Hook(
    what="reads the engine's settings",
    through=engines.READ,
    places=(
        Place("sglang.srt.runtime_context:get_server_args", "0.5.16"),
        Place("sglang.srt.server_args:get_global_server_args", "0.5.12"),  # since 0.5.20 it only raises
        Place("sglang.srt.arg_groups.fields.exec_:ExecFeatures.enable_memory_saver", "0.5.20"),
        Place("sglang.srt.server_args:ServerArgs.enable_memory_saver", "0.5.12", "0.5.19"),
    ),
    without="all memory keeps the process's tag",
)
#: A KV cache that grows after the capture of graphs: physical memory of SGLang's own, outside its regions.
ARENA = Hook(
    what="tags the KV cache that SGLang sizes after it has captured its graphs",
    through=engines.BY_NAME,
    places=(Place("sglang.srt.mem_cache.kv_vmm_backing:KvVmmArena.commit_range", "0.5.16"),),
    without="such a cache keeps the process's tag",
)
IDLE = Hook(
    what="resets the prefix cache of an idle engine that gives way or is saved (`vramctl run --share`, `--image`), on its scheduler's loop",
    through=_HOOK,
    places=(
        Place("sglang.srt.managers.scheduler:Scheduler.on_idle", "0.5.16"),
        Place("sglang.srt.managers.scheduler_runtime_checker_mixin:SchedulerRuntimeCheckerMixin.on_idle", "0.5.12", "0.5.12"),
    ),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
BATCH = Hook(
    what="tells that the engine has requests (`vramctl run --share`, `--image`)",
    through=_HOOK,
    places=(Place("sglang.srt.managers.scheduler:Scheduler.run_batch", "0.5.12"),),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
FLUSH = Hook(
    what="is called on the engine's loop (`vramctl run --share`, `--image`)",
    through=engines.READ,
    places=(Place("sglang.srt.managers.scheduler:Scheduler.flush_cache", "0.5.12"),),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
HOOKS = (PLUGIN, REGIONS, ARENA, IDLE, BATCH, FLUSH, SETTINGS)


def install() -> None:
    """Installs the hooks in this process. Idempotent; a no-op unless the library is preloaded.

    Called by SGLang as a plugin, and under `vramctl run` when SGLang is imported.
    """
    if not vramctl.is_preloaded():
        return
    engines.leave_graph_buffers_unregistered()
    package = importlib.import_module("sglang")
    registers = engines.defines(package, PLUGIN.places[0])
    if registers:
        when_imported(REGISTRY, _register)
    found = engines.present(package, _hooks())
    engines.wrap_when_imported([(hook, place) for hook, place in found if not registers or hook.through != _HOOK])
    engines.tag_expert_buffers()


def _hooks() -> tuple[Hook, ...]:
    resets = prefix_cache.is_wanted()
    return tuple(hook for hook in HOOKS if resets or hook not in (IDLE, BATCH))


def _register(registry: Any) -> None:
    """Registers the hooks with SGLang, which applies them in each process after loading its plugins."""
    through = tuple(hook for hook in _hooks() if hook.through == _HOOK)
    for hook, place in engines.present(importlib.import_module("sglang"), through):
        registry.HookRegistry.register(
            f"{place.module}.{place.path}",
            engines.guarded(hook.around),
            registry.HookType.AROUND,
            source=registry.HookSource("vramctl", "vramctl"),
        )


@engines.around(REGIONS)
def _create(original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
    """SGLang calls this for all memory that its saver manages, whether the saver is on or off."""
    saver = original(*arguments, **keywords)
    settings = _settings()
    if settings is None:
        return saver
    # Some models' caches are outside of SGLang's regions (`tests/contract_engines.py` lists them), so `default` may be cache.
    engines.announce("sglang", tags_cache=False)
    # With the saver on, memory outside it keeps the process's tag: graphs, unless SGLANG_MEMORY_SAVER_CUDA_GRAPH is set.
    if not settings.enable_memory_saver:
        engines.tag_graphs("cuda_graph")
        saver.region = _region
    return saver


def _region(tag: str, *_: Any, **__: Any) -> contextlib.AbstractContextManager[None]:
    if tag == "kv_cache" and _hands_over_cache():
        # No pool either: torch would use ours instead of SGLang's inside it.
        return engines.if_possible(engines.thread_region(None))
    return engines.if_possible(engines.tagged(tag) if tag == "kv_cache" else engines.tagged_in_place(tag))


@engines.around(ARENA)
def _commit_range(original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
    # SGLang's saver never has this memory, so it is tagged whether the saver is on or off.
    with engines.if_possible(engines.thread_region(None if _hands_over_cache() else "kv_cache")):
        return original(*arguments, **keywords)


#: The last request to reset the prefix cache.
_asked: collections.deque[prefix_cache.Request] = collections.deque(maxlen=1)


@engines.around(IDLE)
def _on_idle(original: engines.Function, scheduler: Any) -> Any:
    """SGLang's loop calls this over and over while it has nothing to do."""
    done = original(scheduler)
    # Several ranks must flush in the same round.
    if vramctl._torch.required().distributed.get_world_size() == 1:
        prefix_cache.serve(_asked.append)
        prefix_cache.set_idle(True)
        while _asked:
            # It is idle here, or the flush says that it is not.
            _asked.popleft().answer(lambda: True, lambda: scheduler.flush_cache(empty_cache=False))
    return done


@engines.around(BATCH)
def _run_batch(original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
    prefix_cache.set_idle(False)
    return original(*arguments, **keywords)


def _settings() -> Any | None:
    """The engine's settings. None in a process that only starts others."""
    try:
        get = importlib.import_module("sglang.srt.runtime_context").get_server_args
    except (ImportError, AttributeError):
        get = importlib.import_module("sglang.srt.server_args").get_global_server_args
    try:
        return get()
    except ValueError:
        return None


def _hands_over_cache() -> bool:
    """Whether Mooncake moves the KV cache over NVLink, from its own pool or by CUDA IPC. Parsed as SGLang does."""
    return os.environ.get("SGLANG_MOONCAKE_CUSTOM_MEM_POOL", "").upper() in ("TRUE", "NVLINK", "BAREX", "INTRA_NODE_NVLINK")
