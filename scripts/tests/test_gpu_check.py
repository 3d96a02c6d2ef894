"""scripts/gpu-check without a GPU: how it parses the output of its programs, which of our functions those use, and how it
runs one program after another.
"""

import argparse
import ast
import contextlib
import importlib.util
import io
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
PROGRAMS = ROOT / "tests" / "gpu"
sys.path[:0] = [str(PROGRAMS), str(ROOT / "scripts"), str(ROOT / "python/tests/fake_torch")]

import torch  # noqa: E402

import common  # noqa: E402
import kinds  # noqa: E402
import section  # noqa: E402
import suspend  # noqa: E402
import torch_package  # noqa: E402
from measure.run import Run  # noqa: E402
from measure.setup import SMI  # noqa: E402


class Reading(unittest.TestCase):
    def test_what_unittest_says_wherever_it_stands(self):
        result = """\
test_a (__main__.Tests.test_a) ... ok
test_b (__main__.Tests.test_b) ... skipped 'OK without it'
%s
----------------------------------------------------------------------
Ran %d test%s in 55.394s

%s
%s"""
        warning = "[W1120 20:47:23.472399454 CudaIPCTypes.cpp:16] Producer process has been terminated"
        for before, after in (("", ""), ("", f"{warning}\n"), (warning, f"{warning}\nOK, all else is well\n")):
            for count, verdict in ((32, "OK"), (32, "OK (skipped=3)"), (1, "FAILED (failures=1)"), (0, "NO TESTS RAN")):
                text = result % (before, count, "" if count == 1 else "s", verdict, after)
                self.assertEqual(section.unittest_result(text), (count, verdict), text)
        for text in ("", "OK\n", "test_a ... ok\nSegmentation fault\n", "Ran 3 tests in 1.0s\n"):
            self.assertEqual(section.unittest_result(text), (0, "no verdict"), text)


