"""The engine hooks and vLLM's sleep mode, against small stand-ins for the engines.

The stand-ins have the names and signatures of known versions (vLLM 0.26.0 and 0.33.0, SGLang 0.5.16 and 0.5.23) and almost no
bodies. Torch and the library are simulated: each allocation is recorded with its region and pool.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import pickle
import sys
import tempfile
import textwrap
import types
import unittest
from collections.abc import Iterator
from typing import Any
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

import vramctl  # noqa: E402
import vramctl._torch  # noqa: E402

GIB = 1 << 30


class Gpu:
    """A simulated torch and library that records each allocation's tag, pool and fate."""

    def __init__(self):
        self.regions, self.pools, self.live_pools = [], [], 0
        self.allocations = []  # dictionaries: what, tag, pool, bytes, state, contents
        self.engine, self.tags_cache = None, False
        self.last_pool_wins = False
        self.log = []
        self.free = None  # bytes available to a resume; None: enough
        self.cached = 0  # bytes that torch holds as free
        self.host_memory = True
        gpu = self

        class MemPool:
            made = 0

            def __init__(self):
                MemPool.made += 1
                gpu.live_pools += 1
                self.id = (0, MemPool.made)

            def __del__(self):
                gpu.live_pools -= 1

        @contextlib.contextmanager
        def use_mem_pool(pool, device=None):
            gpu.pools.append(pool)
            try:
                yield
            finally:
                gpu.pools.remove(pool)

        class CUDAGraph:
            def capture_begin(self, pool=None, capture_error_mode="global"):
                gpu.allocate("graph", pool=pool)

            def capture_end(self):
                gpu.allocate("graph's end", pool=None)

        @contextlib.contextmanager
        def graph(cuda_graph, pool=None, stream=None, capture_error_mode="global"):
            cuda_graph.capture_begin(pool=pool)
            try:
                yield
            finally:
                cuda_graph.capture_end()

        cuda = types.ModuleType("torch.cuda")
        cuda.MemPool, cuda.use_mem_pool, cuda.CUDAGraph, cuda.graph = MemPool, use_mem_pool, CUDAGraph, graph
        cuda.is_available = lambda: True
        cuda.init = lambda: None
        cuda.get_allocator_backend = lambda: "native"
        cuda.empty_cache = self.empty_cache
        self.torch = types.ModuleType("torch")
        self.torch.cuda, self.torch.__version__ = cuda, "2.11.0"
        self.torch.zeros = self.allocate

    def allocate(self, what: str, bytes: int = GIB, **settings: Any) -> str:
        # Torch uses the pool entered first; since pytorch#168382, the one entered last. During a graph capture that is the graph's own,
        # given in `settings`, because no engine enters another pool around a capture.
        entered = self.pools[-1 if self.last_pool_wins else 0].id if self.pools else None
        pool = settings.get("pool", entered)
        tag = self.regions[-1] if self.regions else "default"
        self.allocations.append({"what": what, "tag": tag, "pool": pool, "bytes": bytes, "state": "active", "contents": "here"})
        return what

    def announce(self, engine: str, tags_cache: bool) -> None:
        self.engine, self.tags_cache = engine, tags_cache

    def tags(self) -> dict[str, str | None]:
        return {one["what"]: one["tag"] for one in self.allocations}

    def pools_of(self, tag):
        return {one["pool"] for one in self.allocations if one["tag"] == tag}

    def contents(self) -> dict[str, tuple[str, str]]:
        return {one["what"]: (one["state"], one["contents"]) for one in self.allocations}

    # Replacements for the package's functions.

    @contextlib.contextmanager
    def region(self, tag, backup="default", *, device=None, pool=True):
        assert not pool, "the engines have pools of their own"
        self.regions.append(tag)
        try:
            yield
        finally:
            self.regions.pop()

    def status(self):
        tags = {}
        for one in self.allocations:
            if one["tag"] is None:
                continue
            tag = tags.setdefault(one["tag"], {"bytes": 0, "paused_bytes": 0, "host_bytes": 0})
            tag["bytes"] += one["bytes"]
            tag["paused_bytes"] += one["bytes"] if one["state"] == "paused" else 0
            tag["host_bytes"] += one["bytes"] if one["contents"] == "kept" else 0

        def state(tag):
            return {0: "active", tag["bytes"]: "paused"}.get(tag["paused_bytes"], "mixed")

        return vramctl.types.Status(
            tags=tuple(vramctl.types.Tag(tag=name, state=state(tag), **tag) for name, tag in sorted(tags.items()))
        )

    def chosen(self, tags):
        known = {one["tag"] for one in self.allocations}
        if not tags:
            raise vramctl.errors.Invalid("no tags: None means all of them")
        if set(tags) - known:
            raise vramctl.errors.UnknownTag(f"no allocation has the tag {set(tags) - known}")
        return [one for one in self.allocations if one["tag"] in tags]

    def pause(self, tags, *, timeout=None, backup="default"):
        """All or nothing, as the real one."""
        policies = tags if isinstance(tags, dict) else dict.fromkeys([tags] if isinstance(tags, str) else tags, backup)
        self.log.append(("pause", dict(policies)))
        mine = [one for one in self.chosen(policies) if one["state"] == "active"]
        fates = ["discarded" if policies[one["tag"]] == "discard" else "kept" for one in mine]
        if "kept" in fates and not self.host_memory:
            raise vramctl.errors.HostMemory("too little host memory")
        report = {"bytes": 0, "kept_bytes": 0, "discarded_bytes": 0}
        for one, fate in zip(mine, fates):
            one.update(state="paused", contents=fate)
            report["bytes"] += one["bytes"]
            report[f"{fate}_bytes"] += one["bytes"]
        return vramctl.types.Report(**report)

    def resume(self, tags, *, timeout=0.0):
        """All or nothing, as the real one."""
        tags = [tags] if isinstance(tags, str) else list(tags)
        self.log.append(("resume", tuple(tags)))
        mine = [one for one in self.chosen(tags) if one["state"] == "paused"]
        needed = sum(one["bytes"] for one in mine)
        if self.free is not None and needed > self.free:
            raise vramctl.errors.DeviceMemory("too little device memory")
        for one in mine:
            one.update(state="active", contents={"kept": "here", "discarded": "zero"}[one["contents"]])
        return vramctl.types.Report(bytes=needed)

    def empty_cache(self):
        self.log.append("empty_cache")
        if self.free is not None:
            self.free, self.cached = self.free + self.cached, 0


