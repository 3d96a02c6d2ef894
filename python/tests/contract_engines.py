"""Checks the tables of `vramctl.engines` and `vramctl.frameworks` against released sources (scripts/test-engines-contract).

The adapters run against stubs generated from those sources: the same classes, functions and signatures, with functions that
only allocate. The interfaces themselves are not stubbed: SGLang's plugins and memory-saver adapter, vLLM's registry of
sleep-mode backends. verl's functions and engine are not stubbed either: the tests of its adapter run on the released ones.
"""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib
import importlib.metadata
import inspect
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
import zipfile
from pathlib import Path
from typing import Any
from unittest import mock

import test_engines
import test_verl
import vramctl
from contract_features import FEATURES, feature_arguments
from vramctl import engines
from vramctl.engines import Hook, Place, sglang, vllm
from vramctl.frameworks import verl

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "engines.md"
#: Downloaded sources are cached here.
CACHE = ROOT / "target" / "engine-sources"

#: The versions to check, besides the latest. The oldest are those that verl 0.9 requires.
VERSIONS = {
    "sglang": ["0.5.12", "0.5.16", "0.5.18", "0.5.20"],
    "vllm": ["0.24.0", "0.26.0", "0.28.0", "0.31.0"],
    "verl": ["0.8.0", "0.9.0", "0.9.1"],
}
HOOKS = {"sglang": sglang.HOOKS, "vllm": vllm.HOOKS, "verl": verl.HOOKS}
TITLES = {"sglang": "SGLang", "vllm": "vLLM", "verl": "verl"}

#: Device memory of caches that SGLang allocates outside its regions; some is cache, the rest describes it. So the adapter does not say that
#: all of the cache is tagged, and `default` is protected, too. `KvVmmBufferOwner` is a view of the arena, which is tagged.
OUTSIDE_REGIONS = {
    "CompressStatePool._alloc_kv_score_buffer",
    "DSATokenToKVPool._create_index_buffers",
    "DeepSeekV4TokenToKVPool.__init__",
    "FlexibleKVCacheMemoryPool.__init__",
    "IndexKeyCache.__init__",
    "Int8CheckpointStore.__init__",
    "KvVmmBufferOwner.__init__",
    "LayerSplitDSATokenToKVPool._create_index_buffers",
    "LayerSplitIndexKeyCache.__init__",
    "MambaCheckpointPool.__init__",
    "MiniMaxM3Nvfp4IndexKPool.__init__",
    "MiniMaxM3Nvfp4MainKVPool.__init__",
    "NSATokenToKVPool.__init__",
    "PageInterleaveKVPoolMixin._init_page_shard_state",
    "RadixCache.reset",
    "RequestWindow.__init__",
    "UnifiedRadixCache._reset_full",
}


# ---- the sources ----


def pip(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "pip", *arguments], capture_output=True, text=True, check=False)


def latest(package: str) -> str | None:
    """The latest version; None without a package index."""
    asked = pip(
        "install",
        "--retries=1",
        "--timeout=15",
        "--dry-run",
        "--quiet",
        "--no-deps",
        "--ignore-installed",
        "--only-binary=:all:",
        "--report=-",
        package,
    )
    return json.loads(asked.stdout)["install"][0]["metadata"]["version"] if asked.returncode == 0 else None


def sources(package: str, version: str) -> Path:
    """A folder with the Python files of the wheel."""
    folder = CACHE / f"{package}-{version}"
    if not folder.exists():
        with tempfile.TemporaryDirectory() as work:
            print(f"downloading {package} {version}", file=sys.stderr)
            done = pip(
                "download", "--quiet", "--no-deps", "--only-binary=:all:", "--no-cache-dir", "-d", work, f"{package}=={version}"
            )
            if done.returncode != 0:
                sys.exit(f"{package} {version} cannot be downloaded:\n{done.stderr}")
            (wheel,) = Path(work).glob("*.whl")
            half = folder.with_suffix(".half")
            shutil.rmtree(half, ignore_errors=True)
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(half, [name for name in archive.namelist() if name.endswith(".py")])
            half.rename(folder)
    return folder


