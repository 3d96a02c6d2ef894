"""The torch_memory_saver drop-in: its interface, its behaviour, and the internals that frameworks use.

Runs under `vramctl run`, as in scripts/test-python. Most tests allocate from the simulated GPU directly; those that need torch
and a GPU are skipped without them.
"""

from __future__ import annotations

import ctypes
import importlib.metadata
import inspect
import os
import re
import subprocess
import sys
import tempfile
import threading
import unittest
from pathlib import Path

import torch_memory_saver as package
from torch_memory_saver import TorchMemorySaver, configure_subprocess, torch_memory_saver

import vramctl
from support import MIB, Cuda, freed
from vramctl import errors

try:
    import torch

    HAS_GPU = torch.cuda.is_available()
except ImportError:
    HAS_GPU = False

TESTS = Path(__file__).resolve().parent
DROPIN = Path(package.__file__).resolve().parents[1]
HOOKS = [
    DROPIN / f"torch_memory_saver_hook_mode_{mode}{suffix}.abi3.so"
    for mode in ("preload", "torch")
    for suffix in ("", "_cu12", "_cu13")
]

needs_torch = unittest.skipUnless(HAS_GPU, "needs torch with a GPU")


def cdll() -> ctypes.CDLL:
    """The library, reached as frameworks do it."""
    torch_memory_saver._ensure_initialized()
    assert torch_memory_saver._impl is not None
    return torch_memory_saver._impl._binary_wrapper.cdll


def settings() -> tuple:
    """The calling thread's configuration: (tag, managed, in host memory, on disk)."""
    library = cdll()
    return (
        library.tms_get_current_tag().decode(),
        library.tms_get_interesting_region(),
        library.tms_get_enable_cpu_backup(),
        library.tms_get_enable_disk_backup(),
    )


