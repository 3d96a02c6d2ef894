"""vLLM: runs sleep mode on this library, and tags memory when sleep mode is off."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from typing import Any

import vramctl
from vramctl import engines
from vramctl._imports import when_imported
from vramctl.engines import Hook, Place, prefix_cache

BACKENDS = "vllm.device_allocator.sleep_mode_backend"
CUMEM = "vllm.device_allocator.cumem"

PLUGIN = Hook(
    what="installs the hooks below",
    through="entry point `vllm.general_plugins`, or vLLM's import under `vramctl run`",
    places=(Place("vllm.plugins:load_general_plugins", "0.24"),),
    without="works only under `vramctl run`",
)
BACKEND = Hook(
    what="registers the sleep-mode backend `vramctl`, for `--sleep-mode-backend` (since 0.33)",
    through="sleep-mode backend registry",
    places=(Place(f"{BACKENDS}:SleepModeBackendFactory.register_backend", "0.26"),),
    without="sleep mode works only through the default backend",
)
ALLOCATOR = Hook(
    what="replaces sleep mode's allocator, whichever backend is chosen",
    through=engines.BY_NAME,
    places=(Place(f"{CUMEM}:CuMemAllocator", "0.24"),),
    without="vLLM keeps its own allocator, as it does if that has methods we do not know",
)
WEIGHTS = Hook(
    what="tags weights when sleep mode is off",
    through=engines.BY_NAME,
    # Around the model alone: what `load_model` makes besides, such as a transfer engine's buffers, gets registered.
    places=(Place("vllm.v1.worker.gpu_worker:Worker._maybe_get_memory_pool_context", "0.24"),),
    without="all memory keeps the process's tag and can be paused by it",
)
#: The functions that allocate only the cache: the block tables must survive when it is discarded.
KV_CACHE = Hook(
    what="tags the KV cache when sleep mode is off",
    through=engines.BY_NAME,
    places=(
        Place("vllm.v1.worker.utils:allocate_kv_cache", "0.29"),
        Place("vllm.v1.worker.gpu.attn_utils:_allocate_kv_cache", "0.24", "0.28"),  # the second model runner
        Place("vllm.v1.worker.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors", "0.24", "0.28"),  # the first
    ),
    without="the KV cache keeps the process's tag",
)
_CORE = "vllm.v1.engine.core"
INPUT = Hook(
    what="resets the prefix cache of an idle engine that gives way or is saved (`vramctl run --share`, `--image`), on the engine's loop",
    through=engines.BY_NAME,
    places=(Place(f"{_CORE}:EngineCoreProc._handle_client_request", "0.24"),),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
START = Hook(
    what="tells that the engine's loop is in this process (`vramctl run --share`, `--image`)",
    through=engines.BY_NAME,
    places=(Place(f"{_CORE}:EngineCoreProc.__init__", "0.24"),),
    without="the KV cache of an engine that starts is kept when the engine gives way or is saved",
)
LOOP = Hook(
    what="tells whether the engine has requests (`vramctl run --share`, `--image`)",
    through=engines.BY_NAME,
    places=(Place(f"{_CORE}:EngineCoreProc._process_input_queue", "0.24"),),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
RESET = Hook(
    what="is called on the engine's loop (`vramctl run --share`, `--image`)",
    through=engines.READ,
    places=(
        Place(f"{_CORE}:EngineCoreProc.has_work", "0.24"),
        Place(f"{_CORE}:EngineCore.reset_prefix_cache", "0.24"),
        Place("vllm.config.parallel:ParallelConfig.world_size", "0.24"),
    ),
    without="an idle engine's KV cache is kept when the engine gives way or is saved",
)
SETTINGS = Hook(
    what="reads the engine's settings",
    through=engines.READ,
    places=(
        Place("vllm.config.model:ModelConfig.enable_sleep_mode", "0.24"),
        Place("vllm.config.model:ModelConfig.enable_cumem_allocator", "0.24"),
        Place("vllm.config.model:ModelConfig.sleep_mode_backend", "0.26"),
        Place("vllm.config.model:ModelConfig.sleep_mode_offload_cudagraph", "0.32"),
        Place("vllm.config.load:LoadConfig.load_format", "0.24"),
        Place("vllm.config.parallel:ParallelConfig.tensor_parallel_size", "0.24"),
        Place("vllm.config.parallel:ParallelConfig.disable_custom_all_reduce", "0.24"),
        Place("vllm.config.vllm:VllmConfig.use_cumem_cudagraph_pool", "0.32"),
    ),
    without="all memory keeps the process's tag",
)
HOOKS = (PLUGIN, BACKEND, ALLOCATOR, WEIGHTS, KV_CACHE, START, INPUT, LOOP, RESET, SETTINGS)

#: A child of vLLM's logger, so that vLLM's handlers and level apply.
logger = logging.getLogger("vllm.vramctl")


def install() -> None:
    """Installs the hooks in this process. Idempotent; a no-op unless the library is preloaded.

    Called by vLLM as a plugin, and under `vramctl run` when vLLM is imported.
    """
    if not vramctl.is_preloaded():
        return
    engines.leave_graph_buffers_unregistered()
    when_imported(BACKENDS, _register_backend)
    when_imported(CUMEM, _replace_allocator)
    resets = prefix_cache.is_wanted()
    hooks = tuple(hook for hook in HOOKS if resets or hook not in (START, INPUT, LOOP))
    engines.wrap_when_imported(engines.present(importlib.import_module("vllm"), hooks))
    engines.tag_expert_buffers()


# ---- tags when sleep mode is off ----

#: Whether vLLM's sleep mode is on and therefore does the tagging. Set when the weights are loaded.
_own_mode = False
#: Whether a worker has loaded its weights in this process.
_has_worker = False


@engines.around(WEIGHTS)
def _pool_context(original: engines.Function, worker: Any, tag: str) -> Any:
    """vLLM enters this around what its sleep mode manages; first around the model."""
    if tag == "weights":
        _prepare(worker)
        if not _own_mode:
            return engines.if_possible(engines.tagged_in_place(tag))
    return original(worker, tag)


def _prepare(worker: Any) -> None:
    global _own_mode, _has_worker
    _has_worker = True
    engines.announce("vllm", tags_cache=engines.hooks_all(importlib.import_module("vllm"), KV_CACHE))
    config = worker.vllm_config
    model = config.model_config
    sleeps = bool(getattr(model, "enable_sleep_mode", False))
    _own_mode = sleeps or bool(getattr(model, "enable_cumem_allocator", False))
    if _own_mode and not sleeps:
        # For NVLink between nodes, whose handles our memory does not have.
        _give_allocator_back()
    if not _own_mode:
        engines.tag_graphs("cuda_graph")
    elif getattr(model, "sleep_mode_backend", None) == _OURS:
        _add_graphs(config)
    if prefix_cache.is_wanted() and _workers_of(config) > 1:
        # The loop's, if vLLM has started the worker itself, and not Ray.
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            prefix_cache.ask_loop_of(parent.pid)
    if not _own_mode and getattr(getattr(config, "load_config", None), "load_format", None) == "ipc_cache":
        engines.say_once(
            "the weights are in a process of their own (load format ipc_cache), so the tag `weights` has next to nothing of this engine"
        )


def _add_graphs(config: Any) -> None:
    """Has CUDA graphs sleep with our backend."""
    shared = _shares_graphs(config)
    if getattr(config.model_config, "sleep_mode_offload_cudagraph", False):
        what = "stay awake, because workers share their memory (custom all-reduce)" if shared else "sleep in any case"
        engines.say_once(f"--sleep-mode-offload-cudagraph has no effect with --sleep-mode-backend {_OURS}: CUDA graphs {what}")
    if not shared:
        engines.tag_graphs("cuda_graph")
        Allocator.get_instance().add_graphs()


def _shares_graphs(config: Any) -> bool:
    """Whether workers have each other's CUDA graph memory open (custom all-reduce). In sleep mode each worker pauses alone, which is
    refused for such memory; from outside, all are paused together."""
    parallel = config.parallel_config
    return (
        getattr(parallel, "tensor_parallel_size", 1) > 1
        and not getattr(parallel, "disable_custom_all_reduce", False)
        and not getattr(config, "use_cumem_cudagraph_pool", False)
    )


@engines.around(KV_CACHE)
def _allocate_kv_cache(original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
    if _own_mode:
        return original(*arguments, **keywords)
    # Where a connector's pool is, ours would take its place inside; and what is handed over to other machines stays with CUDA.
    region = engines.thread_region(None) if _connector_has_pool() else engines.tagged("kv_cache")
    # What a connector does with it before the first request is not known.
    unused = prefix_cache.unused() if _connector() is None else contextlib.nullcontext()
    with engines.if_possible(region), unused:
        return original(*arguments, **keywords)


def _connector() -> Any:
    """What moves the KV cache to other engines; None if nothing does."""
    transfer = sys.modules.get("vllm.distributed.kv_transfer")
    there = getattr(transfer, "has_kv_transfer_group", None)
    return transfer.get_kv_transfer_group() if transfer is not None and there is not None and there() else None


def _connector_has_pool() -> bool:
    pool = getattr(_connector(), "get_mem_pool_context", None)
    return pool is not None and pool() is not None


# ---- programs that share a GPU, or are to be saved ----


def _workers_of(config: Any) -> int:
    return getattr(config.parallel_config, "world_size", 1)


@engines.around(START)
def _start(original: engines.Function, *arguments: Any, **keywords: Any) -> Any:
    """Loads the weights and allocates the KV cache, unless workers in other processes do."""
    prefix_cache.note_loop()
    return original(*arguments, **keywords)


@engines.around(LOOP)
def _process_input_queue(original: engines.Function, engine: Any) -> Any:
    """vLLM calls this before each step. It returns when there is something to do."""
    set_idle = _served(engine)
    if set_idle is None:
        prefix_cache.end_unused()
        return original(engine)
    set_idle(not engine.has_work())
    try:
        return original(engine)
    finally:
        set_idle(False)
        if engine.has_work():
            prefix_cache.end_unused()


def _served(engine: Any) -> Callable[[bool], None] | None:
    """Has requests to reset the prefix cache passed on to the loop. Returns what tells whether it is idle; None if the KV cache is out of reach."""

    def pass_on(request: Any) -> None:
        engine.input_queue.put_nowait((request, None))

    several = _workers_of(engine.vllm_config) > 1
    if several and not _has_worker:
        workers = prefix_cache.workers(pass_on)
        return workers.set_idle if workers is not None else None
    if _has_worker and not several:
        prefix_cache.serve(pass_on)
        return prefix_cache.set_idle
    return None


@engines.around(INPUT)
def _handle_client_request(original: engines.Function, engine: Any, kind: Any, request: Any) -> Any:
    if isinstance(kind, (prefix_cache.Request, prefix_cache.Workers)):
        return kind.answer(lambda: not engine.has_work(), engine.reset_prefix_cache)
    return original(engine, kind, request)


# ---- sleep mode ----

#: The name of our backend.
_OURS = "vramctl"


def _register_backend(module: Any) -> None:
    """Registers `--sleep-mode-backend vramctl`, which fails without this library. The default backend, `cumem`, which
    frameworks use when they start vLLM, gets our allocator, too.
    """

    class Backend(module.SleepModeBackend):  # type: ignore[misc]
        """Sleeps and wakes by tag. CUDA graphs sleep, too, and keep their contents, unless workers share them."""

        def suspend(self, level: int = 1) -> None:
            kept = ("runtime", "cudagraph")
            Allocator.get_instance().sleep(("weights", *kept) if level == 1 else kept)
            self._state = "SUSPENDED"

        def resume(self, tags: list[str] | None = None) -> None:
            Allocator.get_instance().wake_up(tags)
            self._state = "RUNNING"

        def discard(self, tags: tuple[str, ...]) -> None:
            Allocator.get_instance().discard(tags)
            self._state = "SUSPENDED"

        @classmethod
        def is_supported(cls) -> bool:
            return importlib.import_module(CUMEM).CuMemAllocator is Allocator

        @classmethod
        def preserves_communicators(cls) -> bool:
            return True

        @classmethod
        def preserves_compiled_artifacts(cls) -> bool:
            return True

    # The registry takes a class name and imports it on demand.
    globals()["Backend"] = Backend
    module.SleepModeBackendFactory.register_backend(_OURS, __name__, "Backend")


def _replace_allocator(module: Any) -> None:
    """Replaces vLLM's allocator, unless it is already in use; vLLM creates it when it enters its first pool."""
    theirs = getattr(module, "CuMemAllocator", None)
    if theirs is None or issubclass(theirs, Allocator) or theirs.instance is not None:
        return
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(Allocator, name)]
    if missing:
        version = getattr(importlib.import_module("vllm"), "__version__", "(version unknown)")
        engines.say_once(
            f"vLLM {version} keeps its own allocator, which has methods that vramctl does not know: {', '.join(missing)}"
        )
        return
    global _theirs
    _theirs = (module, theirs, getattr(module, "cumem_available", True))
    module.CuMemAllocator = Allocator
    # Ours does not need vLLM's C extension, which may be missing.
    module.cumem_available = True


