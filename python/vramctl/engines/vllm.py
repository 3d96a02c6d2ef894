"""vLLM: its sleep mode on this library, and tags for its memory where that mode is off."""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
from collections.abc import Iterator
from typing import Any

import vramctl
from vramctl import engines
from vramctl._imports import when_imported
from vramctl.engines import Hook, Place

BACKENDS = "vllm.device_allocator.sleep_mode_backend"
CUMEM = "vllm.device_allocator.cumem"

PLUGIN = Hook(
    what="installs what is below",
    through="entry point `vllm.general_plugins`, or vLLM's import under `vramctl run`",
    places=(Place("vllm.plugins:load_general_plugins", "0.26"),),
    without="works under `vramctl run` only",
)
BACKEND = Hook(
    what="offers the sleep-mode backend `vramctl`, for `--sleep-mode-backend` (an option from 0.33 on)",
    through="sleep-mode backend registry",
    places=(Place(f"{BACKENDS}:SleepModeBackendFactory.register_backend", "0.26"),),
    without="sleep mode works through the default backend alone",
)
ALLOCATOR = Hook(
    what="replaces sleep mode's allocator, whichever backend is chosen",
    through=engines.BY_NAME,
    places=(Place(f"{CUMEM}:CuMemAllocator", "0.26"),),
    without="vLLM's own allocator stays, as it does if it has methods not known here",
)
WEIGHTS = Hook(
    what="tags weights where sleep mode is off",
    through=engines.BY_NAME,
    places=(Place("vllm.v1.worker.gpu_worker:Worker.load_model", "0.26"),),
    without="all memory keeps the process's own tag, and can be paused by that",
)
#: Where the cache is allocated, and nothing else with it: the block tables must stay when it is discarded.
KV_CACHE = Hook(
    what="tags the KV cache where sleep mode is off",
    through=engines.BY_NAME,
    places=(
        Place("vllm.v1.worker.utils:allocate_kv_cache", "0.29"),
        Place("vllm.v1.worker.gpu.attn_utils:_allocate_kv_cache", "0.26", "0.28"),  # the second model runner
        Place("vllm.v1.worker.gpu_model_runner:GPUModelRunner._allocate_kv_cache_tensors", "0.26", "0.28"),  # the first
    ),
    without="it keeps the process's own tag",
)
SHARED_BUFFERS = Hook(
    what="leaves the buffers of custom all-reduce to CUDA, which shares them by CUDA IPC",
    through=engines.BY_NAME,
    places=(Place("vllm.distributed.device_communicators.custom_all_reduce:CustomAllreduce.create_shared_buffer", "0.26"),),
    without="with tensor parallelism, start with `vramctl run --no-tag` or `--disable-custom-all-reduce`",
    around=engines.leave_to_cuda,
)
SETTINGS = Hook(
    what="reads the engine's settings",
    through=engines.READ,
    places=(
        Place("vllm.config.model:ModelConfig.enable_sleep_mode", "0.26"),
        Place("vllm.config.model:ModelConfig.enable_cumem_allocator", "0.26"),
        Place("vllm.config.model:ModelConfig.sleep_mode_backend", "0.26"),
        Place("vllm.config.parallel:ParallelConfig.tensor_parallel_size", "0.26"),
        Place("vllm.config.parallel:ParallelConfig.disable_custom_all_reduce", "0.26"),
        Place("vllm.config.vllm:VllmConfig.use_cumem_cudagraph_pool", "0.32"),
    ),
    without="all memory keeps the process's own tag",
)
HOOKS = (PLUGIN, BACKEND, ALLOCATOR, WEIGHTS, KV_CACHE, SHARED_BUFFERS, SETTINGS)

#: Below vLLM's own logger, so that its handlers and level apply.
logger = logging.getLogger("vllm.vramctl")


def install() -> None:
    """Has vLLM use this library in this process. Does nothing where the library is not preloaded, or when called again.

    vLLM calls this as its plugin, and `vramctl run` when vLLM is imported.
    """
    if not vramctl.is_preloaded():
        return
    when_imported(BACKENDS, _register_backend)
    when_imported(CUMEM, _replace_allocator)
    for hook, place in engines.present(importlib.import_module("vllm"), HOOKS):
        engines.wrap_when_imported(hook, place)
    engines.share_expert_buffers()


