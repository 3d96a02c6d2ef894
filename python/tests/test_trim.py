"""Trims: torch's cache is returned on request, with fake_torch in place of torch."""

from __future__ import annotations

import gc
import json
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parent / "fake_torch"))

import torch  # noqa: E402

import vramctl  # noqa: E402
from support import HOLDER, MIB, VRAMCTL, Program, eventually, run  # noqa: E402
from vramctl import errors  # noqa: E402

GIB = 1 << 30

#: Has 20 MiB cached, and in another segment 16 MiB stuck behind a live tensor of 4 MiB. Never imports vramctl itself.
TORCH_HOLDER = """
import ctypes, os, sys
sys.path[:0] = [{tests!r}, {tests!r} + "/fake_torch"]
import torch
def fill():
    live, stuck, cached = torch.empty(4 << 20), torch.empty(6 << 20), torch.empty(20 << 20)
    return live
live = fill()
print("ready", flush=True)
for line in sys.stdin:
    word, _, rest = line.strip().partition(" ")
    if word == "lock":
        print("locked", flush=True)
        if rest:
            ctypes.PyDLL(None).usleep(int(float(rest) * 1e6))
        else:
            # Until there is a line to read.
            ctypes.PyDLL(None).read(0, ctypes.create_string_buffer(1), 1)
        print("unlocked", flush=True)
    elif word == "segments":
        print(len(torch.cuda.memory_snapshot()), flush=True)
    elif word == "fill":
        live = [live, fill()]
        print("filled", flush=True)
    elif word == "child":
        child = os.fork()
        if child == 0:
            import threading
            os._exit(len(threading.enumerate()) - 1)
        print(os.waitpid(child, 0)[1], flush=True)
    elif word == "child-in-between":
        # The fork comes while a thread is being started, as another thread's could.
        import signal, threading
        from vramctl import _trim
        start, _trim._is_served = threading.Thread.start, False
        def fork_and_start(thread):
            threading.Thread.start = start
            child = os.fork()
            if child == 0:
                signal.alarm(100)
                _trim.serve()
                os._exit([thread.name for thread in threading.enumerate()].count("vramctl-trim"))
            start(thread)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        threading.Thread.start = fork_and_start
        _trim.serve()
    elif word == "end":
        break
    elif word == "capture":
        # CUDA's own cudaFree is what a capture forbids.
        ctypes.CDLL(None).vramctl_region_begin(None, 0)
        unmanaged = torch.empty(30 << 20)
        ctypes.CDLL(None).vramctl_region_end()
        del unmanaged
        stream = ctypes.c_void_p()
        driver = ctypes.CDLL("libcuda.so.1")
        assert driver.cuStreamCreate(ctypes.byref(stream), 1) == 0
        assert driver.cuStreamBeginCapture_v2(stream, 0) == 0
        print("capturing", flush=True)
        sys.stdin.readline()
        graph = ctypes.c_void_p()
        print(driver.cuStreamEndCapture(stream, ctypes.byref(graph)), flush=True)
""".format(tests=str(Path(__file__).resolve().parent))


def parts(trimmed: Any) -> dict[str | None, tuple[int, int, int, int]]:
    """Live, cached, fragmented and returned MiB by tag."""
    return {
        part.tag: (
            part.live_bytes // MIB,
            part.cached_bytes // MIB,
            part.fragmented_bytes // MIB,
            part.returned_bytes // MIB,
        )
        for part in trimmed.cache
    }