VLLM = {
    "vllm/__init__.py": "__version__ = '0.26.0'",
    "vllm/device_allocator/__init__.py": "",
    "vllm/device_allocator/cumem.py": """
        cumem_available = False
        class CuMemAllocator:
            instance = None
            default_tag = "default"
            @staticmethod
            def get_instance(): return "vLLM's own"
            def __init__(self): self.tags = {}
            def use_memory_pool(self, tag=None): ...
            def sleep(self, offload_tags=None): ...
            def wake_up(self, tags=None): ...
            def get_current_usage(self): ...
            def release_pools(self): ...
            def close(self): ...
        """,
    "vllm/device_allocator/sleep_mode_backend.py": """
        import importlib
        class SleepModeBackend:
            def __init__(self): self._state = "RUNNING"
            def state(self): return self._state
            @classmethod
            def is_supported(cls): return True
        class SleepModeBackendFactory:
            registry = {"cumem": ("vllm.device_allocator.sleep_mode_backend", "SleepModeBackend")}
            @classmethod
            def register_backend(cls, name, module_path, class_name):
                if name in cls.registry: raise ValueError(f"{name} is already registered")
                cls.registry[name] = (module_path, class_name)
            @classmethod
            def create_backend(cls, model_config):
                module, name = cls.registry[model_config.sleep_mode_backend]
                backend = getattr(importlib.import_module(module), name)
                if not backend.is_supported(): raise ValueError("not supported on this platform")
                return backend()
        """,
    "vllm/v1/worker/gpu/attn_utils.py": """
        import torch
        def _allocate_kv_cache(kv_cache_config, shared_layers, device):
            return torch.zeros("KV cache")
        def init_kv_cache(config, device):
            torch.zeros("block tables before")
            cache = _allocate_kv_cache(config, {}, device)
            torch.zeros("block tables behind")
            return cache
        """,
    "vllm/v1/worker/gpu_model_runner.py": """
        import torch
        class GPUModelRunner:
            def initialize_kv_cache(self, config):
                torch.zeros("block tables before")
                return self._allocate_kv_cache_tensors(config)
            def _allocate_kv_cache_tensors(self, kv_cache_config):
                return torch.zeros("KV cache")
        """,
    "vllm/v1/worker/gpu_worker.py": """
        import contextlib, torch
        class Worker:
            def __init__(self, config): self.vllm_config = config
            def _maybe_get_memory_pool_context(self, tag):
                return contextlib.nullcontext()
            def load_model(self, *, load_dummy_weights=False):
                with self._maybe_get_memory_pool_context(tag="weights"):
                    weights = torch.zeros("weights")
                torch.zeros("buffers of a transfer engine")
                return weights
        """,
}

#: What differs in 0.33.
VLLM_33 = {
    **VLLM,
    "vllm/__init__.py": "__version__ = '0.33.0'",
    "vllm/device_allocator/__init__.py": "DEFERRABLE_TAGS = ('weights', 'kv_cache')",
    "vllm/device_allocator/cumem.py": VLLM["vllm/device_allocator/cumem.py"].replace(
        "def close(self): ...",
        "def close(self): ...\n            def discard(self, tags): ...\n            def cudagraph_pool(self): ...",
    ),
    "vllm/v1/worker/utils.py": "import torch\ndef allocate_kv_cache(config, device): return torch.zeros('KV cache')",
    "vllm/v1/worker/gpu/attn_utils.py": """
        import torch
        from vllm.v1.worker.utils import allocate_kv_cache
        def init_kv_cache(config, device):
            torch.zeros("block tables before")
            return allocate_kv_cache(config, device)
        """,
    "vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner: ...",
}

#: A KV cache in physical memory of SGLang's own.
SGLANG_ARENA = {
    "sglang/srt/mem_cache/kv_vmm_backing.py": """
        import torch
        class KvVmmArena:
            def commit_range(self, offset, want_bytes):
                torch.zeros(f"cache at {offset}")
        """,
}

#: SGLang's plugins register hooks while they load; SGLang applies them afterwards.
SGLANG_PLUGINS = {
    "sglang/srt/plugins/__init__.py": """
        from .hook_registry import HookRegistry
        plugins = []
        def load_plugins():
            for plugin in plugins: plugin()
            HookRegistry.apply_hooks()
        """,
    "sglang/srt/plugins/hook_registry.py": """
        import enum, functools, pkgutil
        from typing import NamedTuple
        class HookSource(NamedTuple):
            plugin_name: str
            dist_name: str
        class HookType(enum.Enum):
            AFTER = "after"
            AROUND = "around"
        def around(original, hook):
            return functools.wraps(original)(lambda *arguments, **keywords: hook(original, *arguments, **keywords))
        class HookRegistry:
            hooks, applied = {}, set()
            @classmethod
            def register(cls, target, hook, hook_type=HookType.AFTER, *, source=None):
                assert hook_type is HookType.AROUND and source.plugin_name == "vramctl"
                cls.hooks.setdefault(target, []).append(hook)
            @classmethod
            def apply_hooks(cls):
                for target in set(cls.hooks) - cls.applied:
                    cls.applied.add(target)
                    owner, _, name = target.rpartition(".")
                    owner = pkgutil.resolve_name(owner)
                    function = vars(owner)[name]
                    static = isinstance(function, staticmethod)
                    function = function.__func__ if static else function
                    for hook in cls.hooks[target]: function = around(function, hook)
                    setattr(owner, name, staticmethod(function) if static else function)
        """,
}

SGLANG_ADAPTER = """
    from abc import ABC
    from contextlib import contextmanager
    class TorchMemorySaverAdapter(ABC):
        @staticmethod
        def create(enable: bool):
            return "the installed memory saver" if enable else Noop()
    class Noop(TorchMemorySaverAdapter):
        enabled = False
        @contextmanager
        def region(self, tag: str, enable_cpu_backup: bool = False):
            yield
    """

#: SGLang 0.5.16.
SGLANG = {
    **SGLANG_PLUGINS,
    **SGLANG_ARENA,
    "sglang/__init__.py": "__version__ = '0.5.16'",
    "sglang/srt/server_args.py": """
        import dataclasses
        from . import runtime_context
        @dataclasses.dataclass
        class ServerArgs:
            tp_size: int = 1
            enable_memory_saver: bool = False
            enable_weights_cpu_backup: bool = False
        def set_global_server_args_for_scheduler(settings):
            runtime_context.published = settings
        def get_global_server_args():
            return runtime_context.get_server_args()
        """,
    "sglang/srt/runtime_context.py": """
        published = None
        def get_server_args():
            if published is None: raise ValueError("Global server args is not set yet!")
            return published
        """,
    "sglang/srt/utils/torch_memory_saver_adapter.py": SGLANG_ADAPTER,
}

#: What differs in 0.5.23: immutable settings that are not a dataclass, and a function that only raises.
SGLANG_23 = {
    **SGLANG,
    "sglang/__init__.py": "__version__ = '0.5.23'",
    "sglang/srt/server_args.py": """
        from . import runtime_context
        class ServerArgs:
            def __init__(self, tp_size=1, enable_memory_saver=False):
                vars(self).update({name: value for name, value in locals().items() if name != "self"})
                self.__post_init__()
            def __post_init__(self): ...
            def __setattr__(self, name, value):
                raise AttributeError(f"server_args.{name} assigned after resolution")
        def set_global_server_args_for_scheduler(settings):
            runtime_context.published = settings
        def get_global_server_args():
            raise RuntimeError("get_global_server_args() is retired")
        """,
}

