"""vLLM: its sleep mode on this library, and tags for its memory where that mode is off.

Known versions: 0.26 and 0.33. `install` is vLLM's plugin (entry point `vllm.general_plugins`), which it calls in every
process before it makes a worker, and what `vramctl run` has called when vLLM is imported; the second call does nothing.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import logging
import os
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, Union

import vramctl
from vramctl import engines
from vramctl._imports import when_imported

#: Below vLLM's own logger, so that its handlers and level apply.
logger = logging.getLogger("vllm.vramctl")

#: Where the KV cache is allocated, and nothing else with it: the block tables must stay when it is discarded.
_KV_CACHE = (
    ("vllm.v1.worker.utils", None, "allocate_kv_cache"),  # 0.33, and where it is imported from there before we are
    ("vllm.v1.worker.gpu.attn_utils", None, "allocate_kv_cache"),
    ("vllm.v1.worker.gpu_model_runner", None, "allocate_kv_cache"),
    ("vllm.v1.worker.gpu.attn_utils", None, "_allocate_kv_cache"),  # 0.26, the second model runner
    ("vllm.v1.worker.gpu_model_runner", "GPUModelRunner", "_allocate_kv_cache_tensors"),  # 0.26, the first
)

#: Where workers make the buffers that they hand each other (custom all-reduce).
_SHARED_BUFFERS = "vllm.distributed.device_communicators.custom_all_reduce"


def install() -> None:
    """Has vLLM use this library in this process. Does nothing where the library is not preloaded."""
    if not vramctl.is_preloaded():
        return
    when_imported("vllm.device_allocator.cumem", _replace_allocator)
    when_imported("vllm.v1.worker.gpu_worker", _wrap_worker)
    when_imported(_SHARED_BUFFERS, _wrap_shared_buffers)
    engines.share_expert_buffers()
    for name, _, _ in _KV_CACHE:
        when_imported(name, _wrap_kv_cache)
    folders = getattr(importlib.import_module("vllm"), "__path__", ())
    if not any(os.path.exists(os.path.join(folder, "v1", "worker", "gpu_worker.py")) for folder in folders):
        _unknown("vllm.v1.worker.gpu_worker")


def _unknown(what: str) -> None:
    engines.say_once(
        "vLLM %s has no %s as the versions that are known (0.26, 0.33); what it allocates stays under the process's own tag, and "
        "can be paused with that",
        engines.version_of("vllm"),
        what,
    )


def _wrap_shared_buffers(module: Any) -> None:
    reducer = getattr(module, "CustomAllreduce", None)
    if reducer is None or not engines.wrap(reducer, "create_shared_buffer", engines.leave_to_cuda):
        _unknown("CustomAllreduce.create_shared_buffer")


# ---- tags where sleep mode is off ----

#: Whether this process's engine has its own sleep mode, which then decides on tags. Known when its weights are loaded.
_own_mode = False
#: The functions of `_KV_CACHE` that this version has.
_wrapped: List[str] = []


def _wrap_worker(module: Any) -> None:
    worker = getattr(module, "Worker", None)
    if worker is None or not engines.wrap(worker, "load_model", _load_model):
        _unknown("Worker.load_model")


def _wrap_kv_cache(module: Any) -> None:
    for name, owner, function in _KV_CACHE:
        if module.__name__ == name:
            place = getattr(module, owner, None) if owner else module
            if place is not None and engines.wrap(place, function, _allocate_kv_cache):
                _wrapped.append(name)


def _load_model(original: Callable[..., Any], worker: Any, *arguments: Any, **keywords: Any) -> Any:
    global _own_mode
    engines.announce("vllm")
    config = worker.vllm_config
    _own_mode = bool(
        getattr(config.model_config, "enable_sleep_mode", False)
        or getattr(config.model_config, "enable_cumem_allocator", False)
    )
    if _shares_graphs(config):
        engines.tag_graphs(None)
    elif not _own_mode:
        engines.tag_graphs("cuda_graph")
    if _own_mode:
        return original(worker, *arguments, **keywords)
    if not _wrapped:
        _unknown("function that allocates the KV cache")
    with engines.tagged_if_possible("weights"):
        return original(worker, *arguments, **keywords)


def _shares_graphs(config: Any) -> bool:
    """Whether workers hand each other memory of their CUDA graphs (custom all-reduce), which works with CUDA's own only."""
    parallel = config.parallel_config
    return (
        getattr(parallel, "tensor_parallel_size", 1) > 1
        and not getattr(parallel, "disable_custom_all_reduce", False)
        and not getattr(config, "use_cumem_cudagraph_pool", False)
    )


def _allocate_kv_cache(original: Callable[..., Any], *arguments: Any, **keywords: Any) -> Any:
    if _own_mode:
        return original(*arguments, **keywords)
    with engines.tagged_if_possible("kv_cache"):
        return original(*arguments, **keywords)


# ---- sleep mode ----


def _replace_allocator(module: Any) -> None:
    """Puts our allocator in place of vLLM's, which nobody has used yet: it is asked for when the first pool is entered."""
    theirs = getattr(module, "CuMemAllocator", None)
    if theirs is None or issubclass(theirs, Allocator) or theirs.instance is not None:
        return
    missing = [name for name in vars(theirs) if not name.startswith("_") and not hasattr(Allocator, name)]
    if missing:
        engines.say_once(
            "vLLM %s asks its sleep mode for %s, which is not known here; its own allocator stays in use",
            engines.version_of("vllm"),
            ", ".join(missing),
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

    instance: Optional[Allocator] = None
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
        self._names: Dict[str, str] = {}
        self._graph_pool: Any = None

    @contextlib.contextmanager
    def use_memory_pool(self, tag: Optional[str] = None) -> Iterator[None]:
        """What torch allocates inside gets the tag (`default` if None), whatever the settings of its allocator."""
        with self._tagged(self.default_tag if tag is None else tag) as name, engines.tagged(name):
            yield

    @contextlib.contextmanager
    def cudagraph_pool(self) -> Iterator[Tuple[int, int]]:
        """The id of a pool for CUDA graphs, whose memory gets the tag `cudagraph` when it is captured into inside."""
        with self._tagged("cudagraph") as name, vramctl.region(name, pool=False):
            if self._graph_pool is None:
                self._graph_pool = vramctl._torch.required().cuda.MemPool()
            yield self._graph_pool.id

    @contextlib.contextmanager
    def _tagged(self, tag: str) -> Iterator[str]:
        assert isinstance(tag, str), f"a tag is a str, not {tag!r}"
        name = self._names.setdefault(tag, _OUR_NAMES.get(tag, tag))
        before, self.current_tag = self.current_tag, tag
        try:
            yield name
        finally:
            self.current_tag = before

    def sleep(self, offload_tags: Union[Tuple[str, ...], str, None] = None) -> None:
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

    def discard(self, tags: Union[Tuple[str, ...], str]) -> None:
        """Gives back the memory of these tags and drops its contents."""
        tags = (tags,) if isinstance(tags, str) else tags
        report = self._pause({name: "discard" for tag, name in self._names.items() if tag in tags})
        logger.info("Gave back %.2f GiB of %s, contents dropped.", report.bytes / 2**30, ", ".join(tags))

    def wake_up(self, tags: Optional[List[str]] = None) -> None:
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

    def _there(self, tags: List[str]) -> List[Any]:
        """What there is under these tags of vLLM's."""
        names = {self._names[tag] for tag in tags}
        return [there for there in vramctl.status().tags if there.tag in names] if names else []

    def _pause(self, policies: Dict[str, str]) -> Any:
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