class Sources:
    """The modules of one version of an engine."""

    def __init__(self, package: str, version: str) -> None:
        self.package, self.version = package, version
        self.folder = sources(package, version)
        self.trees: dict[Path, ast.Module] = {}

    def file(self, module: str) -> Path | None:
        """A module's path inside the folder."""
        inside = Path(*module.split("."))
        for file in (inside.with_suffix(".py"), inside / "__init__.py"):
            if (self.folder / file).exists():
                return file
        return None

    def text(self, module: str) -> str:
        return (self.folder / self.path(module)).read_text()

    def tree(self, file: Path) -> ast.Module:
        if file not in self.trees:
            self.trees[file] = ast.parse((self.folder / file).read_text())
        return self.trees[file]

    def node(self, module: str, path: str) -> Any:
        """The definition at this path of a module, if any."""
        file = self.file(module)
        node: Any = self.tree(file) if file else None
        for part in path.split("."):
            node = member(node, part)
        return node

    def defines(self, place: Place) -> bool:
        return self.node(place.module, place.path) is not None

    def source(self, module: str, path: str) -> str:
        """The source of a class or function."""
        return ast.unparse(self.node(module, path))

    def stub(self, module: str, *names: str) -> str:
        """A module with these classes, functions and variables. Each function allocates something with its own name."""
        found = [self.node(module, name) for name in names]
        bodies = [ast.unparse(skeleton(node, node.name if hasattr(node, "name") else "")) for node in found if node]
        return "\n".join(["from __future__ import annotations", "import torch", *bodies])

    def matches(self, pattern: str) -> dict[str, set[str]]:
        """What the pattern's group matches in all sources, by file below the package."""
        inside = self.folder / self.package
        found = (
            (str(file.relative_to(inside)), set(re.findall(pattern, file.read_text(errors="replace"))))
            for file in inside.rglob("*.py")
        )
        matched = {file: matches for file, matches in found if matches}
        assert matched, f"nothing in {inside} matches {pattern}: is this check still looking?"
        return matched

    def caches_outside_regions(self) -> set[str]:
        """The functions that keep device memory in a pool of SGLang's, outside its memory saver's regions."""
        found: set[str] = set()

        def look(node: ast.AST, path: list[str], inside: bool) -> None:
            for child in ast.iter_child_nodes(node):
                named = isinstance(child, (ast.ClassDef, ast.FunctionDef))
                there = [*path, child.name] if isinstance(child, (ast.ClassDef, ast.FunctionDef)) else path
                enters = isinstance(child, ast.With) and any(".region(" in ast.unparse(one) for one in child.items)
                kept = isinstance(child, ast.Assign) and any(ast.unparse(one).startswith("self.") for one in child.targets)
                if (
                    kept
                    and not inside
                    and re.search("Pool|Store|Cache|Arena|Owner|Window", path[0])
                    and "Allocator" not in path[0]
                ):
                    found.update(".".join(path) for call in ast.walk(child) if allocates(call))
                if named or not isinstance(child, ast.expr):
                    look(child, there, inside or enters)

        for file in (self.folder / self.package / "srt/mem_cache").rglob("*.py"):
            if "host" not in str(file.relative_to(self.folder)):
                look(ast.parse(file.read_text()), [], False)
        return found

    def whole(self, *modules: str) -> dict[str, str]:
        """Modules with their full source."""
        return {self.path(module): self.text(module) for module in modules}

    def path(self, module: str) -> str:
        file = self.file(module)
        assert file is not None, f"{self.package} {self.version} has no {module}"
        return str(file)


def allocates(node: ast.AST) -> bool:
    """Whether this is a call of torch that allocates device memory."""
    if not isinstance(node, ast.Call) or not re.fullmatch(r"torch\.(zeros|empty|full|ones)(_like)?", ast.unparse(node.func)):
        return False
    devices = [ast.unparse(keyword.value) for keyword in node.keywords if keyword.arg == "device"]
    return bool(devices) and "cpu" not in devices[0]