#: A version without plugins.
SGLANG_OLD = {
    **{name: text for name, text in SGLANG.items() if "plugins" not in name and "runtime_context" not in name},
    "sglang/__init__.py": "__version__ = '0.5.9'",
    "sglang/srt/server_args.py": """
        import dataclasses
        @dataclasses.dataclass
        class ServerArgs:
            tp_size: int = 1
            enable_memory_saver: bool = False
        published = None
        def set_global_server_args_for_scheduler(settings):
            global published
            published = settings
        def get_global_server_args():
            if published is None: raise ValueError("Global server args is not set yet!")
            return published
        """,
}


DEEP_EP = {
    "deep_ep/__init__.py": "from .buffer import Buffer",
    "deep_ep/buffer.py": """
        import torch
        class Buffer:
            def __init__(self, group, num_nvl_bytes=0, num_rdma_bytes=0, **settings):
                self.runtime = torch.zeros("expert buffer")
        """,
}


def write(folder, files):
    for path, text in files.items():
        path = folder / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
    importlib.invalidate_caches()


class Engine(unittest.TestCase):
    """Base of tests with a simulated GPU and a stand-in engine; unloads all imports afterwards."""

    preloaded = True

    def setUp(self):
        self.gpu = Gpu()
        stack = contextlib.ExitStack()
        self.addCleanup(stack.close)
        modules, finders = dict(sys.modules), list(sys.meta_path)

        def forget_ours():
            for name in [
                name for name in sys.modules if name.startswith(("vramctl.engines", "vramctl.frameworks", "vramctl._imports"))
            ]:
                del sys.modules[name]
            for name in ("engines", "frameworks", "_imports"):
                vars(vramctl).pop(name, None)

        def forget():
            forget_ours()
            sys.meta_path[:] = finders
            for name in set(sys.modules) - set(modules):
                del sys.modules[name]
            sys.modules.update(modules)
            importlib.invalidate_caches()

        stack.callback(forget)
        # These tests may run under the library, with its own import hook for engines installed.
        forget_ours()
        sys.meta_path[:] = [finder for finder in finders if type(finder).__module__ != "vramctl._imports"]
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        self.folder = pathlib.Path(folder)
        stack.enter_context(mock.patch.object(sys, "path", [folder, *sys.path]))
        stack.enter_context(mock.patch.dict(os.environ, clear=False))
        os.environ.pop("SGLANG_MEMORY_SAVER_CUDA_GRAPH", None)
        stack.enter_context(mock.patch.dict(sys.modules, {"torch": self.gpu.torch, "torch.cuda": self.gpu.torch.cuda}))
        for name in ("region", "status", "pause", "resume"):
            stack.enter_context(mock.patch.object(vramctl, name, getattr(self.gpu, name)))
        stack.enter_context(mock.patch.object(vramctl, "is_preloaded", lambda: self.preloaded))
        for name, function in {
            "loaded": lambda: self.gpu.torch,
            "required": lambda: self.gpu.torch,
            "adopt": lambda pool, tag: None,
        }.items():
            stack.enter_context(mock.patch.object(vramctl._torch, name, function))

    def engine(self, files: dict[str, str], name: str) -> Any:
        """Writes an engine and installs our hooks, as `sitecustomize` or the engine's plugins do."""
        write(self.folder, files)
        importlib.import_module(name)
        ours = importlib.import_module(f"vramctl.engines.{name}")
        mock.patch.object(ours.engines, "thread_region", lambda tag: vramctl.region(tag, pool=False)).start()
        mock.patch.object(ours.engines, "announce", self.gpu.announce).start()
        self.addCleanup(mock.patch.stopall)
        ours.install()
        return ours

    @contextlib.contextmanager
    def warned(self, *texts):
        """Expects exactly these warnings."""
        with self.assertLogs("vramctl", "WARNING") as logs:
            yield
        self.assertEqual(len(logs.output), len(texts), logs.output)
        for line, text in zip(logs.output, texts):
            self.assertIn(text, line)

    def silent(self):
        return self.assertNoLogs("vramctl", "WARNING") if sys.version_info >= (3, 10) else contextlib.nullcontext()


def vllm_config(sleep: bool = False, tp: int = 1, disable: bool = False, **more: Any) -> types.SimpleNamespace:
    return types.SimpleNamespace(
        model_config=types.SimpleNamespace(enable_sleep_mode=sleep, enable_cumem_allocator=sleep),
        parallel_config=types.SimpleNamespace(tensor_parallel_size=tp, disable_custom_all_reduce=disable),
        **more,
    )


@contextlib.contextmanager
def connector_with(pool: Any) -> Iterator[Any]:
    """A connector to other engines, perhaps with a pool of its own."""
    connector = mock.Mock()
    connector.get_mem_pool_context.return_value = pool
    transfer = types.SimpleNamespace(has_kv_transfer_group=lambda: True, get_kv_transfer_group=lambda: connector)
    with mock.patch.dict(sys.modules, {"vllm.distributed.kv_transfer": transfer}):
        yield connector


def entered(gpu: Gpu, pool: Any) -> Any:
    """As vLLM enters a connector's pool around the allocation of the cache."""
    return gpu.torch.cuda.use_mem_pool(pool) if pool is not None else contextlib.nullcontext()


def run_vllm(config, runner="second"):
    """A worker's startup, in order."""
    from vllm.v1.worker import gpu_worker
    from vllm.v1.worker.gpu import attn_utils
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    worker = gpu_worker.Worker(config)
    assert worker.load_model(load_dummy_weights=False) == "weights"
    if runner == "second":
        assert attn_utils.init_kv_cache(None, "cuda") == "KV cache"
    else:
        assert GPUModelRunner().initialize_kv_cache(None) == "KV cache"
    import torch

    torch.zeros("activations")
    with torch.cuda.graph(torch.cuda.CUDAGraph(), pool="vLLM's graphs"):
        torch.zeros("output", pool="vLLM's graphs")