def python(source: str, *, preload: str = "", arguments: tuple[str, ...] = (), **environment: str) -> str:
    """The output of a program that finds the package but does not run under `vramctl run`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("LD_PRELOAD", "TMS_"))}
    for name in ("VRAMCTL_TAG", "VRAMCTL_BACKUP", "VRAMCTL_RETAIN", "VRAMCTL_DISK_DIR"):
        kept.pop(name, None)
    # Keep PYTHONPATH: torch may be on it.
    kept["PYTHONPATH"] = os.pathsep.join([str(DROPIN), kept.get("PYTHONPATH", "")])
    if preload:
        kept["LD_PRELOAD"] = preload
    done = subprocess.run(
        [sys.executable, "-c", source, *arguments], env={**kept, **environment}, capture_output=True, text=True, timeout=300
    )
    if done.returncode != 0:
        raise AssertionError(f"exit code {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


class Surface(unittest.TestCase):
    """The names in 0.0.10."""

    def test_the_module_and_the_methods_are_those_of_0_0_10(self) -> None:
        self.assertIsInstance(torch_memory_saver, TorchMemorySaver)
        self.assertTrue(callable(configure_subprocess))
        wanted = {
            "region": {"tag": "default", "enable_cpu_backup": False, "enable_disk_backup": False, "cpu_backup_backend": None},
            "cuda_graph": {
                "cuda_graph": inspect.Parameter.empty,
                "pool": None,
                "stream": None,
                "capture_error_mode": "global",
                "tag": "default",
                "enable_cpu_backup": False,
                "cpu_backup_backend": None,
            },
            "disable": {},
            "pause": {"tag": None},
            "resume": {"tag": None},
            "get_cpu_backup": {"x": inspect.Parameter.empty, "zero_copy": False},
            "set_disk_backup_dir": {"path": inspect.Parameter.empty},
        }
        for name, parameters in wanted.items():
            found = inspect.signature(getattr(torch_memory_saver, name)).parameters
            self.assertEqual({key: value.default for key, value in found.items()}, parameters, name)
        for name in ("enabled", "hook_mode", "memory_margin_bytes", "retain_cpu_backup"):
            self.assertIsInstance(getattr(TorchMemorySaver, name), property)
        self.assertIs(torch_memory_saver.enabled, True)

    def test_frameworks_reach_the_c_functions_with_their_types(self) -> None:
        library = cdll()
        self.assertIsInstance(library.tms_get_interesting_region(), bool)
        self.assertIsInstance(library.tms_get_enable_cpu_backup(), bool)
        self.assertIsInstance(library.tms_get_enable_disk_backup(), bool)
        self.assertIsInstance(library.tms_get_retain_cpu_backup(), bool)
        self.assertIsInstance(library.tms_get_current_tag(), bytes)
        self.assertIn(library.tms_get_cpu_backup_backend(), (b"pinned", b"mmap"))
        self.assertEqual((library.tms_pause(b"nothing"), library.tms_resume(None)), (0, 0))
        nowhere = ctypes.cast(ctypes.c_void_p(4096), ctypes.POINTER(ctypes.c_uint8))
        self.assertFalse(library.tms_get_cpu_backup_pointer(nowhere, 1))
        for name in ("tms_set_disk_backup_dir", "set_memory_margin_bytes", "tms_torch_malloc", "tms_torch_free"):
            self.assertTrue(hasattr(library, name), name)

    def test_its_internals_are_there(self) -> None:
        """scripts/test-saver-contract compares all names with the release's."""
        from torch_memory_saver.binary_wrapper import BinaryWrapper
        from torch_memory_saver.hooks.base import HookUtilBase
        from torch_memory_saver.utils import _detect_cuda_major, change_env

        before = os.environ.get("LD_PRELOAD")
        for name in ("LD_PRELOAD", "VRAMCTL_TEST_NOBODY_SETS"):
            with self.assertRaises(KeyError), change_env(name, "inside"):
                self.assertEqual(os.environ[name], "inside")
                raise KeyError
        self.assertEqual((os.environ.get("LD_PRELOAD"), os.environ.get("VRAMCTL_TEST_NOBODY_SETS")), (before, None))
        util = HookUtilBase.create("preload")
        self.assertEqual((util.get_path_binary(), util.get_allocator()), (vramctl.library_path(), None))
        for named in ({"path_binary": util.get_path_binary()}, {"path": util.get_path_binary()}, {}):
            self.assertEqual(BinaryWrapper(**named).cdll.tms_pause(b"nothing"), 0)
        self.assertIn(_detect_cuda_major(), range(11, 20))
        cdll()
        assert torch_memory_saver._impl is not None
        self.assertEqual(torch_memory_saver._impl._hook_util.get_path_binary(), vramctl.library_path())
        with torch_memory_saver._impl._with_region_config("inner", True, "mmap"):
            self.assertEqual((settings(), cdll().tms_get_cpu_backup_backend()), (("inner", True, True, False), b"mmap"))

    def test_nothing_is_set_up_before_it_is_used(self) -> None:
        source = (
            "from torch_memory_saver import torch_memory_saver as saver; print(saver._impl, saver.enabled, saver.hook_mode)"
        )
        self.assertEqual(python(source), "None True preload\n")

    def test_the_distribution_s_version_satisfies_what_engines_ask_for(self) -> None:
        for name in ("torch_memory_saver", "torch-memory-saver"):
            version = importlib.metadata.version(name)
            # PEP 440: a local version sorts after its release.
            self.assertRegex(version, r"^\d+(\.\d+)*\+[a-z0-9]+(\.[a-z0-9]+)*$")
            release = tuple(map(int, version.partition("+")[0].split(".")))
            self.assertGreater(release, (0, 0, 9))
        beside = Path(str(importlib.metadata.distribution("torch-memory-saver").locate_file("")))
        self.assertEqual(beside.resolve(), DROPIN)
        try:
            from pip._vendor.packaging.specifiers import SpecifierSet
        except ImportError:
            self.skipTest("the installed pip has no packaging to ask; the version's form was checked")
        for wanted in (">=0.0.9.post1", ">=0.0.8", "==0.0.10"):
            self.assertIn(version, SpecifierSet(wanted))

    def test_the_package_needs_no_vramctl_on_the_path(self) -> None:
        source = "import torch_memory_saver, vramctl; print(vramctl.__file__)"
        with tempfile.TemporaryDirectory() as elsewhere:
            found = python(source, PYTHONPATH=str(DROPIN), HOME=elsewhere)
        self.assertEqual(Path(found.strip()).resolve(), DROPIN.parent / "__init__.py")

    def test_arguments_that_make_no_sense_are_refused(self) -> None:
        wrong = [
            {"enable_cpu_backup": True, "enable_disk_backup": True},
            {"cpu_backup_backend": "pinned"},
            {"enable_cpu_backup": True, "cpu_backup_backend": "tape"},
            {"tag": "a,b"},
        ]
        for arguments in wrong:
            with self.assertRaises(ValueError, msg=str(arguments)):
                with torch_memory_saver.region(**arguments):
                    self.fail("it was entered")
        with self.assertRaises(ValueError):
            torch_memory_saver.hook_mode = "other"  # type: ignore[assignment]
        # As the original's, which asserts it.
        with self.assertRaises(AssertionError), torch_memory_saver.region(enable_cpu_backup=True, enable_disk_backup=True):
            self.fail("it was entered")