def member(node: Any, name: str) -> Any:
    """A class, function or variable defined directly in a module or class."""
    for child in getattr(node, "body", []):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef)) and child.name == name:
            return child
        targets = child.targets if isinstance(child, ast.Assign) else [child.target] if isinstance(child, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            return child
    return None


def parameters(node: ast.FunctionDef) -> dict[str, Any]:
    """Names and defaults of a function in the release."""
    given = node.args.posonlyargs + node.args.args
    defaults = [inspect.Parameter.empty] * (len(given) - len(node.args.defaults)) + [
        ast.literal_eval(default) if isinstance(default, ast.Constant) else ... for default in node.args.defaults
    ]
    found = dict(zip((argument.arg for argument in given), defaults))
    for argument, default in zip(node.args.kwonlyargs, node.args.kw_defaults):
        found[argument.arg] = inspect.Parameter.empty if default is None else ast.literal_eval(default)
    return found


def skeleton(node: Any, name: str) -> Any:
    """A copy without bodies, decorators and defaults."""
    if isinstance(node, ast.ClassDef):
        body = [
            skeleton(child, f"{name}.{child.name}") if isinstance(child, ast.FunctionDef) else child
            for child in node.body
            if isinstance(child, ast.FunctionDef)
            or (isinstance(child, ast.AnnAssign) and isinstance(child.value, ast.Constant))
        ]
        return ast.ClassDef(name, [], [], body or [ast.Pass()], [])
    if isinstance(node, ast.FunctionDef):
        allocate = f"torch.zeros({name!r})"
        returned = allocate if node.name == "__init__" else f"return {allocate}"
        plain: list[ast.expr] = [
            one for one in node.decorator_list if isinstance(one, ast.Name) and one.id in ("staticmethod", "classmethod")
        ]
        arguments = copy.deepcopy(node.args)
        none = ast.Constant(None)
        arguments.defaults = [none for _ in arguments.defaults]
        arguments.kw_defaults = [none if default else None for default in arguments.kw_defaults]
        return ast.fix_missing_locations(ast.FunctionDef(node.name, arguments, ast.parse(returned).body, plain, lineno=1))
    return node


# ---- versions ----


def order(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version.partition(".post")[0])[:3])


def claimed(place: Place, version: str) -> bool:
    """Whether the table claims the place for this version. A two-number bound covers the whole minor version."""

    def cut(bound: str) -> tuple[int, ...]:
        return order(version)[: len(order(bound))]

    return cut(place.since) >= order(place.since) and (place.until is None or cut(place.until) <= order(place.until))


# ---- the checks ----