class VllmFromOutside(Engine):
    """vLLM without sleep mode: tags only."""

    WANTED = {
        "weights": "weights",
        "buffers of a transfer engine": "default",
        "KV cache": "kv_cache",
        "block tables before": "default",
        "activations": "default",
        "graph": "cuda_graph",
        "output": "cuda_graph",
        "graph's end": "cuda_graph",
    }

    def check(self, files, runner):
        self.engine(files, "vllm")
        with self.silent():
            run_vllm(vllm_config(), runner)
        tags = self.gpu.tags()
        self.assertEqual({what: tags[what] for what in self.WANTED}, self.WANTED)
        weights, cache = self.gpu.pools_of("weights"), self.gpu.pools_of("kv_cache")
        self.assertFalse(weights & cache, "the cache, which is discarded, shares no segment")
        self.assertEqual(weights, {None}, "a model that is converted needs no more room than without us")
        self.assertEqual(self.gpu.live_pools, 0, "a pool's free memory is returned when its region ends")
        self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))
        self.assertEqual((self.gpu.engine, self.gpu.tags_cache), ("vllm", True))

    def test_the_second_model_runner(self):
        self.check(VLLM, "second")
        self.assertEqual(self.gpu.tags()["block tables behind"], "default")

    def test_the_first_model_runner(self):
        self.check(VLLM, "first")

    def test_version_33(self):
        self.check(VLLM_33, "second")

    def test_a_connector_s_own_pool_keeps_the_cache(self):
        """Whichever of two pools torch uses."""
        self.engine(VLLM_33, "vllm")
        theirs = self.gpu.torch.cuda.MemPool()
        for self.gpu.last_pool_wins in (False, True):
            for pool, tag in ((theirs, None), (None, "kv_cache")):
                with self.silent(), connector_with(pool), entered(self.gpu, pool):
                    run_vllm(vllm_config())
                cache = [one for one in self.gpu.allocations if one["what"] == "KV cache"][-1]
                self.assertEqual((cache["tag"], cache["pool"] == theirs.id), (tag, pool is theirs))
                self.assertIsNotNone(cache["pool"])

    def test_for_nvlink_between_nodes_vllm_keeps_its_allocator(self):
        """Whose handles ours does not have. Known only when the settings are, after ours has taken its place."""
        ours = self.engine(VLLM_33, "vllm")
        cumem = importlib.import_module("vllm.device_allocator.cumem")
        self.assertIs(cumem.CuMemAllocator, ours.Allocator)
        config = vllm_config()
        config.model_config.enable_cumem_allocator = True
        with self.silent():
            run_vllm(config)
        self.assertIsNot(cumem.CuMemAllocator, ours.Allocator)
        self.assertEqual(self.gpu.tags()["weights"], "default")

    def test_weights_in_a_process_of_their_own_are_named(self):
        self.engine(VLLM_33, "vllm")
        for load_format in ("auto", "ipc_cache"):
            config = vllm_config(load_config=types.SimpleNamespace(load_format=load_format))
            with self.silent() if load_format == "auto" else self.assertLogs("vramctl", "WARNING") as said:
                run_vllm(config)
        self.assertIn("the weights are in a process of their own", said.output[0])

    def test_nccl_does_not_register_the_buffers_of_graphs_unless_the_user_wants_it(self):
        for given, wanted in ((None, "0"), ("1", "1")):
            with mock.patch.dict(os.environ):
                os.environ.pop("NCCL_GRAPH_REGISTER", None)
                if given is not None:
                    os.environ["NCCL_GRAPH_REGISTER"] = given
                self.engine(VLLM_33, "vllm")
                self.assertEqual(os.environ["NCCL_GRAPH_REGISTER"], wanted)
                self.doCleanups()
                self.setUp()

    def test_as_a_plugin_alone_it_comes_late(self):
        """Without `sitecustomize`, vLLM imports a lot before it calls its plugins."""
        for files in (VLLM, VLLM_33):
            with self.subTest(files[next(iter(files))]):
                self.doCleanups()
                self.setUp()
                write(self.folder, files)
                for name in ("gpu_worker", "gpu.attn_utils", "gpu_model_runner"):
                    importlib.import_module(f"vllm.v1.worker.{name}")
                self.engine(files, "vllm")
                run_vllm(vllm_config())
                self.assertEqual((self.gpu.tags()["weights"], self.gpu.tags()["KV cache"]), ("weights", "kv_cache"))

    def test_installed_twice_it_wraps_once(self):
        """By `vramctl run` and as vLLM's plugin."""
        ours = self.engine(VLLM, "vllm")
        ours.install()
        run_vllm(vllm_config())
        ours.install()
        self.assertEqual(len([one for one in self.gpu.allocations if one["what"] == "weights"]), 1)
        from vllm.v1.worker.gpu_worker import Worker

        self.assertFalse(hasattr(Worker._maybe_get_memory_pool_context._vramctl_wraps, "_vramctl_wraps"))

    def test_a_graph_whose_capture_fails_ends_its_region(self):
        self.engine(VLLM, "vllm")
        run_vllm(vllm_config())
        torch = self.gpu.torch
        with self.assertRaises(KeyError), torch.cuda.graph(torch.cuda.CUDAGraph()):
            raise KeyError
        graph = torch.cuda.CUDAGraph()
        with mock.patch.object(self.gpu, "allocate", side_effect=ValueError), self.assertRaises(ValueError):
            graph.capture_begin()
        self.assertEqual(self.gpu.regions, [])
        graph.capture_end()

    def test_graphs_that_workers_share_keep_the_process_s_tag_in_sleep_mode(self):
        """Each worker falls asleep by itself, and cannot pause what another has open (custom all-reduce)."""
        self.engine(VLLM, "vllm")
        run_vllm(vllm_config(sleep=True, tp=2))
        self.assertEqual(self.gpu.tags()["output"], "default")
        for disable in (False, True):
            run_vllm(vllm_config(tp=2, disable=disable))
            self.assertEqual(self.gpu.tags()["output"], "cuda_graph")

    def test_expert_buffers_have_the_process_s_tag_wherever_they_are_made(self):
        """Ranks have DeepEP's buffers of each other open (CUDA IPC), and a rank that sleeps alone cannot pause what others have open."""
        self.engine({**VLLM, **DEEP_EP}, "vllm")
        for tag in ("default", "mine", None):
            with self.silent(), mock.patch.dict(os.environ, VRAMCTL_TAG=tag or ""), vramctl.engines.thread_region("weights"):
                buffer = importlib.import_module("deep_ep").Buffer("group", 1 << 30, low_latency_mode=False)
            self.assertEqual(buffer.runtime, "expert buffer")
            self.assertEqual((self.gpu.tags(), self.gpu.regions), ({"expert buffer": tag}, []))

    def test_with_sleep_mode_on_nothing_is_tagged_here(self):
        self.engine(VLLM, "vllm")
        run_vllm(vllm_config(sleep=True))
        self.assertEqual(set(self.gpu.tags().values()), {"default"})
        self.assertEqual(self.gpu.engine, "vllm", "a pause from outside must know it regardless")

    def test_a_tag_that_cannot_be_had_does_not_stop_the_engine(self):
        self.engine(VLLM, "vllm")
        refuse = mock.Mock(side_effect=vramctl.errors.Unsupported("torch cannot"))
        with mock.patch.object(vramctl, "region", refuse), self.warned("torch cannot", "torch cannot"):
            run_vllm(vllm_config())
        self.assertEqual(set(self.gpu.tags().values()), {"default"})

    def test_a_version_without_the_kv_cache_s_functions_says_so_once(self):
        files = {
            **VLLM,
            "vllm/__init__.py": "__version__ = '9.9'",
            "vllm/v1/worker/gpu/attn_utils.py": "import torch\ndef init_kv_cache(config, device): return torch.zeros('KV cache')",
            "vllm/v1/worker/gpu_model_runner.py": "class GPUModelRunner: ...",
        }
        with self.warned("vllm 9.9 lacks allocate_kv_cache"):
            self.engine(files, "vllm").install()
            run_vllm(vllm_config())
        self.assertEqual((self.gpu.tags()["weights"], self.gpu.tags()["KV cache"]), ("weights", "default"))
        self.assertFalse(self.gpu.tags_cache, "a pause from outside must not drop anything that may be cache")

    def test_a_version_without_the_worker_says_so_once(self):
        files = {name: text for name, text in VLLM.items() if "gpu_worker" not in name}
        with self.warned("lacks Worker._maybe_get_memory_pool_context"):
            self.engine(files, "vllm").install()

    def test_whatever_fails_in_our_code_vllm_starts(self):
        ours = self.engine(VLLM, "vllm")
        with (
            mock.patch.object(ours.engines, "tag_graphs", side_effect=KeyError("ours")),
            self.warned("Worker._maybe_get_memory_pool_context"),
        ):
            run_vllm(vllm_config())
            run_vllm(vllm_config())
        self.assertEqual(self.gpu.tags()["weights"], "default")
        self.assertEqual(len([one for one in self.gpu.allocations if one["what"] == "weights"]), 2)

    def test_whatever_it_raises_itself_is_raised(self):
        self.engine(VLLM, "vllm")
        from vllm.v1.worker.gpu_worker import Worker

        with self.silent(), mock.patch.object(self.gpu.torch, "zeros", side_effect=MemoryError), self.assertRaises(MemoryError):
            Worker(vllm_config()).load_model()
        self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))