#: The module, and what was in it before: vLLM's allocator, and whether it is available.
_theirs: tuple[Any, Any, bool] | None = None


def _give_allocator_back() -> None:
    """Restores vLLM's allocator, unless ours is in use."""
    if _theirs is not None and Allocator.instance is None:
        module, allocator, available = _theirs
        module.CuMemAllocator, module.cumem_available = allocator, available


#: vLLM's tags that we rename. `default` is the process's own tag, and much in it is not vLLM's to discard; graphs have the
#: same name whoever tags them.
_OUR_NAMES = {"default": "vllm", "cudagraph": "cuda_graph"}


class Allocator:
    """Implements the interface of vLLM's `CuMemAllocator` on this library.

    Memory allocated inside `use_memory_pool(tag)` sleeps and wakes by that tag; both are idempotent. A sleep keeps the
    contents of the given tags, where `VRAMCTL_BACKUP` says (host memory by default), and drops all others, which then read
    as zero.
    """

    instance: Allocator | None = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> Allocator:
        """The process's singleton."""
        if Allocator.instance is None:
            Allocator.instance = Allocator()
        return Allocator.instance

    def __init__(self) -> None:
        self.current_tag = self.default_tag
        #: The tags used so far: vLLM's name to ours.
        self._names: dict[str, str] = {}
        self._graph_pool: Any = None

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """Tags what torch allocates inside (None: `default`), whatever its allocator settings."""
        with self._tagged(self.default_tag if tag is None else tag) as name, engines.tagged(name):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """Yields the id of a pool for CUDA graphs. Memory of graphs captured into it inside gets the tag `cudagraph`."""
        with self._tagged("cudagraph") as name, engines.thread_region(name):
            if self._graph_pool is None:
                self._graph_pool = vramctl._torch.required().cuda.MemPool()
            yield self._graph_pool.id

    def add_graphs(self) -> None:
        """Includes CUDA graphs captured outside our pools, under vLLM's tag `cudagraph`."""
        self._names["cudagraph"] = _OUR_NAMES["cudagraph"]

    @contextlib.contextmanager
    def _tagged(self, tag: str) -> Iterator[str]:
        assert isinstance(tag, str), f"a tag must be a str, not {tag!r}"
        name = self._names.setdefault(tag, _OUR_NAMES.get(tag, tag))
        before, self.current_tag = self.current_tag, tag
        try:
            yield name
        finally:
            self.current_tag = before

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Releases the memory of all tags. Keeps the contents of `offload_tags` (None: `default`) and drops the others.

        All or nothing: if host memory is too small for what is kept, nothing is dropped either. vLLM has taken the KV cache from its
        connector by then, and gives it back when it wakes up from a sleep, which it takes a failed one not for: so it is given back here.
        """
        if offload_tags is None:
            offload_tags = (self.default_tag,)
        elif isinstance(offload_tags, str):
            offload_tags = (offload_tags,)
        assert isinstance(offload_tags, tuple), f"tags must be a tuple or a str, not {offload_tags!r}"
        try:
            report = self._pause({name: "default" if tag in offload_tags else "discard" for tag, name in self._names.items()})
        except BaseException:
            restore = getattr(_connector(), "restore_kv_caches", None)
            if restore is not None:
                restore()
            raise
        logger.info(
            "Sleep released %.2f GiB in %.0f ms: %.2f GiB kept (%.2f GiB of it unchanged and not copied), %.2f GiB dropped.",
            *(
                report.bytes / 2**30,
                report.ms,
                report.kept_bytes / 2**30,
                report.unchanged_bytes / 2**30,
                report.discarded_bytes / 2**30,
            ),
        )
        self._tidy()

    def discard(self, tags: tuple[str, ...] | str) -> None:
        """Releases the memory of these tags and drops its contents."""
        tags = (tags,) if isinstance(tags, str) else tags
        report = self._pause({name: "discard" for tag, name in self._names.items() if tag in tags})
        logger.info("Released %.2f GiB of %s; contents dropped.", report.bytes / 2**30, ", ".join(tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Restores the memory of these tags (None: all) and the contents that were kept.

        Since vLLM 0.33, always includes tags that vLLM does not let sleep longer than the others. If there is too little
        memory, raises `vramctl.errors.DeviceMemory` with the numbers and the holders, and everything stays asleep.
        """
        deferrable = getattr(importlib.import_module("vllm.device_allocator"), "DEFERRABLE_TAGS", None)
        wanted = [
            tag for tag in self._names if tags is None or tag in tags or (deferrable is not None and tag not in deferrable)
        ]
        names = [there.tag for there in self._there(wanted)]
        if not names:
            return
        try:
            vramctl.resume(names)
        except vramctl.errors.DeviceMemory:
            # Torch's cache may hold some of the missing memory.
            self._tidy()
            vramctl.resume(names)

    def get_current_usage(self) -> int:
        """Bytes allocated in the pools, asleep or awake."""
        return sum(there.bytes for there in self._there(list(self._names)))

    def release_pools(self) -> None:
        """Releases what torch holds as free in the pools. Memory in use stays."""
        self._graph_pool = None
        self._tidy()

    def close(self) -> None:
        """Same as `release_pools`."""
        self.release_pools()

    def _there(self, tags: list[str]) -> list[Any]:
        """The status of these tags, given by vLLM's names."""
        names = {self._names[tag] for tag in tags}
        return [there for there in vramctl.status().tags if there.tag in names] if names else []

    def _pause(self, policies: dict[str, str]) -> Any:
        """Pauses the existing ones of these tags, given by our names, each by its policy."""
        there = [tag for tag in vramctl.status().tags if tag.tag in policies]
        for tag in there:
            kept = tag.host_bytes + tag.disk_bytes > 0
            if tag.state == "paused" and kept == (policies[tag.tag] == "discard"):
                logger.warning(
                    "%s is already asleep with its contents %s; leaving it so.", tag.tag, "kept" if kept else "dropped"
                )
        return vramctl.pause({tag.tag: policies[tag.tag] for tag in there}) if there else vramctl.types.Report()

    def _tidy(self) -> None:
        gc.collect()
        torch = vramctl._torch.loaded()
        if torch is not None:
            torch.cuda.empty_cache()