class Contract(test_engines.Engine):
    """One version of an engine."""

    def __init__(self, found: Sources, is_newest: bool) -> None:
        super().__init__("check")
        self.found, self.is_newest = found, is_newest

    def __str__(self) -> str:
        return f"{TITLES[self.found.package]} {self.found.version}"

    def check(self) -> None:
        for hook in HOOKS[self.found.package]:
            for place in hook.places:
                with self.subTest(place.name):
                    says = "has" if claimed(place, self.found.version) else "has not"
                    is_so = "has" if self.found.defines(place) else "has not"
                    self.assertEqual(is_so, says, "the table is wrong")
        getattr(self, self.found.package)()

    def takes_what_features_set(self, patterns: list[str]) -> None:
        """The newest version has the arguments of scripts/gpu-engines --part features: fields of the classes in these files."""
        if not self.is_newest:
            return
        inside = self.found.folder / self.found.package
        files = [file for pattern in patterns for file in inside.glob(pattern)]
        trees = [self.found.tree(file.relative_to(self.found.folder)) for file in files]
        known = {
            field.target.id
            for tree in trees
            for node in ast.walk(tree)
            if isinstance(node, ast.ClassDef)
            for field in node.body
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        }
        for name in FEATURES:
            with self.subTest("features", feature=name):
                self.assertLessEqual(set(feature_arguments(self.found.package, name)), known)

    def start(self, files: dict[str, str]) -> Any:
        """Imports the engine and installs our hooks as under `vramctl run`, without a warning."""
        package = self.found.package
        with self.assertNoLogs("vramctl", "WARNING"):
            return self.engine({f"{package}/__init__.py": f"__version__ = {self.found.version!r}", **files}, package)

    def allocated(self, function: Any, *arguments: Any) -> str | None:
        """Calls a stub, with None for each required argument, and returns the tag of its allocation."""
        wanted = list(inspect.signature(function).parameters.values())[len(arguments) :]
        missing = [one for one in wanted if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD]
        named = {one.name: None for one in wanted if one.default is one.empty and one.kind is one.KEYWORD_ONLY}
        before = len(self.gpu.allocations)
        function(*arguments, *[None for _ in missing], **named)
        (one,) = self.gpu.allocations[before:]
        tag: str | None = one["tag"]
        return tag

    def takes_the_same(self, module: str, name: str, ours: Any) -> None:
        """Each public method of a class can be called here with what it can be called with there."""
        for node in self.found.node(module, name).body:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                here = inspect.signature(inspect.unwrap(getattr(ours, node.name))).parameters
                for parameter, default in parameters(node).items():
                    if parameter not in ("self", "cls"):
                        with self.subTest(f"{name}.{node.name}", parameter=parameter):
                            self.assertIn(parameter, here)
                            if default is not inspect.Parameter.empty:
                                self.assertIsNot(here[parameter].default, inspect.Parameter.empty, "it has a default there")

    # SGLang

    def sglang(self) -> None:
        self.takes_what_features_set(["srt/server_args.py", "srt/arg_groups/fields/*.py"])
        found = self.found
        outside = found.caches_outside_regions()
        self.assertTrue(outside, "is this check still looking?")
        self.assertLessEqual(outside, OUTSIDE_REGIONS, "somebody else keeps a cache outside of regions")
        reads = set().union(*found.matches(r"\b(?:server_args|get_server_args\(\)|cfg)\.(enable_memory_saver)\b").values())
        self.assertEqual(reads, {"enable_memory_saver"}, "SGLang reads the setting where we do")
        (default,) = {
            ast.literal_eval(node.value)
            for place in sglang.SETTINGS.places
            if place.path.endswith(".enable_memory_saver")
            and isinstance(node := found.node(place.module, place.path), ast.AnnAssign)
            if node.value is not None
        }
        self.assertIs(default, False)
        saver_module = "sglang.srt.utils.torch_memory_saver_adapter"
        regions_take = [
            list(parameters(node))[1]
            for node in ast.walk(found.tree(Path(found.path(saver_module))))
            if isinstance(node, ast.FunctionDef) and node.name == "region"
        ]
        self.assertEqual(set(regions_take), {"tag"}, "the first argument of a region")
        tags = set().union(*found.matches(r"\bGPU_MEMORY_TYPE_\w+ = \"(\w+)\"").values())
        self.assertLessEqual(tags, {"weights", "kv_cache", "cuda_graph"}, "a tag that nobody knows here")
        regions = set().union(*found.matches(r"memory_saver\w*\.region\(\s*(?:tag=)?(\w+)").values())
        self.assertLessEqual(
            regions, {"tag", "GPU_MEMORY_TYPE_KV_CACHE", "GPU_MEMORY_TYPE_WEIGHTS", "GPU_MEMORY_TYPE_CUDA_GRAPH"}
        )
        self.assertIn('GENERAL_PLUGINS_GROUP = "sglang.srt.plugins"', found.text("sglang.srt.plugins"))
        arena = sglang.ARENA.places[0]
        files = {
            **found.whole(
                "sglang.srt.plugins", "sglang.srt.plugins.hook_registry", "sglang.srt.utils.torch_memory_saver_adapter"
            ),
            **self.sglang_settings(),
            **({found.path(arena.module): found.stub(arena.module, "KvVmmArena")} if found.defines(arena) else {}),
            "sglang/srt/utils/common.py": "def is_xpu(): return False",
            "sglang/srt/environ.py": "class _Unset:\n    def get(self): ...\n"
            "class envs: SGLANG_PLUGINS = SGLANG_PLATFORM = _Unset()",
        }
        saver: Any = types.ModuleType("torch_memory_saver")
        regions: list[str] = []
        saver.torch_memory_saver = types.SimpleNamespace(enabled=True, region=lambda **how: regions.append(how["tag"]))
        plugin = mock.Mock(value="vramctl.engines.sglang:install", dist=None)
        plugin.name = "vramctl"
        with (
            mock.patch.dict(sys.modules, {"torch_memory_saver": saver}),
            mock.patch.object(
                importlib.metadata, "entry_points", lambda group: [plugin] if group == "sglang.srt.plugins" else []
            ),
        ):
            ours = self.start(files)
            plugin.load = lambda: ours.install
            with self.assertNoLogs("vramctl", "WARNING"):
                importlib.import_module("sglang.srt.plugins").load_plugins()
            registry = importlib.import_module("sglang.srt.plugins.hook_registry").HookRegistry
            self.assertEqual(
                {len(hooks) for hooks in registry._hooks.values()}, {1}, "as a plugin and at the import: once each"
            )
            self.assertEqual(len(registry._patched), 1)
            self.sglang_runs(regions)

    def sglang_settings(self) -> dict[str, str]:
        """What the engine's settings are read from."""
        found, context, before = self.found, "sglang.srt.runtime_context", "sglang.srt.server_args"
        if found.file(context) is None:
            functions = [
                found.source(before, f"{name}_global_server_args{of}") for name, of in (("set", "_for_scheduler"), ("get", ""))
            ]
            return {
                found.path(before): "\n".join(["from __future__ import annotations", "_global_server_args = None", *functions])
            }
        parts = [
            "from __future__ import annotations\nclass RuntimeContext:\n    _server_args = None",
            textwrap.indent(found.source(context, "RuntimeContext.server_args"), "    "),
            "_CONTEXT = RuntimeContext()",
            found.source(context, "get_server_args"),
            "def set_global_server_args_for_scheduler(args): _CONTEXT._server_args = args",
        ]
        return {found.path(context): "\n".join(parts)}

    def sglang_runs(self, regions: list[str]) -> None:
        create = importlib.import_module("sglang.srt.utils.torch_memory_saver_adapter").TorchMemorySaverAdapter.create
        settings = importlib.import_module(next(iter(self.sglang_settings())).removesuffix(".py").replace("/", "."))
        with self.assertNoLogs("vramctl", "WARNING"):
            with create(enable=False).region("weights"):
                self.gpu.allocate("no engine yet")
            settings.set_global_server_args_for_scheduler(types.SimpleNamespace(enable_memory_saver=False))
            off = create(enable=False)
            with off.region("weights", enable_cpu_backup=True):
                self.gpu.allocate("weights")
            with off.region(tag="kv_cache"):
                self.gpu.allocate("KV cache")
            self.assertFalse(off.enabled)
            with self.gpu.torch.cuda.graph(self.gpu.torch.cuda.CUDAGraph(), pool="graphs"):
                pass
            if self.found.defines(sglang.ARENA.places[0]):
                self.assertEqual(self.allocated(self.function(sglang.ARENA.places[0]), mock.Mock()), "kv_cache")
            settings.set_global_server_args_for_scheduler(types.SimpleNamespace(enable_memory_saver=True))
            create(enable=True).region("weights")
        tags = self.gpu.tags()
        wanted = {
            "no engine yet": "default",
            "weights": "weights",
            "KV cache": "kv_cache",
            "graph": "cuda_graph",
        }
        self.assertEqual({what: tags[what] for what in wanted}, wanted)
        self.assertEqual(regions, ["weights"], "SGLang's own memory saver takes precedence")

    # vLLM

    def vllm_sources(self) -> None:
        """What we rely on without hooking it."""
        found = self.found
        tags = found.matches(r"(?:use_memory_pool|_maybe_get_memory_pool_context)\(\s*(?:tag=)?\"(\w+)\"")
        self.assertLessEqual(
            set().union(*tags.values()), {"weights", "kv_cache", "runtime", "workspace"}, "a tag that nobody knows here"
        )
        callers = found.matches(r"(?<!def )\b_?(allocate_kv_cache)(?:_tensors)?\(")
        known = {"v1/worker/gpu_model_runner.py", "v1/worker/gpu/attn_utils.py", "v1/worker/utils.py", "v1/hisparse/binding.py"}
        self.assertLessEqual(set(callers), known, "somebody else allocates a KV cache")
        users = {
            file: used
            for file, used in found.matches(r"\bCuMemAllocator\.(instance\.\w+|\w+)\(").items()
            if not file.startswith("device_allocator/")
        }
        self.assertLessEqual(set().union(*users.values()), {"instance.release_pools", "get_instance"}, users)
        worker = "vllm.v1.worker.gpu_worker"
        self.assertEqual(list(parameters(found.node(worker, vllm.WEIGHTS.places[0].path))), ["self", "tag"])
        (load,) = [node for node in found.node(worker, "Worker.load_model").body if isinstance(node, ast.With)]
        self.assertIn("self._maybe_get_memory_pool_context(tag='weights')", ast.unparse(load.items[0]))
        self.assertIn("self.model_runner.load_model(", ast.unparse(load), "the model is loaded in there")
        to_sleep, to_wake = (found.source(worker, f"Worker.{name}") for name in ("sleep", "wake_up"))
        if "unregister_kv_caches()" in to_sleep:
            self.assertLess(
                to_sleep.index("unregister_kv_caches()"), to_sleep.index(".suspend("), "before our backend is called"
            )
            self.assertIn("restore_kv_caches()", to_wake, "what our backend calls if it fails")
        sleep = found.source("vllm.v1.engine.core", "EngineCore.sleep")
        self.assertIn("prefix_cache", sleep, "a sleep that drops the KV cache forgets its prefix cache")

    def vllm(self) -> None:
        self.takes_what_features_set(["engine/arg_utils.py"])
        self.vllm_sources()
        found = self.found
        self.assertIn('DEFAULT_PLUGINS_GROUP = "vllm.general_plugins"', found.text("vllm.plugins"))
        allocators = "vllm.device_allocator"
        files = {
            **(found.whole(vllm.BACKENDS) if found.file(vllm.BACKENDS) is not None else {}),
            "vllm/logger.py": "import logging\ninit_logger = logging.getLogger",
            "vllm/platforms.py": "class current_platform:\n    is_cuda_alike = staticmethod(lambda: True)",
            found.path(allocators): found.stub(allocators, "DEFERRABLE_TAGS")
            + "\nfrom vllm.platforms import current_platform\n"
            + found.source(allocators, "get_mem_allocator_instance"),
            found.path(vllm.CUMEM): found.stub(vllm.CUMEM, "CuMemAllocator") + "\ncumem_available = False",
        }
        for hook in HOOKS["vllm"]:
            for place in hook.places:
                if hook.around is not None and found.defines(place):
                    files[found.path(place.module)] = found.stub(place.module, place.path.split(".")[0])
        ours = self.start(files)
        self.addCleanup(setattr, ours.Allocator, "instance", None)
        with self.assertNoLogs("vramctl", "WARNING"):
            self.vllm_from_outside()
            self.vllm_asleep(ours)

    def function(self, place: Place) -> Any:
        found: Any = importlib.import_module(place.module)
        for part in place.path.split("."):
            found = getattr(found, part)
        return found

    def vllm_from_outside(self) -> None:
        worker = mock.Mock(vllm_config=test_engines.vllm_config())
        with self.function(vllm.WEIGHTS.places[0])(worker, tag="weights"):
            self.gpu.allocate("weights")
        self.assertEqual(self.gpu.tags()["weights"], "weights")
        theirs = self.gpu.torch.cuda.MemPool()
        for place in vllm.KV_CACHE.places:
            if self.found.defines(place):
                self.assertEqual(self.allocated(self.function(place)), "kv_cache", place.name)
                for self.gpu.last_pool_wins in (False, True):
                    with test_engines.connector_with(theirs), self.gpu.torch.cuda.use_mem_pool(theirs):
                        self.assertIsNone(self.allocated(self.function(place)), "in a connector's pool, it is left alone")
                    self.assertEqual(self.gpu.allocations[-1]["pool"], theirs.id)

    def vllm_asleep(self, ours: Any) -> None:
        worker = mock.Mock(vllm_config=test_engines.vllm_config(sleep=True))
        worker.vllm_config.model_config.sleep_mode_backend = "vramctl"
        self.assertEqual(self.allocated(self.function(vllm.WEIGHTS.places[0]), worker, "weights"), "default")
        self.takes_the_same(vllm.CUMEM, "CuMemAllocator", ours.Allocator)
        # Memory comes from the pools that vLLM asks for.
        allocator = importlib.import_module("vllm.device_allocator").get_mem_allocator_instance()
        self.assertIsInstance(allocator, ours.Allocator)
        for tag in ("weights", "kv_cache"):
            with allocator.use_memory_pool(tag=tag):
                self.gpu.allocate(f"{tag} of sleep mode")
        if self.found.file(vllm.BACKENDS) is None:
            allocator.sleep(("weights",))
            self.assertEqual(self.gpu.contents()["weights of sleep mode"], ("paused", "kept"))
            self.assertEqual(self.gpu.contents()["kv_cache of sleep mode"], ("paused", "discarded"))
            allocator.wake_up()
            self.assertEqual(self.gpu.contents()["weights of sleep mode"], ("active", "here"))
            return
        factory = importlib.import_module(vllm.BACKENDS).SleepModeBackendFactory
        self.takes_the_same(vllm.BACKENDS, "SleepModeBackend", ours.Backend)
        for name in ("cumem", "vramctl"):
            with self.subTest(backend=name):
                backend = factory.create_backend(types.SimpleNamespace(sleep_mode_backend=name))
                with test_engines.connector_with(None) as connector, self.assertRaises(vramctl.errors.HostMemory):
                    self.gpu.host_memory = False
                    backend.suspend(1)
                self.gpu.host_memory = True
                connector.restore_kv_caches.assert_called_once_with()
                backend.suspend(1)
                states = self.gpu.contents()
                self.assertEqual(states["weights of sleep mode"], ("paused", "kept"))
                self.assertEqual(states["kv_cache of sleep mode"], ("paused", "discarded"))
                backend.resume(["weights"])
                self.assertEqual(self.gpu.contents()["weights of sleep mode"], ("active", "here"))
                self.assertEqual(self.gpu.contents()["kv_cache of sleep mode"][0], "paused")
                backend.resume(None)
                self.assertEqual(self.gpu.contents()["kv_cache of sleep mode"][0], "active")
                if hasattr(factory.get_backend_class("cumem"), "discard"):
                    backend.discard(("kv_cache",))
                    self.assertEqual(self.gpu.contents()["kv_cache of sleep mode"], ("paused", "discarded"))
                    backend.resume(None)

    # verl

    def verl(self) -> None:
        self.verl_sources()
        suite = unittest.TestSuite()
        for scenario in (
            test_verl.Steps,
            test_verl.StepsOfFsdp1,
            test_verl.Export,
            test_verl.ExportOfFsdp1,
            test_verl.Copies,
            test_verl.CopiesOfFsdp1,
            test_verl.Checkpoints,
            test_verl.Fallbacks,
        ):
            copies = self.found.defines(
                next(place for place in verl.COPY.places if f"fsdp{scenario.module.version}_" in place.path)
            )
            released = {
                "sources": lambda _: self.verl_files(),
                "has_shards": self.found.defines(verl.EXPORT.places[1]),
                "copies": copies,
            }
            suite.addTests(unittest.defaultTestLoader.loadTestsFromTestCase(type(scenario.__name__, (scenario,), released)))
        ran = unittest.TextTestRunner(stream=io.StringIO()).run(suite)
        self.assertGreater(ran.testsRun, 30)
        for test, trace in [*ran.errors, *ran.failures]:
            with self.subTest(str(test)):
                self.fail(trace)

    def verl_sources(self) -> None:
        """What we rely on without hooking it."""
        found = self.found
        names = [place.path for hook in (verl.OFFLOAD, verl.LOAD) for place in hook.places]
        callers = set(found.matches(rf"(?<!def )\b({'|'.join(names)})\("))
        known = {"workers/engine/fsdp/transformer_impl.py", "workers/engine/torchtitan/transformer_impl.py"}
        self.assertLessEqual(callers, known | {"utils/fsdp_utils.py"}, "somebody else moves the trainer's state")
        imported = re.search(rf"from {verl.MOVES} import \(([^)]*)\)", found.text(verl.ENGINE))
        assert imported is not None
        self.assertLessEqual(set(names), set(re.findall(r"\w+", imported[1])))
        arguments = {name: [one.arg for one in found.node(verl.MOVES, name).args.args] for name in names}
        self.assertEqual(
            arguments,
            {
                "offload_fsdp_model_to_cpu": ["model", "empty_cache"],
                "offload_fsdp_optimizer": ["optimizer"],
                "load_fsdp_model_to_gpu": ["model"],
                "load_fsdp_optimizer": ["optimizer", "device_id"],
            },
        )
        batch = found.node(verl.ENGINE, "FSDPEngine.forward_backward_batch").args.args
        self.assertEqual(
            [one.arg for one in batch],
            ["self", "data", "loss_function", "forward_only"],
            "scripts/bench verl tells phases by it",
        )
        self.assertIsNotNone(found.node(verl.ENGINE, "FSDPEngine.optimizer_step"))
        for name in ("offload_fsdp_model_to_cpu", "load_fsdp_model_to_gpu"):
            self.assertIn("_lazy_init(model, model)", found.source(verl.MOVES, name))
        settings = found.source("verl.workers.config.model", "HFModelConfig.__post_init__")
        self.assertIn("import_external_libs(self.external_lib)", settings)
        build = found.source(verl.ENGINE, "FSDPEngine._build_model_optimizer")
        for name in ("module", "optimizer"):
            self.assertIn(f"self.{name} = {name}", build)
        # Gradients are free before the parameters are offloaded.
        ends = found.source(verl.ENGINE, "EngineTrainModeCtx.__exit__")
        self.assertLess(ends.index("optimizer_zero_grad()"), ends.index("super().__exit__"))
        # Buckets are made while weights are sent, outside of any of our regions.
        sender = found.source("verl.workers.rollout.vllm_rollout.bucketed_weight_transfer", "BucketedWeightSender._init_buffer")
        self.assertIn("torch.empty(", sender)

    def verl_files(self) -> dict[str, str]:
        """The released functions that move the state, and the engine's methods that call them."""
        found = self.found
        moves = [
            *("fsdp_version", "offload_fsdp_model_to_cpu", "offload_fsdp2_model_to_cpu", "load_fsdp_model_to_gpu"),
            *("load_fsdp2_model_to_gpu", "offload_fsdp_optimizer", "load_fsdp_optimizer"),
            *(place.path for place in verl.COPY.places if found.defines(place)),
        ]
        methods = [
            *(
                "is_param_offload_enabled",
                "is_optimizer_offload_enabled",
                "initialize",
                "to",
                "save_checkpoint",
                "load_checkpoint",
            ),
            *("get_per_tensor_param", "get_per_tensor_param_shard"),
        ]
        there = [name for name in methods if found.node(verl.ENGINE, f"FSDPEngine.{name}") is not None]
        engine = [textwrap.indent(found.source(verl.ENGINE, f"FSDPEngine.{name}"), "    ") for name in there]
        return {
            **test_verl.VERL,
            "verl/__init__.py": f"__version__ = {found.version!r}",
            found.path(verl.MOVES): "\n".join([VERL_MOVES, *(self.counted(name) for name in moves)]),
            found.path(verl.ENGINE): "\n".join([VERL_ENGINE, *engine]),
        }

    def counted(self, name: str) -> str:
        """A function that also writes down that it moves something."""
        node = copy.deepcopy(self.found.node(verl.MOVES, name))
        counted = re.fullmatch(r"(offload|load)_fsdp_(model|optimizer)(_to_.pu)?", name)
        if counted:
            # An optimizer without state returns first.
            place = next(
                (number for number, one in enumerate(node.body, 1) if isinstance(one, ast.If) and counted[2] == "optimizer"), 0
            )
            node.body[place:place] = ast.parse(f"calls.append('{counted[1]} {counted[2]}')").body
        return ast.unparse(node)