# ---- tags where sleep mode is off ----

#: Whether this process's engine has its own sleep mode, which then decides on tags. Known when its weights are loaded.
_own_mode = False


@engines.around(WEIGHTS)
def _load_model(original: engines.Function, worker: Any, *arguments: Any, **keywords: Any) -> Any:
    global _own_mode
    engines.announce("vllm")
    config = worker.vllm_config
    model = config.model_config
    _own_mode = bool(getattr(model, "enable_sleep_mode", False) or getattr(model, "enable_cumem_allocator", False))
    if _shares_graphs(config):
        engines.tag_graphs(None)
    elif not _own_mode:
        engines.tag_graphs("cuda_graph")
    elif getattr(model, "sleep_mode_backend", None) == _OURS:
        engines.tag_graphs("cuda_graph")
        Allocator.get_instance().add_graphs()
    if _own_mode:
        return original(worker, *arguments, **keywords)
    with engines.if_possible(engines.tagged("weights")):
        return original(worker, *arguments, **keywords)


def _shares_graphs(config: Any) -> bool:
    """Whether workers hand each other memory of their CUDA graphs (custom all-reduce), which works with CUDA's own only."""
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
    with engines.if_possible(engines.tagged("kv_cache")):
        return original(*arguments, **keywords)


# ---- sleep mode ----

#: The name of our backend.
_OURS = "vramctl"


def _register_backend(module: Any) -> None:
    """For `--sleep-mode-backend vramctl`, which fails where this library is not there. The default backend, `cumem`, finds our
    allocator as well, and is what frameworks use that start vLLM themselves.
    """

    class Backend(module.SleepModeBackend):  # type: ignore[misc]
        """Sleeps and wakes by tag. CUDA graphs sleep too, with their contents, unless workers share them."""

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

    # The registry takes the name of a class, and imports it when it is asked for.
    globals()["Backend"] = Backend
    module.SleepModeBackendFactory.register_backend(_OURS, __name__, "Backend")


def _replace_allocator(module: Any) -> None:
    """Puts our allocator in place of vLLM's, which nobody has used yet: it is asked for when the first pool is entered."""
    theirs = getattr(module, "CuMemAllocator", None)
    if theirs is None or issubclass(theirs, Allocator) or theirs.instance is not None:
        return
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(Allocator, name)]
    if missing:
        version = getattr(importlib.import_module("vllm"), "__version__", "of unknown version")
        engines.say_once(
            f"vLLM {version} asks its sleep mode for {', '.join(missing)}, which is not known here; its own allocator stays in use"
        )
        return
    module.CuMemAllocator = Allocator
    # It needs nothing of vLLM's C extension, which may be missing.
    module.cumem_available = True


#: Tags of vLLM's that have another name here. `default` is the process's own tag, with much in it that is not vLLM's to
#: discard; graphs have one name whoever tags them.
_OUR_NAMES = {"default": "vllm", "cudagraph": "cuda_graph"}