class Memory(unittest.TestCase):
    """What happens to memory, through the public interface."""

    def setUp(self) -> None:
        self.runtime = Cuda()
        self.addresses: list[int] = []
        self.addCleanup(self.clean_up)

    def clean_up(self) -> None:
        vramctl.resume(timeout=None)
        for address in self.addresses:
            self.runtime.free(address)

    def malloc(self, size: int = 4 * MIB, byte: int = 7) -> int:
        address = self.runtime.malloc(size)
        self.addresses.append(address)
        self.runtime.write(address, bytes([byte]) * size)
        return address

    def policy(self, tag: str) -> dict:
        found = vramctl.status().tag(tag)
        return dict(found.backup) if found else {}

    def test_without_a_backup_contents_are_dropped_and_with_one_they_are_kept(self) -> None:
        with torch_memory_saver.region(tag="dropped"):
            dropped = self.malloc()
        with torch_memory_saver.region("kept", True):
            kept = self.malloc()
        with tempfile.TemporaryDirectory() as folder:
            torch_memory_saver.set_disk_backup_dir(os.path.join(folder, "made", "for it"))
            self.addCleanup(vramctl.set_disk_directory, None)
            with torch_memory_saver.region("on_disk", enable_disk_backup=True):
                on_disk = self.malloc()
            policies = [self.policy(tag) for tag in ("dropped", "kept", "on_disk")]
            self.assertEqual(policies, [{"discard": 4 * MIB}, {"host": 4 * MIB}, {"disk": 4 * MIB}])
            before = self.runtime.free_memory()
            torch_memory_saver.pause()
            self.assertGreaterEqual(self.runtime.free_memory() - before, freed(12 * MIB))
            torch_memory_saver.resume()
        self.assertEqual(self.runtime.read(dropped, 4 * MIB), bytes(4 * MIB))
        self.assertEqual(self.runtime.read(kept, 4 * MIB), b"\7" * (4 * MIB))
        self.assertEqual(self.runtime.read(on_disk, 4 * MIB), b"\7" * (4 * MIB))

    def test_a_resume_that_finds_too_little_memory_raises_and_can_be_tried_again(self) -> None:
        with torch_memory_saver.region("weights", enable_cpu_backup=True):
            address = self.malloc(64 * MIB)
        torch_memory_saver.pause("weights")
        with torch_memory_saver.disable():
            taken = self.runtime.malloc(self.runtime.free_memory() - 32 * MIB)
        with self.assertRaises(errors.DeviceMemory) as caught:
            torch_memory_saver.resume("weights")
        self.assertIsInstance(caught.exception, RuntimeError)
        self.assertEqual(caught.exception.needed, 64 * MIB)
        self.runtime.free(taken)
        torch_memory_saver.resume("weights")
        self.assertEqual(self.runtime.read(address, MIB), b"\7" * MIB)

    def test_regions_nest_end_after_exceptions_and_belong_to_a_thread(self) -> None:
        outside = settings()
        with self.assertRaises(KeyError):
            with torch_memory_saver.region("outer", enable_cpu_backup=True, cpu_backup_backend="mmap"):
                self.assertEqual(settings(), ("outer", True, True, False))
                self.assertEqual(cdll().tms_get_cpu_backup_backend(), b"mmap")
                with torch_memory_saver.region("inner"):
                    self.assertEqual(settings(), ("inner", True, False, False))
                with torch_memory_saver.disable():
                    self.assertFalse(cdll().tms_get_interesting_region())
                self.assertEqual(settings(), ("outer", True, True, False))
                elsewhere: list[tuple] = []
                thread = threading.Thread(target=lambda: elsewhere.append(settings()))
                thread.start()
                thread.join()
                self.assertEqual(elsewhere, [outside])
                raise KeyError
        self.assertEqual(settings(), outside)
        self.assertEqual(cdll().tms_get_cpu_backup_backend(), b"pinned")

    def test_a_backup_can_be_retained_and_given_up(self) -> None:
        self.assertFalse(torch_memory_saver.retain_cpu_backup)
        self.addCleanup(vramctl.retain, None, None)
        with torch_memory_saver.region("retained", enable_cpu_backup=True):
            self.malloc()
        torch_memory_saver.retain_cpu_backup = True
        self.assertTrue(torch_memory_saver.retain_cpu_backup)
        torch_memory_saver.pause("retained")
        torch_memory_saver.resume("retained")
        self.assertEqual(vramctl.status().host.used_bytes, 4 * MIB)
        torch_memory_saver.retain_cpu_backup = False
        self.assertEqual(vramctl.status().host.used_bytes, 4 * MIB, "until the next resume")
        torch_memory_saver.pause("retained")
        torch_memory_saver.resume("retained")
        self.assertEqual(vramctl.status().host.used_bytes, 0)

    def test_the_margin_is_kept_free(self) -> None:
        self.addCleanup(setattr, torch_memory_saver, "memory_margin_bytes", 0)
        torch_memory_saver.memory_margin_bytes = 1 << 50
        self.assertEqual(torch_memory_saver.memory_margin_bytes, 1 << 50)
        with torch_memory_saver.region(), self.assertRaises(RuntimeError):
            self.malloc()