#: What verl's functions use of torch and of itself.
VERL_MOVES = """
from __future__ import annotations
import torch
dist = torch.distributed
from typing import Optional
from test_verl import DTensor, lazy_init as _lazy_init
class Version(type):
    def __instancecheck__(cls, one): return one.version == cls.number
class FSDP(metaclass=Version): number = 1
class FSDPModule(metaclass=Version): number = 2
calls = []
get_torch_device = lambda: torch.cuda
get_device_id = get_device_name = lambda: "cuda"
"""
VERL_ENGINE = """
import gc
import logging
import torch
from typing import *
from test_verl import DTensor, CheckpointManager as FSDPCheckpointManager
from verl.utils.fsdp_utils import *
logger = logging.getLogger("verl")
log_gpu_memory_usage = lambda *_, **__: None
get_device_id = get_device_name = lambda: "cuda"
convert_weight_keys = lambda params, model: params
unfuse_moe_params = lambda params, model_type: params
class BaseEngine:
    def to(self, **_): ...
class FSDPEngine(BaseEngine):
    def _build_model_optimizer(self):
        self.module, self.optimizer = self.build()
        if self.engine_config.forward_only: self.optimizer = None
"""


# ---- the tables for the documentation ----


def table(package: str, versions: list[str], found: dict[str, Sources]) -> str:
    """A row for each hook, a column for each version."""
    lines = [
        f"| {TITLES[package]}: vramctl … | hooked name | through | {' | '.join(versions)} | if missing |",
        f"| --- | --- | --- | {' | '.join(':-:' for _ in versions)} | --- |",
    ]
    for hook in HOOKS[package]:
        if hook.through != engines.READ:
            has = ["yes" if any(map(found[version].defines, hook.places)) else "no" for version in versions]
            lines.append(f"| {' | '.join([hook.what, ', '.join(names(hook)), hook.through, *has, hook.without])} |")
    return "\n".join(lines)