class InThisProcess(unittest.TestCase):
    def setUp(self) -> None:
        gc.collect()
        vramctl.resume(timeout=None)
        torch.cuda.init()

    def test_what_came_back_and_what_is_stuck_is_told_by_tag(self) -> None:
        vramctl.trim()
        live, stuck, cached = torch.empty(4 * MIB), torch.empty(6 * MIB), torch.empty(40 * MIB)
        with vramctl.region("trimmed"):
            kept = torch.empty(20 * MIB)
        del stuck, cached, kept
        trimmed = vramctl.trim()
        self.assertEqual(trimmed.returned_bytes, 40 * MIB)
        told = parts(trimmed)
        self.assertEqual(told["default"], (4, 0, 16, 40))
        self.assertEqual(told["trimmed"], (0, 20, 0, 0), "the pool of a region is kept")
        self.assertGreater(trimmed.ms, 0)
        del live
        self.assertEqual(parts(vramctl.trim())["default"][3], 20)

    def test_garbage_in_cycles_is_collected(self) -> None:
        gc.disable()
        self.addCleanup(gc.enable)
        cycle: list[Any] = [torch.empty(40 * MIB)]
        cycle.append(cycle)
        vramctl.trim()
        del cycle
        self.assertEqual(vramctl.trim().returned_bytes, 40 * MIB)

    def test_rounds_go_on_while_they_return_a_gibibyte_and_three_are_the_most(self) -> None:
        def rounds(*reserved: int) -> int:
            with (
                mock.patch.object(torch.cuda, "empty_cache") as emptied,
                mock.patch.object(torch.cuda, "device_count", return_value=1),
                mock.patch.object(torch.cuda, "memory_reserved", side_effect=[each for each in reserved]),
            ):
                vramctl.trim()
            return emptied.call_count

        self.assertEqual(rounds(9 * GIB, 9 * GIB), 1)
        self.assertEqual(rounds(9 * GIB, 8 * GIB + 1), 1)
        self.assertEqual(rounds(9 * GIB, 8 * GIB, 8 * GIB), 2)
        self.assertEqual(rounds(9 * GIB, 7 * GIB, 5 * GIB, 3 * GIB), 3)

    def test_an_error_of_torch_s_is_told_and_the_next_trim_works(self) -> None:
        with mock.patch.object(torch.cuda, "empty_cache", side_effect=RuntimeError("captures underway")):
            with self.assertRaisesRegex(errors.Invalid, "captures underway"):
                vramctl.trim()
        vramctl.trim()