class Allocator:
    """Has the methods of vLLM's `CuMemAllocator` and does what they do, by this library.

    Memory that is allocated inside `use_memory_pool(tag)` sleeps and wakes by that tag, as often as it is asked to. What
    sleeps already stays as it is, and so does what is awake. A sleep keeps the contents of the tags it is given where
    `VRAMCTL_BACKUP` says (host memory, if it says nothing) and drops those of all others: they read as zero afterwards.
    """

    instance: Allocator | None = None
    default_tag: str = "default"

    @staticmethod
    def get_instance() -> Allocator:
        """The only one of the process."""
        if Allocator.instance is None:
            Allocator.instance = Allocator()
        return Allocator.instance

    def __init__(self) -> None:
        self.current_tag = self.default_tag
        #: Our names of the tags that there have been, by vLLM's.
        self._names: dict[str, str] = {}
        self._graph_pool: Any = None

    @contextlib.contextmanager
    def use_memory_pool(self, tag: str | None = None) -> Iterator[None]:
        """What torch allocates inside gets the tag (`default` if None), whatever the settings of its allocator."""
        with self._tagged(self.default_tag if tag is None else tag) as name, engines.tagged(name):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[tuple[int, int]]:
        """The id of a pool for CUDA graphs, whose memory gets the tag `cudagraph` when it is captured into inside."""
        with self._tagged("cudagraph") as name, vramctl.region(name, pool=False):
            if self._graph_pool is None:
                self._graph_pool = vramctl._torch.required().cuda.MemPool()
            yield self._graph_pool.id

    def add_graphs(self) -> None:
        """Has CUDA graphs that are captured outside of our pools sleep and wake, too, by vLLM's tag for them."""
        self._names["cudagraph"] = _OUR_NAMES["cudagraph"]

    @contextlib.contextmanager
    def _tagged(self, tag: str) -> Iterator[str]:
        assert isinstance(tag, str), f"a tag is a str, not {tag!r}"
        name = self._names.setdefault(tag, _OUR_NAMES.get(tag, tag))
        before, self.current_tag = self.current_tag, tag
        try:
            yield name
        finally:
            self.current_tag = before

    def sleep(self, offload_tags: tuple[str, ...] | str | None = None) -> None:
        """Gives back all memory of all tags; keeps the contents of these tags (of `default` if None), drops the others.

        All of it or, after an error, nothing: where host memory is too little for what is kept, nothing is dropped either.
        """
        if offload_tags is None:
            offload_tags = (self.default_tag,)
        elif isinstance(offload_tags, str):
            offload_tags = (offload_tags,)
        assert isinstance(offload_tags, tuple), f"tags are a tuple or a str, not {offload_tags!r}"
        report = self._pause({name: "default" if tag in offload_tags else "discard" for tag, name in self._names.items()})
        logger.info(
            "Sleep gave back %.2f GiB in %.0f ms: %.2f GiB kept, %.2f GiB of them not copied because the backup had them already, "
            "%.2f GiB dropped.",
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
        """Gives back the memory of these tags and drops its contents."""
        tags = (tags,) if isinstance(tags, str) else tags
        report = self._pause({name: "discard" for tag, name in self._names.items() if tag in tags})
        logger.info("Gave back %.2f GiB of %s, contents dropped.", report.bytes / 2**30, ", ".join(tags))

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Brings back the memory of these tags (None: of all) and the contents that were kept.

        vLLM from 0.33 on: tags that it does not let sleep longer than others are brought back in any case. Raises
        `vramctl.errors.DeviceMemory` where there is too little memory, with what is needed and who has it; then all sleeps on.
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
            # Some of what is missing may be torch's own, held as free.
            self._tidy()
            vramctl.resume(names)

    def get_current_usage(self) -> int:
        """Bytes allocated in the pools, asleep or awake."""
        return sum(there.bytes for there in self._there(list(self._names)))

    def release_pools(self) -> None:
        """Gives back what torch holds as free in the pools. What is in use stays."""
        self._graph_pool = None
        self._tidy()

    def close(self) -> None:
        """The same as `release_pools`."""
        self.release_pools()

    def _there(self, tags: list[str]) -> list[Any]:
        """What there is under these tags of vLLM's."""
        names = {self._names[tag] for tag in tags}
        return [there for there in vramctl.status().tags if there.tag in names] if names else []

    def _pause(self, policies: dict[str, str]) -> Any:
        """Pauses what there is of these tags of ours, each by its policy."""
        there = [tag for tag in vramctl.status().tags if tag.tag in policies]
        for tag in there:
            kept = tag.host_bytes + tag.disk_bytes > 0
            if tag.state == "paused" and kept == (policies[tag.tag] == "discard"):
                logger.warning(
                    "%s sleeps already, with its contents %s; that stays so.", tag.tag, "kept" if kept else "dropped"
                )
        return vramctl.pause({tag.tag: policies[tag.tag] for tag in there}) if there else vramctl.Report()

    def _tidy(self) -> None:
        gc.collect()
        torch = vramctl._torch.loaded()
        if torch is not None:
            torch.cuda.empty_cache()