class VllmUnmanaged(Engine):
    preloaded = False

    def test_without_the_library_vllm_is_as_it_was(self):
        self.engine(VLLM, "vllm")
        with self.silent():
            run_vllm(vllm_config())
        self.assertEqual(set(self.gpu.tags().values()), {"default"})
        from vllm.device_allocator.cumem import CuMemAllocator

        self.assertEqual(CuMemAllocator.get_instance(), "vLLM's own")
        self.assertIsNone(self.gpu.engine)


class VllmSleepMode(Engine):
    def setUp(self):
        super().setUp()
        self.ours = self.engine(VLLM, "vllm")
        self.allocator = self.allocator_of_vllm()
        self.addCleanup(setattr, self.ours.Allocator, "instance", None)

    def allocator_of_vllm(self):
        # vLLM imports it late, by name.
        from vllm.device_allocator.cumem import CuMemAllocator

        return CuMemAllocator.get_instance()

    def load(self):
        self.gpu.allocate("somebody else's")
        for tag in ("weights", "kv_cache"):
            with self.allocator.use_memory_pool(tag=tag):
                self.gpu.allocate(tag)

    def test_it_is_ours_and_the_only_one(self):
        self.assertIsInstance(self.allocator, self.ours.Allocator)
        self.assertIs(self.allocator_of_vllm(), self.allocator)
        self.assertTrue(sys.modules["vllm.device_allocator.cumem"].cumem_available)

    def test_pools_by_tag(self):
        self.assertEqual(self.allocator.get_current_usage(), 0, "vLLM takes anything else for a second engine")
        self.load()
        self.assertEqual(self.gpu.tags(), {"somebody else's": "default", "weights": "weights", "kv_cache": "kv_cache"})
        self.assertEqual(self.allocator.get_current_usage(), 2 * GIB)
        self.assertEqual(self.allocator.current_tag, "default")

    def test_pools_in_pools(self):
        """As in 0.33. Torch alone would keep using the outer pool."""
        with self.allocator.use_memory_pool("runtime"):
            self.gpu.allocate("before")
            with self.allocator.use_memory_pool("kv_cache"):
                self.gpu.allocate("inside")
                self.assertEqual(self.allocator.current_tag, "kv_cache")
            self.gpu.allocate("behind")
        self.assertEqual(self.gpu.tags(), {"before": "runtime", "inside": "kv_cache", "behind": "runtime"})
        self.assertEqual(len(self.gpu.pools_of("runtime")), 1)
        self.assertFalse(self.gpu.pools_of("runtime") & self.gpu.pools_of("kv_cache"))
        self.assertEqual(self.gpu.live_pools, 0)

    def test_level_1_keeps_weights_and_drops_the_rest(self):
        self.load()
        for _ in range(3):
            with self.assertLogs("vllm.vramctl", "INFO") as logs:
                self.allocator.sleep(offload_tags=("weights",))
            self.assertIn("Sleep released 2.00 GiB", logs.output[0])
            self.assertIn("1.00 GiB kept", logs.output[0])
            wanted = {"somebody else's": ("active", "here"), "weights": ("paused", "kept"), "kv_cache": ("paused", "discarded")}
            self.assertEqual(self.gpu.contents(), wanted)
            self.allocator.wake_up(["weights"])
            self.assertEqual(self.gpu.contents()["weights"], ("active", "here"))
            self.assertEqual(self.gpu.contents()["kv_cache"], ("paused", "discarded"))
            self.allocator.wake_up(["kv_cache"])
            self.assertEqual(self.gpu.contents()["kv_cache"], ("active", "zero"))

    def test_level_2_drops_everything(self):
        self.load()
        self.allocator.sleep(offload_tags=())
        self.assertEqual({self.gpu.contents()[tag][1] for tag in ("weights", "kv_cache")}, {"discarded"})
        self.allocator.wake_up(None)
        self.assertEqual({self.gpu.contents()[tag] for tag in ("weights", "kv_cache")}, {("active", "zero")})

    def test_the_default_tag_is_not_the_process_s_own(self):
        self.gpu.allocate("somebody else's")
        with self.allocator.use_memory_pool():
            self.gpu.allocate("pooled")
        self.allocator.sleep(())
        self.assertEqual(self.gpu.contents()["somebody else's"], ("active", "here"))
        self.assertEqual(self.gpu.contents()["pooled"], ("paused", "discarded"))
        self.allocator.wake_up(["default"])
        self.allocator.sleep()
        self.assertEqual(self.gpu.contents()["pooled"], ("paused", "kept"))

    def test_what_sleeps_sleeps_on(self):
        self.load()
        self.allocator.sleep("weights")
        with self.assertLogs("vllm.vramctl", "WARNING") as logs:
            self.allocator.sleep(("kv_cache",))
        self.assertIn("kv_cache is already asleep with its contents dropped", logs.output[0])
        self.assertIn("weights is already asleep with its contents kept", logs.output[1])
        self.assertEqual(self.gpu.contents()["weights"], ("paused", "kept"))
        for _ in range(2):
            self.allocator.wake_up()
            self.assertEqual(
                [self.gpu.contents()[tag] for tag in ("weights", "kv_cache")], [("active", "here"), ("active", "zero")]
            )

    def test_too_little_host_memory_loses_nothing(self):
        """Neither contents to keep nor contents to drop: the engine carries on."""
        self.load()
        before = self.gpu.contents()
        self.gpu.host_memory = False
        for kept in ("weights", "kv_cache"):
            with self.assertRaises(vramctl.errors.HostMemory):
                self.allocator.sleep((kept,))
            self.assertEqual(self.gpu.contents(), before)
        self.allocator.sleep(())

    def test_a_sleep_and_a_wake_up_are_one_call_each(self):
        """With several calls, a failure would leave some tags asleep and others awake."""
        self.load()
        self.gpu.log.clear()
        self.allocator.sleep(("weights",))
        self.allocator.wake_up()
        calls = [entry for entry in self.gpu.log if entry != "empty_cache"]
        self.assertEqual(calls, [("pause", {"kv_cache": "discard", "weights": "default"}), ("resume", ("kv_cache", "weights"))])

    def test_too_little_memory_leaves_everything_asleep(self):
        self.load()
        self.allocator.sleep(("weights",))
        before, self.gpu.free = self.gpu.contents(), GIB
        with self.assertRaises(vramctl.errors.DeviceMemory):
            self.allocator.wake_up()
        self.assertEqual(self.gpu.contents(), before)
        self.allocator.wake_up(["weights"])
        self.assertEqual(self.gpu.contents()["weights"], ("active", "here"))

    def test_memory_that_torch_holds_as_free_is_given_back_before_giving_up(self):
        self.load()
        self.allocator.sleep(("weights",))
        self.gpu.free, self.gpu.cached = GIB, GIB
        self.allocator.wake_up()
        self.assertEqual({one["state"] for one in self.gpu.allocations}, {"active"})

    def test_wrong_arguments_are_refused(self):
        with self.assertRaises(AssertionError):
            self.allocator.sleep(["weights"])
        with self.assertRaises(AssertionError), self.allocator.use_memory_pool(3):
            pass
        self.allocator.sleep()
        self.allocator.wake_up(["unknown"])
        self.allocator.release_pools()
        self.allocator.close()