class FirstGpu(unittest.TestCase):
    def test_it_is_the_one_that_programs_see(self):
        run = Run.__new__(Run)
        run.options = argparse.Namespace(smi=SMI)
        run.smi = lambda which, *_: which
        for visible, asked in (("1,0", "--id=1"), ("GPU-0f5c", "--id=GPU-0f5c"), ("", "--id=0")):
            with mock.patch.dict(os.environ, CUDA_VISIBLE_DEVICES=visible):
                self.assertEqual(run.gpu("memory.used"), asked)

    def test_properties_are_of_those_that_programs_see_in_their_order(self):
        with tempfile.TemporaryDirectory() as folder:
            smi = pathlib.Path(folder, "nvidia-smi")
            smi.write_text('#!/bin/sh\nfor word; do case $word in --id=*) echo "10${word#--id=}"; exit;; esac; done\necho 100\necho 101\necho 102\n')
            smi.chmod(0o755)
            ask = "import common; print(common.used_mib(), common.used_mib_here())"
            for visible, wanted in ((None, "[100, 101, 102] 100"), ("1", "[101] 101"), ("2, 0", "[102, 100] 102")):
                environment = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT / "tests/gpu")}
                environment.pop("CUDA_VISIBLE_DEVICES", None)
                environment |= {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
                ran = subprocess.run([sys.executable, "-c", ask], env=environment, stdout=subprocess.PIPE, text=True)
                self.assertEqual(ran.stdout.strip(), wanted, visible)


class Sizes(unittest.TestCase):
    def test_what_fills_a_gpu_fits_and_leaves_no_room_for_the_program(self):
        """An H100 and an H200 with nothing on them, and a GPU that another program has half filled: the memory.free of each, in MiB."""
        free = [81079, 143156, 71578]
        with mock.patch.object(
            common, "smi", lambda query: [str(mib) for mib in free] if query == "memory.free" else self.fail(query)
        ):
            for gpu, mib in enumerate(free):
                left = mib - common.most_gib(gpu) * 1024
                self.assertGreater(left, 2 << 10, "its context needs memory, too")
                self.assertLess(left, suspend.PROGRAM_GIB << 10)


class Package(unittest.TestCase):
    """Catches, without a GPU, mistakes in the checks for the real torch."""

    def test_what_holds_for_torch_holds_for_its_stand_in(self):
        """Everything except what kernels compute."""
        with mock.patch.object(torch_package, "tensor", lambda mib, value=0: torch.empty(mib << 20, device="cuda")):
            for part in (torch_package.pools, torch_package.threads, torch_package.expandable, torch_package.costs):
                part()
        self.assertEqual(torch_package.failed, [])

    def test_what_is_used_is_there(self):
        modules = {"vramctl": "vramctl", "_torch": "vramctl._torch"}
        used = set()
        for program in PROGRAMS.glob("*.py"):
            for node in ast.walk(ast.parse(program.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
                    used.add((modules[node.value.id], node.attr))
        self.assertIn(("vramctl._torch", "free"), used)
        self.assertEqual([name for name in sorted(used) if not hasattr(importlib.import_module(name[0]), name[1])], [])


# A program like those of tests/gpu/programs, on the simulated GPU. Its argument is what goes wrong.
STAND_IN = """
import ctypes, sys, time
sys.path.append({folder!r})
import loop

ctypes.CDLL("libcudart.so.13", mode=ctypes.RTLD_GLOBAL)
cuda = ctypes.CDLL(None)
fault = sys.argv.pop()

class Memory:
    def __init__(self, total):
        if fault == "start":
            raise RuntimeError("no such GPU")
        self.at, self.bytes, self.comparisons = ctypes.c_void_p(), total, 0
        assert cuda.cudaMalloc(ctypes.byref(self.at), ctypes.c_size_t(total)) == 0

    def write(self, seed):
        assert cuda.cudaMemset(self.at, seed % 251, ctypes.c_size_t(self.bytes)) == 0

    def read(self):
        found = ctypes.create_string_buffer(self.bytes)
        assert cuda.cudaMemcpy(found, self.at, ctypes.c_size_t(self.bytes), 2) == 0
        return found.raw

    def differing(self, seed):
        self.comparisons += 1
        if fault == "hang" and self.comparisons == 4:
            time.sleep(60)
        if fault == "end" and self.comparisons == 4:
            sys.exit(3)
        return self.bytes - self.read().count(seed % 251) + (fault == "contents" and self.comparisons == 4)

    def checksum(self):
        return sum(self.read()[::4096])

print("a package says hello")
loop.serve(Memory, version="stand-in 1")
"""


class Sections(unittest.TestCase):
    def told(self, seconds, limit):
        """What a section prints whose command hangs and may take that long, in a run with that limit."""
        hangs = "echo stuck in line 7 >&2; echo $((6 * 7)) times; echo 'ok: half of it'; exec sleep 60"

        class Nccl(unittest.TestCase):
            @section.section(100)
            def test_nccl(self, run):
                run.checked("a script", "sh", "-c", hangs, seconds=seconds)

        printed = io.StringIO()
        with tempfile.TemporaryDirectory() as folder:
            run = section.Check(argparse.Namespace(work=folder, out=folder, bin=folder, libcudart="", limit=limit, smi="simgpu-smi"))
            told = mock.patch.object(run, "report"), contextlib.redirect_stdout(printed)
            with mock.patch.object(section, "session", lambda: run), told[0], told[1]:
                result = unittest.TestResult()
                Nccl("test_nccl").run(result)
            run.log_file.close()
        ((_, self.failure),) = result.failures
        self.checks = [(one["check"], one["ok"]) for one in run.checks]
        return printed.getvalue()

    def test_a_limit_that_was_too_small_is_not_blamed_on_the_command(self):
        told = self.told(seconds=30, limit=16)
        self.assertIn("sh -c: no end before the section's time was used up: a larger --limit may help", told)

    def test_what_a_section_wrote_before_it_failed_is_shown(self):
        """The log has it, too, but nobody looks there."""
        told = self.told(seconds=1, limit=100)
        self.assertIn("FAILED nccl: runs to its end: Failed: sh -c: no end within 1 s", told)
        self.assertIn("runs to its end: Failed: sh -c", self.failure)
        for line in ("stuck in line 7", "42 times"):
            self.assertRegex(told, rf"(?m)^    (\[nccl\] )?{line}$")
        self.assertEqual(self.checks, [("half of it", True), ("runs to its end", False)], "and what it had checked counts")


class Whole(unittest.TestCase):
    """The program, on a simulated machine of its own: with the sections that need no kernels."""

    def test_sections_run_and_are_reported(self):
        built = pathlib.Path(os.environ["VRAMCTL_LIB"]).parent
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LD_", "SIMGPU_", "VRAMCTL_", "PYTHONPATH"))}
        with tempfile.TemporaryDirectory() as folder:
            simgpu = [ROOT / "scripts" / "simgpu", "--memory", "2G", "--dir", folder]
            command = [*simgpu, sys.executable, ROOT / "scripts" / "gpu-check", "--bin", built, "--out", folder, "--only", "waits,move"]
            ran = subprocess.run([*command, "--gib", "1"], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
            written = json.loads(pathlib.Path(folder, "gpu-check.json").read_text())
        checks = {name: [one["ok"] for one in written["checks"] if one["section"] == name] for name in ("waits", "move")}
        self.assertTrue(len(checks["waits"]) > 10 and all(checks["waits"]), ran.stdout)
        self.assertEqual((checks["move"], ran.returncode), ([], 1), ran.stdout)
        self.assertIn("not run: move", ran.stdout, "there is one GPU")


class Programs(unittest.TestCase):
    """The section `programs`, on a simulated machine of its own."""

    def setUp(self):
        done = contextlib.ExitStack()
        self.addCleanup(done.close)
        self.folder = pathlib.Path(done.enter_context(tempfile.TemporaryDirectory()))
        self.program = self.folder / "stand_in.py"
        self.program.write_text(STAND_IN.format(folder=str(kinds.FOLDER)))
        (self.folder / "gpu").mkdir()
        done.enter_context(mock.patch.dict(os.environ, SIMGPU_DIR=str(self.folder / "gpu"), SIMGPU_MEMORY="256M"))
        for name in ("LD_PRELOAD", "PYTHONPATH"):
            os.environ.pop(name, None)

    def run_kinds(self, chosen, cycles=2):
        """Runs the section with these kinds: the rows of its table, and the table."""
        options = argparse.Namespace(
            root=str(ROOT), bin=str(pathlib.Path(os.environ["VRAMCTL_LIB"]).parent), work=str(self.folder), out=str(self.folder),
            libcudart="/nowhere", smi="simgpu-smi", kinds="", limit=100, cycles=cycles, program_mib=8, other_gib=1,
        )  # fmt: skip
        how = mock.patch.dict(kinds.HOW, no_such_package="get it")
        with how, mock.patch.object(kinds, "KINDS", chosen), contextlib.redirect_stdout(io.StringIO()):
            run = section.Check(options)
            run.env.pop("VRAMCTL_TAG", None)
            with mock.patch.object(run, "hog", return_value=None), run.within("programs", 100):
                kinds.section(run)
            self.assertEqual(run.report(), all(row["state"] == "ok" for row in run.programs), run.checks)
            run.log_file.close()
        written = json.loads((self.folder / "gpu-check.json").read_text())
        self.assertEqual(written["programs"], run.programs)
        return {row["name"]: row for row in run.programs}, (self.folder / "gpu-check.md").read_text()

    def stand_in(self, fault, **more):
        return kinds.Kind(f"stand-in, {fault}", str(self.program), (fault,), **more)

    def test_each_gets_its_verdict_and_none_stops_the_next(self):
        rows, table = self.run_kinds(
            {
                "absent": kinds.Kind("absent", "absent.py", needs=("no_such_package",)),
                "start": self.stand_in("start"),
                "end": self.stand_in("end"),
                "contents": self.stand_in("contents"),
                "hang": self.stand_in("hang", seconds=2),
                "unmanaged": self.stand_in("none", env={"VRAMCTL_MIN_BYTES": "1G"}, counted=False),
                "good": self.stand_in("none"),
                "more": self.stand_in("none", counted=False),
            }
        )
        self.assertEqual(
            {name: row["state"] for name, row in rows.items()},
            {"absent": "not run", **dict.fromkeys(("start", "end", "contents", "hang", "unmanaged"), "failed"), "good": "ok", "more": "ok"},
        )  # fmt: skip
        for name, said in {
            "absent": "no_such_package is missing",
            "start": "RuntimeError: no such GPU",
            "end": "has ended, with 3",
            "contents": "contents differ",
            "hang": "not done within 2 s",
            "unmanaged": "none of its memory is managed",
        }.items():
            self.assertIn(said, rows[name]["problems"][0])
        good = rows["good"]
        self.assertEqual((good["before_mib"], good["paused_mib"], good["managed_mib"]), (8, [0, 0], [8, 8]))
        self.assertEqual((good["equal"], len(good["pause_ms"]), good["version"]), (2, 2, "stand-in 1"))
        self.assertEqual((rows["contents"]["equal"], len(rows["contents"]["resume_ms"])), (1, 2))
        self.assertIn("1 of 6 and 1 of 2 more paused and resumed with equal contents", table)
        self.assertRegex(
            table, r"\| stand-in, none \(stand-in 1\) \| 8 MiB \| 0 MiB \| 8 \| \d+ ms \| \d+ ms \| 2/2 \| 1 GiB \| ok \|"
        )

    def test_all_kinds_are_counted_and_have_a_program(self):
        self.assertEqual(sum(kind.counted for kind in kinds.KINDS.values()), 11)
        self.assertEqual(set(kinds.chosen("numba,static")), {"static", "numba"})
        with self.assertRaises(SystemExit):
            kinds.chosen("static,statik")
        for name, kind in kinds.KINDS.items():
            if kind.program.endswith(".py"):
                ast.parse((kinds.FOLDER / kind.program).read_text())
            for need in kind.needs:
                self.assertIn(need, kinds.HOW, name)

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "no C compiler")
    def test_the_driver_program_is_right_by_itself(self):
        machine = kinds.Machine(real=False)
        options = argparse.Namespace(work=str(self.folder), root=str(ROOT), libcudart="/nowhere")
        builder = kinds.Builder(argparse.Namespace(options=options, log=print), machine)
        self.addCleanup(builder.end)
        for name, more in (("driver", ()), ("virtual", ("--small", "5"))):
            command = [*builder.command(kinds.KINDS[name], 132), *more]
            ran = subprocess.run(
                [str(part) for part in command], input="check\ncheck\n", capture_output=True, text=True, timeout=60
            )
            self.assertEqual(ran.returncode, 0, ran.stdout + ran.stderr)
            ready, *answers = map(json.loads, ran.stdout.splitlines())
            self.assertEqual((ready["bytes"], ready["differing"]), (132 << 20, 0))
            wanted = {"differing": 0, "sum_equal": True, "rewritten_differing": 0, "new_differing": 0}
            self.assertEqual(answers, [wanted, wanted])


if __name__ == "__main__":
    unittest.main()