class Environment(unittest.TestCase):
    """The variables and files that frameworks use to set it up in child processes."""

    SETTINGS = (
        "import torch_memory_saver as p; s = p.torch_memory_saver; s._ensure_initialized(); c = s._impl._binary_wrapper.cdll; "
        "print(c.tms_get_current_tag().decode(), c.tms_get_interesting_region(), c.tms_get_enable_cpu_backup(), "
        "c.tms_get_enable_disk_backup(), c.tms_get_cpu_backup_backend().decode(), c.tms_get_retain_cpu_backup())"
    )

    def started(self, **environment: str) -> str:
        return python(self.SETTINGS, preload=str(HOOKS[0]), **environment).strip()

    def test_the_variables_set_what_threads_begin_with(self) -> None:
        self.assertEqual(self.started(), "default False False False pinned False")
        self.assertEqual(self.started(TMS_INIT_ENABLE="1"), "default True False False pinned False")
        both = self.started(TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1", TMS_RETAIN_CPU_BACKUP="true")
        self.assertEqual(both, "default True True False pinned True")
        on_disk = self.started(TMS_INIT_ENABLE="yes", TMS_INIT_ENABLE_DISK_BACKUP="1", TMS_INIT_CPU_BACKUP_BACKEND="mmap")
        self.assertEqual(on_disk, "default True False True mmap False")
        ours = self.started(TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="0", VRAMCTL_TAG="mine", VRAMCTL_BACKUP="mine=host")
        self.assertEqual(ours, "mine True True False pinned False")

    def test_the_disk_directory_of_the_environment_is_made(self) -> None:
        source = """
import os, sys
sys.path.insert(0, sys.argv[1])
from torch_memory_saver import torch_memory_saver
import vramctl
try:
    import torch
except ImportError:
    pass
from support import Cuda
Cuda().malloc(4 << 20)
torch_memory_saver.pause()
print(dict(vramctl.status().tag("default").backup), os.path.isdir(os.environ["TMS_DISK_BACKUP_DIR"]))
"""
        with tempfile.TemporaryDirectory() as folder:
            found = python(
                source,
                preload=str(HOOKS[0]),
                arguments=(str(TESTS),),
                TMS_INIT_ENABLE="1",
                TMS_INIT_ENABLE_DISK_BACKUP="1",
                TMS_DISK_BACKUP_DIR=os.path.join(folder, "cell0", "rank0"),
            )
        self.assertEqual(found, f"{{'disk': {4 * MIB}}} True\n")

    def test_the_files_that_frameworks_preload_are_beside_the_package(self) -> None:
        """slime looks for the suffixed names first, AReaL for the plain one. Miles asks for the path and searches the file for
        a variable that only releases with disk backups know.
        """
        from torch_memory_saver.utils import get_binary_path_from_package

        beside = os.path.dirname(os.path.dirname(package.__file__))
        for hook in HOOKS:
            found = os.path.join(beside, hook.name)
            self.assertTrue(os.path.exists(found), f"{found} is missing: scripts/test-python makes it")
            self.assertIn(b"TMS_INIT_ENABLE_DISK_BACKUP", Path(found).read_bytes())
        for hook in (HOOKS[0], HOOKS[3]):
            self.assertEqual(get_binary_path_from_package(hook.name.partition(".")[0]).resolve(), hook.resolve())

    def test_configure_subprocess_has_children_preload_the_library(self) -> None:
        source = """
import os, subprocess, sys
from torch_memory_saver import configure_subprocess
import vramctl
before = os.environ.get("LD_PRELOAD")
assert not vramctl.is_preloaded()
try:
    with configure_subprocess():
        inside = os.environ["LD_PRELOAD"]
        subprocess.run([sys.executable, "-c", "import torch_memory_saver, vramctl; print(vramctl.is_preloaded())"], check=True)
        raise KeyError
except KeyError:
    pass
assert os.environ.get("LD_PRELOAD") == before, before
print(inside)
"""
        preloaded, inside = python(source).splitlines()
        self.assertEqual(preloaded, "True")
        self.assertTrue(os.path.isfile(inside))
        other = next(iter(re.findall(r"/\S*/libc\.so\.6", Path("/proc/self/maps").read_text())))
        preloaded, inside = python(source, preload=other).splitlines()
        self.assertTrue(inside.endswith(f":{other}"), inside)

    def test_configure_subprocess_changes_nothing_where_the_library_is_there_already(self) -> None:
        before = os.environ.get("LD_PRELOAD")
        self.assertIsNotNone(before, "the tests run under `vramctl run`")
        with configure_subprocess():
            self.assertEqual(os.environ.get("LD_PRELOAD"), before)

    def test_without_the_library_it_says_what_to_do(self) -> None:
        source = """
from torch_memory_saver import torch_memory_saver
try:
    with torch_memory_saver.region():
        pass
except RuntimeError as error:
    print(error)
"""
        self.assertIn("vramctl run", python(source))


#: Runs on the simulated GPU with fake_torch.
ON_FAKE_TORCH = """
import sys
from torch_memory_saver import torch_memory_saver as saver
import torch, vramctl
MIB = 1 << 20
cuda = torch.cuda.memory.runtime()
if sys.argv[1] == "torch":
    saver.hook_mode = "torch"
with saver.region("weights", enable_cpu_backup=True):
    weights = torch.empty(32 * MIB).copy_(b"w" * 32 * MIB)
    before = cuda.free_memory()
    with saver.disable():
        plain = torch.empty(16 * MIB)
        del plain
    assert cuda.free_memory() == before, "the memory from disable() was not returned"
    with saver.disable():
        plain = torch.empty(16 * MIB).copy_(b"p" * 16 * MIB)
    with saver.region("kv_cache"):
        cache = torch.empty(64 * MIB).copy_(b"c" * 64 * MIB)
    more = torch.empty(4 * MIB).copy_(b"m" * 4 * MIB)
outside = torch.empty(8 * MIB)
tags = {tag.tag: dict(tag.backup) for tag in vramctl.status().tags}
assert tags == {"weights": {"host": 52 * MIB}, "kv_cache": {"discard": 64 * MIB}}, tags
assert vramctl.is_preloaded() == (sys.argv[1] == "preload")
before = cuda.free_memory()
for _ in range(2):
    saver.pause()
assert cuda.free_memory() == before + 116 * MIB
for _ in range(2):
    saver.resume()
found = [tensor.tobytes() for tensor in (weights, more, plain, cache)]
assert found == [b"w" * 32 * MIB, b"m" * 4 * MIB, b"p" * 16 * MIB, bytes(64 * MIB)]
pools = saver._impl._mem_pools
assert {key[:4] for key in pools} == {
    ("weights", True, False, "pinned"), ("weights", True, False, "mmap"), ("kv_cache", False, False, "")
}, list(pools)
assert pools.pop(("unknown", True), None) is None
before = cuda.free_memory()
del cache
pool = pools.pop(("kv_cache", False, False, "", 0))
assert cuda.free_memory() == before, "torch caches it"
del pool
assert cuda.free_memory() == before + 64 * MIB, "the pool's memory was not returned"
with saver.region("kv_cache"):
    again = torch.empty(64 * MIB)
assert len(pools) == 3
graph = torch.cuda.CUDAGraph()
try:
    with saver.cuda_graph(graph, tag="cuda_graph"):
        inside = torch.empty(8 * MIB)
    assert vramctl.status().tag("cuda_graph").bytes >= 8 * MIB
except vramctl.errors.NotPreloaded as error:
    assert sys.argv[1] == "torch" and "vramctl run" in str(error)
    try:
        saver.hook_mode = "preload"
    except RuntimeError as error:
        assert "in use" in str(error)
    else:
        raise AssertionError("the mode was changed while it was in use")
print("fine")
"""


@unittest.skipIf(HAS_GPU, "done with torch itself")
class FakeTorch(unittest.TestCase):
    def check(self, hook_mode: str, **environment: str) -> None:
        path = os.pathsep.join([str(DROPIN), str(TESTS / "fake_torch"), str(TESTS)])
        preload = str(HOOKS[0]) if hook_mode == "preload" else ""
        found = python(ON_FAKE_TORCH, preload=preload, arguments=(hook_mode,), PYTHONPATH=path, **environment)
        self.assertEqual(found, "fine\n")

    def test_the_library_preloaded(self) -> None:
        self.check("preload")

    def test_hook_mode_torch_needs_no_preloaded_library(self) -> None:
        self.check("torch")

    def test_programs_measure_with_what_its_tests_measure_with(self) -> None:
        source = """
import sys, types
from torch_memory_saver.testing_utils import empty_cache, get_and_print_gpu_memory, get_device
from torch_memory_saver.utils import is_xpu
import torch
assert (is_xpu(), get_device()) == (False, "cuda")
before = get_and_print_gpu_memory("before", gpu_id=1)
with torch.cuda.device(1):
    tensor = torch.empty(64 << 20)
assert get_and_print_gpu_memory("with a tensor", gpu_id=1) >= before + (64 << 20)
del tensor
empty_cache()
assert get_and_print_gpu_memory("without it", 1) == before
torch.xpu = types.SimpleNamespace(is_available=lambda: True)
assert (is_xpu(), get_device()) == (True, "xpu")
"""
        path = os.pathsep.join([str(DROPIN), str(TESTS / "fake_torch"), str(TESTS)])
        printed = python(source, preload=str(HOOKS[0]), PYTHONPATH=path).splitlines()
        self.assertEqual([line.partition(":")[0] for line in printed], ["before", "with a tensor", "without it"])

    def test_expandable_segments_are_no_obstacle(self) -> None:
        for hook_mode in ("preload", "torch"):
            with self.subTest(hook_mode=hook_mode):
                self.check(hook_mode, PYTORCH_CUDA_ALLOC_CONF="expandable_segments:True")


@needs_torch
class Torch(unittest.TestCase):
    """Tensors on a GPU, with the library preloaded."""

    def setUp(self) -> None:
        self.addCleanup(vramctl.resume, timeout=None)

    def used(self) -> int:
        free, total = torch.cuda.mem_get_info()
        return total - free

    def test_tensors_are_paused_by_tag_and_keep_their_addresses(self) -> None:
        with torch_memory_saver.region("weights", enable_cpu_backup=True):
            weights = torch.arange(64 * MIB, dtype=torch.int32, device="cuda")
        with torch_memory_saver.region("kv_cache"):
            cache = torch.full((512 * MIB,), 5, dtype=torch.uint8, device="cuda")
        outside = torch.full((1024,), 3.0, device="cuda")
        address, before = weights.data_ptr(), self.used()
        torch_memory_saver.pause("weights")
        torch_memory_saver.pause("weights")
        self.assertLessEqual(self.used(), before - freed(256 * MIB))
        torch_memory_saver.pause("kv_cache")
        self.assertLessEqual(self.used(), before - freed(768 * MIB))
        self.assertTrue(bool((outside == 3).all()))
        torch_memory_saver.resume()
        torch_memory_saver.resume()
        self.assertEqual(weights.data_ptr(), address)
        self.assertTrue(torch.equal(weights, torch.arange(64 * MIB, dtype=torch.int32, device="cuda")))
        self.assertTrue(bool((cache == 0).all()))

    def test_regions_in_each_other_do_not_share_memory(self) -> None:
        with torch_memory_saver.region("outer", enable_cpu_backup=True):
            outer = torch.full((8 * MIB,), 1, dtype=torch.uint8, device="cuda")
            with torch_memory_saver.region("inner"):
                inner = torch.full((8 * MIB,), 2, dtype=torch.uint8, device="cuda")
            with torch_memory_saver.disable():
                plain = torch.full((8 * MIB,), 3, dtype=torch.uint8, device="cuda")
            again = torch.full((8 * MIB,), 4, dtype=torch.uint8, device="cuda")
        torch_memory_saver.pause("outer")
        self.assertTrue(bool((inner == 2).all()) and bool((plain == 3).all()))
        torch_memory_saver.pause("inner")
        self.assertTrue(bool((plain == 3).all()), "memory from inside disable() has no tag")
        torch_memory_saver.resume()
        self.assertTrue(bool((outer == 1).all()) and bool((again == 4).all()) and bool((inner == 0).all()))

    def test_a_backup_is_a_tensor_on_the_host(self) -> None:
        with torch_memory_saver.region("weights", enable_cpu_backup=True):
            tensors = [torch.randn(10, 20, 30, device="cuda"), torch.randn(1 << 20, device="cuda").bfloat16()]
        with torch_memory_saver.region("dropped"):
            dropped = torch.ones(1 << 20, device="cuda")
        wanted = [tensor.cpu() for tensor in tensors]
        self.assertIsNone(torch_memory_saver.get_cpu_backup(tensors[0]), "it is not paused")
        torch_memory_saver.pause()
        self.assertIsNone(torch_memory_saver.get_cpu_backup(dropped))
        for tensor, expected in zip(tensors, wanted):
            for zero_copy in (False, True):
                found = torch_memory_saver.get_cpu_backup(tensor, zero_copy=zero_copy)
                self.assertEqual((found.device.type, found.dtype, found.shape), ("cpu", tensor.dtype, tensor.shape))
                self.assertTrue(torch.equal(found, expected))
        self.addCleanup(vramctl.retain, None, None)
        pointer = torch_memory_saver.get_cpu_backup(tensors[0], zero_copy=True).data_ptr()
        torch_memory_saver.retain_cpu_backup = True
        torch_memory_saver.resume()
        self.assertEqual(torch_memory_saver.get_cpu_backup(tensors[0], zero_copy=True).data_ptr(), pointer)
        torch_memory_saver.retain_cpu_backup = False
        self.assertTrue(torch.equal(torch_memory_saver.get_cpu_backup(tensors[0], zero_copy=True), wanted[0]))
        torch_memory_saver.pause()
        torch_memory_saver.resume()
        self.assertIsNone(torch_memory_saver.get_cpu_backup(tensors[0]))
        with self.assertRaises(ValueError):
            torch_memory_saver.get_cpu_backup(wanted[0])
        with self.assertRaises(ValueError):
            torch_memory_saver.get_cpu_backup(tensors[0].transpose(0, 2))

    def test_a_large_backup_goes_to_the_gpu_without_the_memory(self) -> None:
        """As trainers do that send their weights while these are paused. The driver knows the backup in pieces."""
        with torch_memory_saver.region("weights", enable_cpu_backup=True):
            weights = torch.randint(0, 256, (3, 100 * MIB + 4), dtype=torch.uint8, device="cuda")
        wanted = weights.cpu()
        torch_memory_saver.pause()
        kept = torch_memory_saver.get_cpu_backup(weights, zero_copy=True)
        for sent in (kept.cuda(), kept.to("cuda", non_blocking=True), kept[:, 1000 : 90 * MIB].cuda()):
            expected = wanted if sent.shape == wanted.shape else wanted[:, 1000 : 90 * MIB]
            self.assertTrue(torch.equal(sent.cpu(), expected))
        torch_memory_saver.resume()
        self.assertTrue(torch.equal(weights.cpu(), wanted))

    def test_a_graph_s_memory_is_paused_and_the_graph_replays(self) -> None:
        with torch_memory_saver.region("weights", enable_cpu_backup=True):
            source = torch.ones(64 * MIB, device="cuda")
        result = torch.zeros(1, device="cuda")
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            (source * 2 + 1).sum()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch_memory_saver.cuda_graph(graph, tag="cuda_graph", stream=stream):
            result.copy_((source * 2 + 1).sum().reshape(1))
        graph.replay()
        torch.cuda.synchronize()
        self.assertEqual(result.item(), 3.0 * 64 * MIB)
        found = vramctl.status().tag("cuda_graph")
        assert found is not None
        self.assertGreaterEqual(found.bytes, 256 * MIB)
        before = self.used()
        torch_memory_saver.pause()
        self.assertLessEqual(self.used(), before - freed(512 * MIB))
        torch_memory_saver.resume()
        source.fill_(2)
        graph.replay()
        self.assertEqual(result.item(), 5.0 * 64 * MIB)

    def test_what_is_made_inside_disable_can_be_shared_and_goes_back(self) -> None:
        torch.cuda.empty_cache()
        before = self.used()
        with torch_memory_saver.region("weights"):
            with torch_memory_saver.disable():
                # CUDA IPC works only with cudaMalloc's memory. Torch keeps shared memory until its receivers release it.
                shared = torch.ones(1 * MIB, dtype=torch.uint8, device="cuda")
                self.assertTrue(shared.untyped_storage()._share_cuda_())
                large = torch.ones(256 * MIB, dtype=torch.uint8, device="cuda")
                del large
        torch.cuda.empty_cache()
        self.assertLess(self.used(), before + 64 * MIB, "it was given back at the end")

    def test_the_margin_is_kept_free(self) -> None:
        self.addCleanup(setattr, torch_memory_saver, "memory_margin_bytes", 0)
        torch_memory_saver.memory_margin_bytes = 1 << 50
        with torch_memory_saver.region("margin"), self.assertRaises(torch.cuda.OutOfMemoryError):
            torch.empty(256 * MIB, dtype=torch.uint8, device="cuda")


#: Pauses, resumes, checks, and leaves all cleanup to the exit.
WORKLOAD = """
import sys, torch
from torch_memory_saver import torch_memory_saver as saver
if sys.argv[1] == "torch":
    saver.hook_mode = "torch"
held = []
with saver.region("weights", enable_cpu_backup=True):
    weights = torch.arange(64 << 20, dtype=torch.int32, device="cuda")
with saver.region("kv_cache"):
    cache = torch.ones(256 << 20, dtype=torch.uint8, device="cuda")
    with saver.disable():
        held.append(torch.ones(8 << 20, device="cuda"))
before = torch.cuda.mem_get_info()[0]
saver.pause()
freed = torch.cuda.mem_get_info()[0] - before
# Less the page tables for the backup.
assert freed >= 508 << 20, f"only {freed >> 20} of 508 MiB became free; does another program allocate on this GPU?"
saver.resume()
assert torch.equal(weights, torch.arange(64 << 20, dtype=torch.int32, device="cuda"))
assert not cache.any() and held[0].all()
if sys.argv[2] == "paused":
    saver.pause()
del cache
print("fine", flush=True)
"""


@needs_torch
class TorchPrograms(unittest.TestCase):
    """Runs whole programs; checks their output and exit code 0."""

    def workload(self, hook_mode: str, at_exit: str = "active", **environment: str) -> None:
        preload = str(HOOKS[0]) if hook_mode == "preload" else ""
        self.assertEqual(python(WORKLOAD, preload=preload, arguments=(hook_mode, at_exit), **environment), "fine\n")

    def test_both_hook_modes_end_without_a_crash_paused_or_not(self) -> None:
        for hook_mode in ("preload", "torch"):
            for at_exit in ("active", "paused"):
                with self.subTest(hook_mode=hook_mode, at_exit=at_exit):
                    self.workload(hook_mode, at_exit)

    def test_expandable_segments_are_no_obstacle(self) -> None:
        for hook_mode in ("preload", "torch"):
            for variable in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
                with self.subTest(hook_mode=hook_mode, variable=variable):
                    self.workload(hook_mode, **{variable: "expandable_segments:True"})

    def test_managed_by_the_environment_all_is_paused(self) -> None:
        """As slime starts its trainers."""
        source = """
import torch
from torch_memory_saver import torch_memory_saver as saver
model = torch.arange(64 << 20, dtype=torch.int32, device="cuda")
with saver.region(tag="grad_buffer"):
    gradients = torch.ones(64 << 20, dtype=torch.uint8, device="cuda")
before = torch.cuda.mem_get_info()[0]
saver.pause()
freed = torch.cuda.mem_get_info()[0] - before
# Less the page tables for the backup.
assert freed >= 316 << 20, f"only {freed >> 20} of 316 MiB became free; does another program allocate on this GPU?"
saver.resume()
assert torch.equal(model, torch.arange(64 << 20, dtype=torch.int32, device="cuda")) and not gradients.any()
print("fine", flush=True)
"""
        found = python(source, preload=str(HOOKS[0]), TMS_INIT_ENABLE="1", TMS_INIT_ENABLE_CPU_BACKUP="1")
        self.assertEqual(found, "fine\n")


if __name__ == "__main__":
    unittest.main()