class VllmSleepMode33(Engine):
    def setUp(self):
        super().setUp()
        self.ours = self.engine(VLLM_33, "vllm")
        from vllm.device_allocator.cumem import CuMemAllocator

        self.allocator = CuMemAllocator.get_instance()
        self.addCleanup(setattr, self.ours.Allocator, "instance", None)
        for tag in ("weights", "kv_cache", "runtime", "workspace"):
            with self.allocator.use_memory_pool(tag):
                self.gpu.allocate(tag)

    def test_only_some_tags_may_sleep_on(self):
        self.allocator.sleep(("weights", "runtime", "cudagraph"))
        self.allocator.wake_up(["weights"])
        states = {what: state for what, (state, _) in self.gpu.contents().items()}
        self.assertEqual(states, {"weights": "active", "kv_cache": "paused", "runtime": "active", "workspace": "active"})

    def test_discard(self):
        self.allocator.discard("kv_cache")
        self.allocator.discard(("kv_cache", "workspace"))
        contents = self.gpu.contents()
        self.assertEqual(contents["kv_cache"], ("paused", "discarded"))
        self.assertEqual(contents["workspace"], ("paused", "discarded"))
        self.assertEqual(contents["weights"], ("active", "here"))

    def test_graphs_have_one_pool_and_the_tag_that_graphs_have(self):
        ids = set()
        for number in range(2):
            with self.allocator.cudagraph_pool() as pool:
                ids.add(pool)
                self.gpu.allocate(f"graph {number}", pool=pool)
        self.assertEqual(len(ids), 1)
        self.assertEqual({self.gpu.tags()[f"graph {number}"] for number in range(2)}, {"cuda_graph"})
        self.allocator.sleep(("weights", "cudagraph"))
        self.assertEqual(self.gpu.contents()["graph 0"], ("paused", "kept"))
        self.allocator.release_pools()
        self.assertEqual(self.gpu.live_pools, 0)


class VllmSleepBackend(Engine):
    """The backend `vramctl`, as vLLM resolves it by name."""

    def setUp(self):
        super().setUp()
        self.ours = self.engine(VLLM_33, "vllm")
        self.addCleanup(setattr, self.ours.Allocator, "instance", None)
        from vllm.device_allocator.sleep_mode_backend import SleepModeBackendFactory

        self.factory = SleepModeBackendFactory

    def config(self, **more):
        config = vllm_config(sleep=True, **more)
        config.model_config.sleep_mode_backend = "vramctl"
        return config

    def started(self, **more):
        from vllm.device_allocator.cumem import CuMemAllocator

        with CuMemAllocator.get_instance().use_memory_pool("kv_cache"):
            self.gpu.allocate("cache in vLLM's pool")
        run_vllm(self.config(**more))
        return self.factory.create_backend(self.config().model_config)

    def test_levels_and_tags(self):
        backend = self.started()
        backend.suspend(1)
        self.assertEqual(backend.state(), "SUSPENDED")
        self.assertEqual(self.gpu.contents()["cache in vLLM's pool"], ("paused", "discarded"))
        self.assertEqual(self.gpu.contents()["output"], ("paused", "kept"), "graphs have no other copy")
        self.assertEqual(self.gpu.contents()["activations"], ("active", "here"))
        backend.resume(["weights"])
        self.assertEqual(self.gpu.contents()["output"], ("active", "here"))
        self.assertEqual(self.gpu.contents()["cache in vLLM's pool"][0], "paused")
        backend.resume()
        self.assertEqual((backend.state(), self.gpu.contents()["cache in vLLM's pool"]), ("RUNNING", ("active", "zero")))
        backend.discard(("kv_cache",))
        self.assertEqual(self.gpu.contents()["cache in vLLM's pool"], ("paused", "discarded"))
        self.assertEqual(self.gpu.contents()["output"], ("active", "here"))

    def test_a_setting_that_has_no_effect_with_it_is_named(self):
        from vllm.v1.worker import gpu_worker

        for tp, effect in ((1, "sleep in any case"), (2, "stay awake, because workers share their memory")):
            config = self.config(tp=tp)
            config.model_config.sleep_mode_offload_cudagraph = True
            with self.assertLogs("vramctl", "WARNING") as said:
                gpu_worker.Worker(config).load_model(load_dummy_weights=False)
            self.assertIn(f"CUDA graphs {effect}", said.output[0])

    def test_graphs_that_workers_share_stay(self):
        backend = self.started(tp=2)
        self.assertEqual(self.gpu.tags()["output"], "default")
        backend.suspend(1)
        self.assertEqual(self.gpu.contents()["output"], ("active", "here"))

    def test_a_sleep_that_fails_leaves_it_running(self):
        backend = self.started()
        self.gpu.host_memory = False
        with self.assertRaises(vramctl.errors.HostMemory):
            backend.suspend(1)
        self.assertEqual((backend.state(), self.gpu.contents()["output"]), ("RUNNING", ("active", "here")))

    def test_a_connector_gets_its_cache_back_from_a_sleep_that_fails(self):
        """vLLM takes it away before, and gives it back only if it wakes up from a sleep that has succeeded."""
        backend = self.started()
        with connector_with(None) as connector:
            self.gpu.host_memory = False
            with self.assertRaises(vramctl.errors.HostMemory):
                backend.suspend(1)
            connector.restore_kv_caches.assert_called_once_with()
            self.gpu.host_memory = True
            backend.suspend(1)
            connector.restore_kv_caches.assert_called_once_with()
            # Older ones have no such function.
            del connector.restore_kv_caches
            self.gpu.host_memory = False
            backend.resume()
            with self.assertRaises(vramctl.errors.HostMemory):
                backend.suspend(1)

    def test_without_our_allocator_it_says_so(self):
        importlib.import_module("vllm.device_allocator.cumem").CuMemAllocator = object
        with self.assertRaisesRegex(ValueError, "not supported"):
            self.factory.create_backend(self.config().model_config)

    def test_it_is_registered_once(self):
        self.ours.install()
        importlib.reload(importlib.import_module("vllm"))
        self.assertEqual(list(self.factory.registry), ["cumem", "vramctl"])