class FromOutside(unittest.TestCase):
    def start(self, **environment: str) -> Program:
        program = Program("trainer", TORCH_HOLDER, **environment)
        self.addCleanup(program.__exit__)
        return program

    def command(self, *arguments: str) -> Any:
        return run([VRAMCTL, *arguments])

    def test_a_program_that_waits_for_input_is_trimmed(self) -> None:
        program = self.start()
        ran = self.command("trim", "trainer")
        self.assertEqual((ran.returncode, ran.stderr), (0, ""))
        self.assertIn("20.00 MiB returned", ran.stdout)
        self.assertIn("default: 20.00 MiB returned, 16.00 MiB stuck in partly used segments", ran.stdout)
        self.assertEqual(program.ask("segments"), "1")
        program.ask("fill")
        with vramctl.Client("trainer") as client:
            self.assertEqual(parts(client.trim()), {"default": (8, 0, 12, 20)})

    def test_the_package_is_not_imported_before_torch_uses_cuda(self) -> None:
        program = """
import sys
sys.path[:0] = [{tests!r}, {tests!r} + "/fake_torch"]
import torch
print("vramctl" in sys.modules)
torch.empty(1 << 20)
print("vramctl" in sys.modules)
import vramctl
print(vramctl.trim().returned_bytes)
""".format(tests=str(Path(__file__).resolve().parent))
        ran = self.command("run", "--", sys.executable, "-c", program)
        self.assertEqual((ran.stdout.split()[:2], ran.returncode), (["False", "True"], 0), ran.stderr)

    def test_the_ledger_splits_a_tag(self) -> None:
        self.start()
        answer = json.loads(self.command("gpus", "trainer", "--json").stdout)
        shares = [share for gpu in answer["gpus"] for share in gpu["shares"] if share.get("of") == "default"]
        split = [(share["live_bytes"], share["cached_bytes"], share["fragmented_bytes"], share["bytes"]) for share in shares]
        self.assertEqual(split, [(4 * MIB, 20 * MIB, 16 * MIB, 40 * MIB)])
        text = self.command("gpus", "trainer").stdout
        for line in ("  live", "  cached by the allocator (vramctl trim)", "  free in partly used segments"):
            self.assertIn(line, text)
        shares = [share for ledger in vramctl.ledger() for share in ledger.shares if share.of == "default"]
        self.assertEqual([share.cached_bytes for share in shares], [20 * MIB])

    def test_before_a_pause_and_not_while_it_is_held(self) -> None:
        self.start()
        trimmed = json.loads(self.command("trim", "trainer", "--json").stdout)["processes"][0]["trimmed"]
        paused = json.loads(self.command("pause", "trainer", "--json").stdout)["processes"][0]
        self.assertEqual((trimmed["returned_bytes"], paused["report"]["bytes"]), (20 * MIB, 20 * MIB))
        ran = self.command("trim", "trainer")
        self.assertEqual(ran.returncode, 1)
        self.assertIn("is held", ran.stderr)
        self.command("resume")
        self.assertEqual(self.command("trim", "trainer").returncode, 0)

    def test_a_thread_that_keeps_the_interpreter_lock_leads_to_a_time_out_and_nothing_happens_later(self) -> None:
        program = self.start()
        self.assertEqual(program.ask("lock"), "locked")
        ran = self.command("trim", "trainer", "--timeout", "0.5")
        self.assertEqual(ran.returncode, 5, ran.stderr)
        self.assertIn("not within 500 ms: it has not begun, and will not", ran.stderr)
        self.assertEqual(program.ask(""), "unlocked")
        self.assertEqual(program.ask("segments"), "2")
        self.assertIn("20.00 MiB returned", self.command("trim", "trainer").stdout)
        self.assertEqual(program.ask("segments"), "1")

    def test_the_ledger_does_not_wait_for_the_interpreter_lock(self) -> None:
        program = self.start()
        self.assertEqual(program.ask("lock"), "locked")
        ran = self.command("gpus", "trainer")
        self.assertEqual(ran.returncode, 0, ran.stderr)
        self.assertNotIn("cached by", ran.stdout)

    def test_a_capture_in_another_thread_goes_on(self) -> None:
        program = self.start()
        self.assertEqual(program.ask("capture"), "capturing")
        ran = self.command("trim", "trainer")
        self.assertIn("50.00 MiB returned", ran.stdout, ran.stderr)
        self.assertIn("without a tag: 30.00 MiB returned", ran.stdout)
        self.assertEqual(program.ask("go on"), "0")

    def test_a_watch_trims_when_little_is_free(self) -> None:
        program = self.start()
        self.assertEqual(program.ask("segments"), "2")
        self.command("watch", "trainer", "--below", "2040M", "--trim")
        eventually("trimmed", lambda: program.ask("segments") == "1")

    def test_a_forked_child_has_no_thread_of_it(self) -> None:
        self.assertEqual(self.start().ask("child"), "0")

    def test_a_child_forked_while_the_thread_is_being_started_has_its_own(self) -> None:
        self.assertEqual(self.start().ask("child-in-between"), "1")

    def test_a_program_that_ends_in_the_middle_ends_well(self) -> None:
        program = self.start()
        self.assertEqual(program.ask("lock 1"), "locked")
        assert program.child.stdin is not None
        program.child.stdin.write("end\n")
        program.child.stdin.flush()
        ran = self.command("trim", "trainer", "--timeout", "20")
        # 5: on a busy machine, it may take seconds to end, and answers nobody then.
        self.assertIn(ran.returncode, (0, 1, 3, 5), ran.stderr)
        self.assertEqual(program.child.wait(100), 0)

    def test_a_program_without_torch_says_so(self) -> None:
        with Program("engine", HOLDER):
            ran = self.command("trim", "engine")
            self.assertEqual(ran.returncode, 1)
            self.assertIn("no allocator of this program returns cached memory: it has not used torch with CUDA yet", ran.stderr)
            self.start()
            ran = self.command("trim")
            self.assertEqual((ran.returncode, ran.stderr), (0, ""), "without a target, those that can be asked")
            self.assertIn("trimmed trainer", ran.stdout)

    def test_a_stopped_program_keeps_no_other_from_being_trimmed(self) -> None:
        with Program("engine", HOLDER) as engine:
            self.start()
            with engine.stopped():
                ran = self.command("trim")
            self.assertEqual(ran.returncode, 5)
            self.assertIn("trimmed trainer", ran.stdout)
            self.assertIn(f"engine (pid {engine.pid}): no answer within 2 s", ran.stderr)


if __name__ == "__main__":
    unittest.main()