def names(hook: Hook) -> list[str]:
    """The names of a hook's places, with versions if they differ."""
    differ = len({(place.since, place.until) for place in hook.places}) > 1

    def versions(place: Place) -> str:
        return "" if not differ else f" (to {place.until})" if place.until else f" (from {place.since})"

    return [f"`{place.path}`{versions(place)}" for place in hook.places]


def write(text: str) -> None:
    begin, end = "<!-- scripts/test-engines-contract --write -->\n", "<!-- end -->"
    page = PAGE.read_text()
    before, _, rest = page.partition(begin)
    _, found, behind = rest.partition(end)
    assert found, f"{PAGE} has no place for the tables"
    PAGE.write_text(f"{before}{begin}{text}\n{end}{behind}")


def main() -> int:
    chosen = [one.partition("==") for one in sys.argv[1:] if not one.startswith("-")]
    versions: dict[str, list[str]] = {}
    for package, listed in VERSIONS.items():
        newest = latest(package)
        if newest is None:
            print(f"not run: no package index offers {package}")
            return 0
        only = [version for name, _, version in chosen if name == package]
        versions[package] = only if chosen else [*listed, *([] if newest in listed else [newest])]
    found = {package: {version: Sources(package, version) for version in all} for package, all in versions.items()}
    suite = unittest.TestSuite(
        Contract(one, one is list(engine.values())[-1]) for engine in found.values() for one in engine.values()
    )
    if not unittest.TextTestRunner(verbosity=2).run(suite).wasSuccessful():
        return 1
    text = "\n\n".join(table(package, versions[package], found[package]) for package in versions if versions[package])
    print(text)
    if "--write" in sys.argv[1:]:
        write(text)
    return 0


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(main())