class VllmUnknownSleepMode(Engine):
    def test_a_method_that_is_not_known_keeps_vllm_s_own(self):
        text = VLLM["vllm/device_allocator/cumem.py"]
        files = {
            **VLLM,
            "vllm/device_allocator/cumem.py": text.replace("def close", "def hibernate(self): ...\n            def close"),
        }
        self.engine(files, "vllm")
        with self.warned("hibernate"):
            from vllm.device_allocator.cumem import CuMemAllocator
        self.assertEqual(CuMemAllocator.get_instance(), "vLLM's own")


class Sglang(Engine):
    files = SGLANG

    def engine(self, files, name):
        ours = super().engine(files, name)
        self.load_plugins()
        return ours

    def load_plugins(self):
        """SGLang does this in each process before it creates settings or an engine."""
        if "sglang/srt/plugins/__init__.py" in self.files:
            importlib.import_module("sglang.srt.plugins").load_plugins()

    def start(self, **settings):
        """The settings: created by the first process, then pickled to its children, which publish them."""
        from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

        settings = pickle.loads(pickle.dumps(ServerArgs(**settings)))
        set_global_server_args_for_scheduler(settings)
        return settings

    def create(self, enable):
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        return TorchMemorySaverAdapter.create(enable=enable)

    def saver(self, settings):
        return self.create(settings.enable_memory_saver)

    def capture(self):
        torch = self.gpu.torch
        with torch.cuda.graph(torch.cuda.CUDAGraph(), pool="SGLang's graphs"):
            torch.zeros("output", pool="SGLang's graphs")

    def test_where_the_memory_saver_is_off_memory_gets_tags(self):
        self.engine(self.files, "sglang")
        with self.silent():
            saver = self.saver(self.start())
            with saver.region("weights", enable_cpu_backup=True):
                self.gpu.allocate("weights")
            with saver.region(tag="kv_cache"):
                self.gpu.allocate("KV cache")
            self.gpu.allocate("activations")
            self.capture()
        wanted = {"weights": "weights", "KV cache": "kv_cache", "activations": "default", "output": "cuda_graph"}
        self.assertEqual({what: self.gpu.tags()[what] for what in wanted}, wanted)
        self.assertFalse(self.gpu.pools_of("weights") & self.gpu.pools_of("kv_cache"))
        self.assertEqual(self.gpu.live_pools, 0)
        self.assertEqual((self.gpu.engine, self.gpu.tags_cache), ("sglang", False))

    def test_each_part_of_sglang_asks_for_a_saver_and_graphs_are_wrapped_once(self):
        ours, entered = self.engine(self.files, "sglang"), []
        with mock.patch.object(ours.engines, "thread_region", lambda tag: contextlib.nullcontext(entered.append(tag))):
            for _ in range(3):
                self.saver(self.start())
            self.capture()
        self.assertEqual(entered, ["cuda_graph"])

    def test_the_settings_stay_as_they_were(self):
        """SGLang exposes them, and frameworks compare them with what they requested."""
        self.engine(self.files, "sglang")
        for asked in (False, True):
            settings = self.start(enable_memory_saver=asked)
            before = dict(vars(settings))
            self.saver(settings)
            self.assertEqual(vars(settings), before)
            self.assertIs(settings.enable_memory_saver, asked)

    def test_to_sglang_its_memory_saver_is_off(self):
        """Otherwise it would capture different graphs and release memory on its own."""
        self.engine(self.files, "sglang")
        self.assertFalse(self.saver(self.start()).enabled)

    def test_expert_buffers_have_the_process_s_tag(self):
        self.engine({**self.files, **DEEP_EP}, "sglang")
        with self.silent(), mock.patch.dict(os.environ, VRAMCTL_TAG="mine"):
            importlib.import_module("deep_ep").Buffer("group", 1 << 30)
        self.assertEqual((self.gpu.tags(), self.gpu.regions), ({"expert buffer": "mine"}, []))

    def test_a_cache_that_mooncake_moves_by_nvlink_is_left_to_it(self):
        """Torch uses the pool entered first, so one of ours would displace SGLang's inside it."""
        self.engine(self.files, "sglang")
        saver = self.saver(self.start())
        for value, tag in (("NVLINK", None), ("True", None), ("INTRA_NODE_NVLINK", None), ("", "kv_cache"), ("no", "kv_cache")):
            with mock.patch.dict(os.environ, SGLANG_MOONCAKE_CUSTOM_MEM_POOL=value), saver.region("kv_cache"):
                self.assertEqual(bool(self.gpu.pools), tag is not None)
                self.gpu.allocate(value)
            with saver.region("weights"):
                self.gpu.allocate(f"weights, {value}")
            self.assertEqual((self.gpu.tags()[value], self.gpu.tags()[f"weights, {value}"]), (tag, "weights"))

    def test_a_cache_in_memory_of_sglang_s_own_is_tagged(self):
        """Outside its regions: with the cache under the process's tag, a pause that discards this tag would go through."""
        self.engine(self.files, "sglang")
        with self.silent():
            for enabled in (False, True):
                self.start(enable_memory_saver=enabled)
                arena = importlib.import_module("sglang.srt.mem_cache.kv_vmm_backing").KvVmmArena()
                arena.commit_range(int(enabled), 4)
                self.assertEqual(self.gpu.tags()[f"cache at {int(enabled)}"], "kv_cache")
            with mock.patch.dict(os.environ, SGLANG_MOONCAKE_CUSTOM_MEM_POOL="NVLINK"):
                arena.commit_range(2, 4)
        self.assertIsNone(self.gpu.tags()["cache at 2"])
        self.assertEqual((self.gpu.regions, self.gpu.pools), ([], []))

    def test_its_own_memory_saver_rules(self):
        self.engine(self.files, "sglang")
        settings = self.start(enable_memory_saver=True)
        self.assertEqual(self.saver(settings), "the installed memory saver")
        # Graphs, which SGLang enables with `setting and get_bool_env_var(…)`.
        with self.create(False).region("kv_cache"):
            self.gpu.allocate("not to be paused")
        self.capture()
        self.assertEqual((self.gpu.tags()["not to be paused"], self.gpu.tags()["output"]), ("default", "default"))
        self.assertEqual(self.gpu.engine, "sglang")

    def test_with_its_own_memory_saver_graphs_keep_the_process_s_tag(self):
        """Each worker releases its memory by itself, and cannot pause graph memory that another has open (custom all-reduce)."""
        self.engine(self.files, "sglang")
        for saver, tag in ((True, "default"), (False, "cuda_graph")):
            self.saver(self.start(tp_size=2, enable_memory_saver=saver))
            self.capture()
            self.assertEqual(self.gpu.tags()["output"], tag)

    def test_a_process_that_has_no_engine_is_left_alone(self):
        """SGLang's first process creates a memory saver, too, and in some versions never publishes the settings."""
        self.engine(self.files, "sglang")
        with self.silent(), self.create(False).region("weights"):
            self.gpu.allocate("weights")
        self.capture()
        self.assertEqual(set(self.gpu.tags().values()), {"default"})
        self.assertIsNone(self.gpu.engine)

    def test_as_a_plugin_and_at_the_import_it_hooks_once(self):
        write(self.folder, self.files)
        importlib.import_module("sglang")
        ours = importlib.import_module("vramctl.engines.sglang")
        regions = []
        with mock.patch.object(ours.engines, "tagged_in_place", lambda tag: contextlib.nullcontext(regions.append(tag))):
            ours.install()
            if "sglang/srt/plugins/__init__.py" in self.files:
                importlib.import_module("sglang.srt.plugins").plugins.append(ours.install)
                self.load_plugins()
            ours.install()
            self.load_plugins()
            created = []
            with (
                mock.patch.object(ours.engines, "announce", lambda name, **_: created.append(name)),
                self.saver(self.start()).region("weights"),
            ):
                pass
        self.assertEqual((created, regions), (["sglang"], ["weights"]))

    def test_whatever_fails_in_our_code_sglang_starts(self):
        ours = self.engine(self.files, "sglang")
        settings = self.start()
        for owner, broken in ((ours, "_settings"), (ours.engines, "tag_graphs")):
            with self.subTest(broken):
                ours.engines._said.clear()
                with (
                    mock.patch.object(owner, broken, side_effect=KeyError("ours")),
                    self.warned("TorchMemorySaverAdapter.create"),
                ):
                    for _ in range(2):
                        with self.saver(settings).region("weights"):
                            self.gpu.allocate("weights")
                self.assertEqual(self.gpu.tags()["weights"], "default")

    def test_a_region_that_cannot_be_had_does_not_stop_it(self):
        self.engine(self.files, "sglang")
        saver = self.saver(self.start())
        refuse = mock.Mock(side_effect=vramctl.errors.Unsupported("torch cannot"))
        with mock.patch.object(vramctl, "region", refuse), self.warned("torch cannot"):
            for tag in ("weights", "kv_cache"):
                with saver.region(tag):
                    self.gpu.allocate(tag)
        self.assertEqual(set(self.gpu.tags().values()), {"default"})

    def test_an_unknown_version_says_so_once(self):
        files = {**self.files, "sglang/__init__.py": "__version__ = '9.9'"}
        del files["sglang/srt/utils/torch_memory_saver_adapter.py"]
        with self.warned("sglang 9.9 lacks TorchMemorySaverAdapter.create"):
            self.engine(files, "sglang").install()


