"""The functions for the process's own memory, without torch."""

from __future__ import annotations

import asyncio
import inspect
import os
import pickle
import shutil
import sys
import tempfile
import threading
import unittest
from pathlib import Path
from typing import Any

import vramctl
from support import MIB, PACKAGE, ROOT, VRAMCTL, Cuda, bare, pattern, run
from vramctl import errors


class Package(unittest.TestCase):
    def test_its_version_is_the_library_s_and_the_command_line_s(self) -> None:
        self.assertEqual(vramctl.__version__, vramctl.library_version())
        self.assertEqual(run([VRAMCTL, "--version"]).stdout, f"vramctl {vramctl.__version__}\n")

    def test_the_module_is_the_command_line(self) -> None:
        """Found through `vramctl run` and in the package itself."""
        built = [ROOT / "target" / profile / "vramctl" for profile in ("release", "debug")]
        command = next((str(path) for path in built if path.exists()), None)
        if command is None:
            self.skipTest("not run: the command line was built somewhere else")
        for arguments in (["--version"], ["status", "nobody"], ["pause", "--nonsense"], ["run", "--", "sh", "-c", "exit 7"]):
            direct = bare([command, *arguments])
            for ran in (
                run([sys.executable, "-m", "vramctl", *arguments]),
                bare([sys.executable, "-m", "vramctl", *arguments], PYTHONPATH=str(PACKAGE.parent)),
            ):
                self.assertEqual(
                    (ran.returncode, ran.stdout, ran.stderr), (direct.returncode, direct.stdout, direct.stderr), arguments
                )

    def test_without_the_command_line_the_module_says_where_it_looked(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "lib/python3.9/site-packages/vramctl"
            package.mkdir(parents=True)
            shutil.copy(PACKAGE / "__main__.py", package)
            ran = bare([sys.executable, str(package), "ps"], VRAMCTL_LIB="")
            self.assertEqual(ran.returncode, 1)
            self.assertIn(f"{folder}/bin", ran.stderr)

    def test_a_package_apart_finds_the_command_line_of_the_library_that_it_runs_under(self) -> None:
        """As an agent on a node of Ray does, which `vramctl run` has started."""
        with tempfile.TemporaryDirectory() as folder:
            package = Path(folder) / "packages/vramctl"
            package.mkdir(parents=True)
            shutil.copy(PACKAGE / "__main__.py", package)
            for library, command in (
                ("together/libvramctl.so", "together/vramctl"),
                ("apart/lib/libvramctl.so", "apart/bin/vramctl"),
            ):
                path = Path(folder) / command
                path.parent.mkdir(parents=True)
                path.write_text(f'#!/bin/sh\necho {command} "$@"\n')
                path.chmod(0o755)
                ran = bare([sys.executable, str(package), "ps"], VRAMCTL_LIB=f"{folder}/{library}")
                self.assertEqual(ran.stdout, f"{command} ps\n", ran.stderr)


class Process(unittest.TestCase):
    def setUp(self) -> None:
        self.cuda = Cuda()
        self.addresses: list = []
        self.addCleanup(self.clean_up)

    def clean_up(self) -> None:
        vramctl.resume(timeout=None)
        for address in self.addresses:
            self.cuda.free(address)

    def malloc(self, tag: str, size: int, backup: str = "default") -> int:
        with vramctl.region(tag, backup):
            self.addresses.append(self.cuda.malloc(size))
        return self.addresses[-1]

    def test_contents_are_kept_or_dropped_by_tag(self) -> None:
        weights, cache = self.malloc("weights", 8 * MIB), self.malloc("kv_cache", 4 * MIB, "discard")
        self.cuda.write(weights, pattern(1, 8 * MIB))
        self.cuda.write(cache, pattern(2, 4 * MIB))
        before = self.cuda.free_memory()
        report = vramctl.pause("weights")
        self.assertEqual((report.allocations, report.bytes, report.kept_bytes), (1, 8 * MIB, 8 * MIB))
        self.assertEqual(self.cuda.free_memory() - before, 8 * MIB)
        self.assertGreater(report.ms, 0)
        self.assertIn("save", report.stages)
        self.assertEqual(bytes(vramctl.backup_of(weights)), pattern(1, 8 * MIB))
        report = vramctl.pause()
        self.assertEqual((report.unchanged, report.discarded_bytes), (1, 4 * MIB))
        report = vramctl.resume()
        self.assertEqual((report.allocations, report.bytes), (2, 12 * MIB))
        self.assertEqual(self.cuda.read(weights, 8 * MIB), pattern(1, 8 * MIB))
        self.assertEqual(self.cuda.read(cache, 4 * MIB), bytes(4 * MIB))

    def test_regions_nest_and_end_after_an_exception(self) -> None:
        self.assertEqual(vramctl.current_tag(), "default")
        with self.assertRaises(KeyError):
            with vramctl.region("outer"):
                with vramctl.region("inner"):
                    self.assertEqual(vramctl.current_tag(), "inner")
                    with vramctl.unmanaged():
                        self.assertIsNone(vramctl.current_tag())
                self.assertEqual(vramctl.current_tag(), "outer")
                seen = []
                thread = threading.Thread(target=lambda: seen.append(vramctl.current_tag()))
                thread.start()
                thread.join()
                self.assertEqual(seen, ["default"], "a region applies to one thread")
                raise KeyError
        self.assertEqual(vramctl.current_tag(), "default")

    def test_a_region_is_also_a_decorator(self) -> None:
        @vramctl.region("decorated")
        def tag() -> object:
            return vramctl.current_tag()

        self.assertEqual([tag(), tag()], ["decorated", "decorated"])

    def test_a_decorated_coroutine_or_generator_is_in_the_region_at_each_of_its_steps(self) -> None:
        @vramctl.region("waits")
        async def wait(fails: bool) -> object:
            first = vramctl.current_tag()
            try:
                await asyncio.sleep(0)
                if fails:
                    await asyncio.wait_for(asyncio.sleep(100), 0)
            except asyncio.TimeoutError:
                pass
            return first, vramctl.current_tag()

        @vramctl.region("generates")
        def generate() -> Any:
            try:
                while (yield vramctl.current_tag()) != "end":
                    pass
            except KeyError:
                yield "thrown", vramctl.current_tag()
            finally:
                seen.append(vramctl.current_tag())
            return "end"

        @vramctl.region("does both")
        async def do_both() -> Any:
            try:
                yield vramctl.current_tag()
                await asyncio.sleep(0)
                yield vramctl.current_tag()
            finally:
                await asyncio.sleep(0)
                seen.append(vramctl.current_tag())

        async def both() -> Any:
            pairs = await asyncio.gather(wait(False), wait(True))
            whole = [one async for one in do_both()]
            left = do_both()
            whole.append(await left.__anext__())
            outside = vramctl.current_tag()
            await left.aclose()
            return pairs, whole, outside

        seen: list[object] = []
        self.assertTrue(inspect.iscoroutinefunction(wait) and inspect.isgeneratorfunction(generate))
        self.assertEqual(asyncio.run(both()), ([("waits", "waits")] * 2, ["does both"] * 3, "default"))
        self.assertEqual(seen, ["does both"] * 2)
        seen.clear()
        running, other = generate(), generate()
        self.assertEqual((next(running), vramctl.current_tag(), next(other)), ("generates", "default", "generates"))
        self.assertEqual(running.throw(KeyError), ("thrown", "generates"))
        with self.assertRaises(StopIteration) as ended:
            other.send("end")
        self.assertEqual(ended.exception.value, "end")
        running.close()
        self.assertEqual((seen, vramctl.current_tag()), (["generates"] * 2, "default"))

    def test_each_task_has_regions_of_its_own(self) -> None:
        async def load(tag: str, steps: int) -> list[object]:
            seen = []
            with vramctl.region(tag):
                for _ in range(steps):
                    seen.append(vramctl.current_tag())
                    await asyncio.sleep(0)
                with vramctl.region("inner"):
                    await asyncio.sleep(0)
                    seen.append(vramctl.current_tag())
                    seen += await asyncio.gather(look(), asyncio.to_thread(vramctl.current_tag))
            return [*seen, vramctl.current_tag()]

        async def look() -> object:
            await asyncio.sleep(0)
            return vramctl.current_tag()

        async def tasks() -> list[Any]:
            return [await asyncio.gather(load("a", 2), look(), load("b", 5)), vramctl.current_tag()]

        a, b = ([tag] * steps + ["inner", "inner", "default"] for tag, steps in (("a", 2), ("b", 5)))
        self.assertEqual(asyncio.run(tasks()), [[[*a, "default"], "default", [*b, "default"]], "default"])
        with vramctl.region("around"):
            found = asyncio.run(tasks())
            self.assertEqual((found[0][1], found[1], vramctl.current_tag()), ("around", "around", "around"))
        self.assertEqual(vramctl.current_tag(), "default")

    def test_so_has_each_task_of_a_loop_that_is_not_asyncios(self) -> None:
        """As uvloop: its handles are its own, and its tasks are asyncio's."""
        program = """
import asyncio, vramctl
asyncio.BaseEventLoop = type("Another", (), {})

async def load(tag, steps):
    seen = []
    with vramctl.region(tag):
        for _ in range(steps):
            seen.append(vramctl._library.get().read("current_tag"))
            await asyncio.sleep(0)
    return seen

async def look():
    await asyncio.sleep(0)
    return vramctl._library.get().read("current_tag")

async def tasks():
    return [await asyncio.gather(load("a", 2), look(), load("b", 5)), await look()]

for around in ("default", "around"):
    with vramctl.region(around):
        found = asyncio.run(tasks())
        assert found == [[["a"] * 2, around, ["b"] * 5], around], found
"""
        done = run([sys.executable, "-c", program])
        self.assertEqual((done.returncode, done.stderr), (0, ""))

    def test_the_end_of_a_region_ends_that_one(self) -> None:
        def region(tag: str) -> Any:
            with vramctl.region(tag):
                yield vramctl.current_tag()

        one, other, third = map(region, ("one", "other", "third"))
        self.assertEqual([next(one), next(other), next(third)], ["one", "other", "third"])
        one.close()
        self.assertEqual(vramctl.current_tag(), "third")
        ended: list[object] = []

        def end() -> None:
            with vramctl.region("of a thread"):
                third.close()
                ended.append(vramctl.current_tag())

        thread = threading.Thread(target=end)
        thread.start()
        thread.join()
        self.assertEqual((ended, vramctl.current_tag()), (["of a thread"], "other"))
        other.close()
        self.assertEqual(vramctl.current_tag(), "default")
        once = vramctl.region("once")
        with once, self.assertRaisesRegex(RuntimeError, "once"), once:
            pass

    def test_several_tags_are_one_report_and_an_unknown_one_is_found_out_first(self) -> None:
        self.malloc("a", 2 * MIB)
        self.malloc("b", 4 * MIB)
        with self.assertRaises(errors.UnknownTag) as caught:
            vramctl.pause(["a", "nonsense"])
        self.assertEqual(caught.exception.known_tags, ["a", "b"])
        status = vramctl.status()
        self.assertEqual({tag.state for tag in status.tags}, {"active"}, "nothing was done")
        report = vramctl.pause(["a", "b", "a"])
        self.assertEqual((report.allocations, report.bytes, report.unchanged), (2, 6 * MIB, 0))
        self.assertEqual(vramctl.resume(["b", "a"]).bytes, 6 * MIB)
        self.assertEqual(vramctl.pause(name for name in "ab").allocations, 2)
        for call in (vramctl.pause, vramctl.resume):
            with self.assertRaises(errors.Invalid):
                call([])

    def test_each_of_several_tags_has_a_policy_of_its_own(self) -> None:
        addresses = {tag: self.malloc(tag, 2 * MIB) for tag in ("kept", "dropped", "other")}
        for address in addresses.values():
            self.cuda.write(address, pattern(1, 2 * MIB))
        report = vramctl.pause({"kept": "host", "dropped": "discard"})
        self.assertEqual((report.allocations, report.kept_bytes), (2, 2 * MIB))
        vramctl.resume()
        vramctl.pause({None: "discard", "kept": "default"})
        vramctl.resume()
        kept = {tag: any(self.cuda.read(address, 2 * MIB)) for tag, address in addresses.items()}
        self.assertEqual(kept, {"kept": True, "dropped": False, "other": False})
        self.assertTrue(self.cuda.read(addresses["kept"], 2 * MIB) == pattern(1, 2 * MIB))
        for wrong in ({}, {"kept": "tape"}):
            with self.assertRaises(errors.Invalid):
                vramctl.pause(wrong)
        with self.assertRaises(errors.Invalid):
            vramctl.pause({"kept": "host"}, backup="host")

    def test_the_status_is_by_tag_and_by_device(self) -> None:
        self.malloc("a", 2 * MIB)
        vramctl.pause("a")
        status = vramctl.status()
        tag = status.tag("a")
        assert tag is not None
        self.assertEqual(
            (tag.state, tag.bytes, tag.paused_bytes, dict(tag.backup)), ("paused", 2 * MIB, 2 * MIB, {"host": 2 * MIB})
        )
        self.assertEqual(status.process_tag, "default")
        self.assertEqual(status.devices[0].paused_bytes, 2 * MIB)
        self.assertGreaterEqual(status.host.used_bytes, 2 * MIB)
        self.assertIsNone(status.tag("nonsense"))

    def test_errors_carry_numbers(self) -> None:
        self.malloc("a", 64 * MIB)
        with self.assertRaises(errors.UnknownTag) as unknown:
            vramctl.pause("nonsense")
        self.assertEqual((unknown.exception.code, unknown.exception.number), ("unknown_tag", 2))
        self.assertEqual(unknown.exception.known_tags, ["a"])
        vramctl.pause("a")
        with vramctl.unmanaged():
            hog = self.cuda.malloc(self.cuda.free_memory() - 16 * MIB)
        try:
            with self.assertRaises(errors.DeviceMemory) as short:
                vramctl.resume("a", timeout=0.05)
            error = pickle.loads(pickle.dumps(short.exception))
            self.assertIsInstance(error, MemoryError)
            self.assertEqual((error.device, error.needed), (0, 64 * MIB))
            self.assertLess(error.free, 64 * MIB)
            self.assertEqual(str(error), short.exception.message)
            self.assertIn("64.00 MiB needed", str(error))
        finally:
            self.cuda.free(hog)

    def test_what_makes_no_sense_is_refused_before_anything_happens(self) -> None:
        self.malloc("a", 2 * MIB)
        for call in (
            lambda: vramctl.pause("a", backup="tape"),
            lambda: vramctl.pause("a", timeout=-1),
            lambda: vramctl.pause("a", timeout=float("nan")),
            lambda: vramctl.pause("a\0b"),
            lambda: vramctl.resume("a", timeout=-0.5),
            lambda: vramctl.region("a=b").__enter__(),
            lambda: vramctl.region("", backup="host").__enter__(),
            lambda: vramctl.set_memory_margin(-1),
        ):
            with self.assertRaises(errors.Invalid) as caught:
                call()
            self.assertIsInstance(caught.exception, ValueError)
        with self.assertRaises(TypeError):
            vramctl.pause(b"a")  # type: ignore[arg-type]
        self.assertEqual(vramctl.current_tag(), "default", "a refused region has not started")
        self.assertEqual(vramctl.status().tags[0].state, "active")

    def test_retained_contents_are_not_copied_again(self) -> None:
        address = self.malloc("kept", 64 * MIB)
        self.cuda.write(address, pattern(3, 64 * MIB))
        vramctl.retain("kept", True)
        self.addCleanup(vramctl.retain, "kept", None)
        vramctl.pause("kept")
        vramctl.resume("kept")
        tag = vramctl.status().tag("kept")
        assert tag is not None
        self.assertEqual(tag.host_bytes, 64 * MIB, "they stay in host memory while the tag is active")
        self.assertTrue(tag.retained)
        vramctl.retain("kept", False)
        tag = vramctl.status().tag("kept")
        assert tag is not None
        self.assertEqual((tag.host_bytes, tag.retained), (0, False))
        self.assertEqual(self.cuda.read(address, 64 * MIB), pattern(3, 64 * MIB))

    def test_the_disk_directory_can_be_set(self) -> None:
        self.malloc("a", 4 * MIB)
        with self.assertRaises(errors.Disk) as caught:
            vramctl.set_disk_directory("/nowhere/at/all")
        self.assertIsInstance(caught.exception, OSError)
        vramctl.set_disk_directory(None)

    def test_a_backup_is_read_in_place(self) -> None:
        address = self.malloc("a", 4 * MIB)
        self.cuda.write(address, pattern(5, 4 * MIB))
        with self.assertRaises(errors.NotPaused):
            vramctl.backup_of(address)
        vramctl.pause("a")
        view = vramctl.backup_of(address + 4096)
        self.assertTrue(view.readonly)
        self.assertEqual((len(view), bytes(view[:100])), (4 * MIB - 4096, pattern(5, 4 * MIB)[4096:4196]))

    def test_a_pause_lets_other_threads_go_on(self) -> None:
        """A pause takes seconds, and an engine's HTTP server must keep running."""
        self.malloc("a", 256 * MIB)
        ticks, stop = [0], threading.Event()

        def tick() -> None:
            while not stop.is_set():
                ticks[0] += 1

        thread = threading.Thread(target=tick)
        thread.start()
        try:
            grown = 0
            # On a busy machine, the other thread may have to wait for a processor.
            for _ in range(20):
                before = ticks[0]
                vramctl.pause("a")
                grown = max(grown, ticks[0] - before)
                vramctl.resume("a", timeout=None)
            self.assertGreater(grown, 10)
        finally:
            stop.set()
            thread.join()

    def test_a_short_timeout_is_not_none_at_all(self) -> None:
        """Rounded down it would be 0, which tells a resume not to wait."""
        milliseconds = vramctl._library.milliseconds
        self.assertEqual([milliseconds(seconds) for seconds in (None, 0, 0.0001, 2.5, float("inf"))], [-1, 0, 1, 2500, -1])

    def test_torch_is_not_imported(self) -> None:
        self.assertNotIn("torch", sys.modules)

    def test_the_library_is_the_preloaded_one(self) -> None:
        self.assertTrue(vramctl.is_preloaded())
        self.assertEqual(vramctl.library_path(), os.environ["LD_PRELOAD"].split(":")[0])
        self.assertRegex(vramctl.library_version(), r"^\d+\.\d+\.\d+$")


class WithoutTheLibrary(unittest.TestCase):
    def test_it_is_said_and_how_to_go_on(self) -> None:
        source = """
import vramctl
assert not vramctl.is_preloaded()
assert vramctl.processes() is not None
for call in (vramctl.pause, vramctl.resume, vramctl.status, vramctl.current_tag, vramctl.library_version,
             vramctl.region("a").__enter__, vramctl.unmanaged().__enter__, lambda: vramctl.backup_of(1)):
    try:
        call()
    except vramctl.errors.NotPreloaded as error:
        assert "vramctl run --" in str(error), error
    else:
        raise SystemExit(f"{call} did something")
print("done")
"""
        ran = bare([sys.executable, "-c", source], PYTHONPATH=str(PACKAGE.parent))
        self.assertEqual((ran.stdout.strip(), ran.stderr), ("done", ""))


class Found(unittest.TestCase):
    def test_run_makes_the_package_findable_and_nothing_beside_it(self) -> None:
        """The directories on the path must expose only the package, not its modules or tests."""
        source = """
import importlib.util, vramctl, vramctl.client
print(vramctl.__file__)
print([importlib.util.find_spec(name) for name in ("client", "errors", "engines", "support")])
"""
        ran = run([sys.executable, "-c", source])
        self.assertEqual(ran.stdout.splitlines(), [str(PACKAGE / "__init__.py"), str([None] * 4)], ran.stderr)


if __name__ == "__main__":
    unittest.main()