class Sglang23(Sglang):
    files = SGLANG_23


class SglangWithoutPlugins(Sglang):
    files = SGLANG_OLD


class SglangUnreadable(Engine):
    def test_where_its_settings_cannot_be_read_sglang_starts(self):
        """Versions in which reading the settings raises an unexpected error."""
        settings = "def get_global_server_args(): raise RuntimeError('get_global_server_args() is retired')"
        self.engine({**SGLANG_OLD, "sglang/srt/server_args.py": settings}, "sglang")
        from sglang.srt.utils.torch_memory_saver_adapter import TorchMemorySaverAdapter

        with self.warned("get_global_server_args() is retired"):
            for _ in range(2):
                self.assertFalse(TorchMemorySaverAdapter.create(enable=False).enabled)
                self.assertEqual(TorchMemorySaverAdapter.create(enable=True), "the installed memory saver")


class EntryPoints(unittest.TestCase):
    def test_the_package_says_that_it_is_a_plugin_of_both(self):
        project = ROOT.parent / "pyproject.toml"
        if not project.is_file():
            self.skipTest("not run: there is no pyproject.toml here")
        for group, engine in (("vllm.general_plugins", "vllm"), ("sglang.srt.plugins", "sglang")):
            table = project.read_text().partition(f'[project.entry-points."{group}"]')[2].partition("\n[")[0]
            self.assertIn(f'vramctl = "vramctl.engines.{engine}:install"', table)
            self.assertTrue(callable(importlib.import_module(f"vramctl.engines.{engine}").install))


class Documentation(unittest.TestCase):
    def test_it_has_the_tables_of_the_code(self):
        """`scripts/test-engines-contract --write` writes them."""
        page = ROOT.parent / "docs" / "engines.md"
        if not page.is_file():
            self.skipTest("not run: there is no docs/engines.md here")
        engines = importlib.import_module("vramctl.engines")
        for name in ("sglang", "vllm"):
            for hook in importlib.import_module(f"vramctl.engines.{name}").HOOKS:
                row = [line for line in page.read_text().splitlines() if line.startswith(f"| {hook.what} | ")]
                self.assertEqual(len(row), int(hook.through != engines.READ), hook.what)
                for place in hook.places if row else ():
                    self.assertIn(f"`{place.path}`", row[0])
                self.assertTrue(not row or row[0].endswith(f" | {hook.without} |"), hook.what)


class Guard(unittest.TestCase):
    """Failures in our code do not reach the engine."""

    def setUp(self):
        self.engines = importlib.import_module("vramctl.engines")
        self.addCleanup(self.engines._said.clear)
        self.calls = []

    def original(self, value):
        self.calls.append(value)
        return value * 2

    def run_with(self, around, original=None):
        return self.engines.guarded(around)(original or self.original, 21)

    def test_before_the_original(self):
        def around(original, value):
            raise KeyError("ours")

        with self.assertLogs("vramctl", "WARNING") as logs:
            self.assertEqual([self.run_with(around) for _ in range(3)], [42, 42, 42])
        self.assertEqual(self.calls, [21, 21, 21])
        self.assertEqual(len(logs.output), 1)
        self.assertIn("original runs without vramctl", logs.output[0])
        self.assertIn("KeyError: 'ours'", logs.output[0])

    def test_behind_the_original(self):
        def around(original, value):
            original(value)
            raise KeyError("ours")

        with self.assertLogs("vramctl", "WARNING"):
            self.assertEqual(self.run_with(around), 42)
        self.assertEqual(self.calls, [21], "it is not called again")

    def test_what_the_original_raises_is_its_own(self):
        def fails(value):
            self.calls.append(value)
            raise error

        def plain(original, value):
            return original(value)

        def failing_too(original, value):
            try:
                return original(value)
            finally:
                raise KeyError("ours")

        for error in (ValueError("theirs"), KeyboardInterrupt()):
            for around in (plain, failing_too):
                self.calls.clear()
                with self.assertRaises(type(error)) as raised:
                    self.run_with(around, fails)
                self.assertIs(raised.exception, error)
                self.assertEqual(self.calls, [21])


class Announcing(unittest.TestCase):
    def test_without_the_library_nothing_is_said_and_nothing_fails(self):
        importlib.import_module("vramctl.engines").announce("vllm", tags_cache=True)


if __name__ == "__main__":
    unittest.main()
