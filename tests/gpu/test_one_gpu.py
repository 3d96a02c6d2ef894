"""What one real GPU shows and the simulated one cannot."""

import json
import sys
import unittest

import kinds
from benchmarks import overhead
from measure.child import Failed
from section import HERE, ROOT, gpus, section, unittest_result

PACKAGE = ROOT / "python" / "vramctl"


def need_torch(run):
    code, text, _ = run.command(sys.executable, "-c", "import sys, torch; sys.exit(not torch.cuda.is_available())")
    if code:
        raise Failed(f"PyTorch that sees the GPU is missing in {sys.executable}: pip install torch, or leave it out (--only). {text[-200:]}")


@unittest.skipUnless(gpus(), "there is no GPU")
class OneGpu(unittest.TestCase):
    @section(100)
    def test_python(self, run):
        """the Python package with the real torch: pools by tag, nested regions, threads, live blocks, CUDA graphs, expandable segments"""
        need_torch(run)
        # Its exit, too: torch's pools outlive the interpreter.
        command = (run.bin / "vramctl", "run", "--", sys.executable, HERE / "torch_package.py")
        run.checked("torch_package.py", *command, env={**run.env, "VRAMCTL_PYTHON": str(PACKAGE)}, seconds=90)

    @section(250)
    def test_saver(self, run):
        """the stand-in for torch_memory_saver with the real torch: all of its tests"""
        need_torch(run)
        name = "torch_memory_saver_hook_mode_{}{}.abi3.so"
        links = [PACKAGE / "dropin" / name.format(mode, suffix) for mode in ("preload", "torch") for suffix in ("", "_cu12", "_cu13")]
        try:
            for link in links:
                link.unlink(missing_ok=True)
                link.symlink_to((run.bin / "libvramctl.so").resolve())
            tests = PACKAGE.parent / "tests" / "test_torch_memory_saver.py"
            command = (run.bin / "vramctl", "run", "--", sys.executable, tests, "--verbose")
            code, text, taken = run.command(*command, env={**run.env, "VRAMCTL_PYTHON": str(PACKAGE)}, seconds=240)
        finally:
            # They point into a temporary folder. scripts/test-python makes its own.
            for link in links:
                link.unlink(missing_ok=True)
        for line in text.splitlines():
            if line.startswith(("FAIL: ", "ERROR: ")):
                run.expect(line[:80], False, "see the log")
        ran, verdict = unittest_result(text)
        told = f"{ran} tests ran: {verdict}, exit code {code}"
        run.expect("the tests pass", code == 0 and ran > 0 and verdict.startswith("OK"), told)
        run.say(f"  {told} ({taken:.1f} s)")

    @section(160)
    def test_engine(self, run):
        """scripts/demo, with the C engine linked to the real libcudart"""
        weights = max(256, run.options.gib * 1024 * 3 // 10)
        sizes = ("--weights-mib", weights, "--kv-mib", weights // 3)
        code, text, taken = run.command(ROOT / "scripts" / "demo", "--real", "--bin", run.bin, *sizes, seconds=150, env=run.app_env)
        run.demo = text.splitlines()
        last = run.demo[-1] if run.demo else ""
        run.expect("scripts/demo, linked to the real libcudart", code == 0, last)
        run.say(f"  {last} ({taken:.1f} s)")

    @section(60)
    def test_waits(self, run):
        """a pause waits for a stream that waits for a value, in any context of the device, and cudaFreeAsync does not wait; the program destroys a
        context"""
        run.preloaded("waits.py", 50)

    @section(180)
    def test_stalls(self, run):
        """no launch and no event record of a program takes 1 ms longer while a pause gives up on its work, while its host memory is unpinned, or
        while a kernel is loaded: a busy program, a pipeline, streams that wait for each other, and a persistent kernel"""
        run.script("stalls.py", 170)

    @section(310)
    def test_stream_ordered(self, run):
        """loops that allocate, set and free memory in the order of a stream, in C and with PyTorch's backend for cudaMallocAsync, with and without the
        library in turns: a round takes at most 10% longer, and afterwards the memory is free"""
        run.script("stream_ordered.py", 300, run.options.libcudart)

    @section(90)
    def test_guard(self, run):
        """work on paused memory destroys the context; with a guard under the memory it does not, the resume reports it, and contents are as before"""
        run.preloaded("guard.py", 80, VRAMCTL_GUARD="1")

    @section(160)
    def test_hold(self, run):
        """pauses a PyTorch training loop at twenty random moments: its losses are those of an undisturbed run, bit for bit"""
        run.script("hold.py", 150)

    @section(160)
    def test_suspend(self, run):
        """a PyTorch program leaves the GPU in the middle of its work and comes back, ten times; the driver's checkpoint next to it"""
        run.script("suspend.py", 150)

    @section(160)
    def test_ledger(self, run):
        """compares `vramctl gpus` with nvidia-smi, for PyTorch with a captured graph, active and paused, a trainer, and a program without
        the library; on two GPUs, for NCCL, too"""
        run.script("ledger.py", 150)

    @section(120)
    def test_report(self, run):
        """each phase of examples/rl_step.py runs out of memory, and the report names the tag, the library and the line of Python that made the
        request, and what could be freed"""
        run.script("report.py", 110, PACKAGE)

    @section(240)
    def test_watch(self, run):
        """what `vramctl watch` costs a training step with collectives, compared with asking the driver before each collective, as Relax does; and that
        watch and trim work, also while a graph is being captured; with NCCL if there are two GPUs"""
        run.script("watch.py", 230, PACKAGE)

    @section(120)
    def test_trace(self, run):
        """what `vramctl run --trace` costs the same training steps"""
        run.script("trace.py", 110, PACKAGE)

    @section(120)
    def test_sharing(self, run):
        """a trainer sends 15 GiB to an engine by CUDA IPC, bucket by bucket, from managed memory to managed memory, before and after pauses of the
        engine"""
        run.script("handover.py", 110)

    @section(300)
    def test_turns(self, run):
        """programs that share the GPU by themselves (`vramctl run --share`): two training loops that are always busy, and ten programs that work now
        and then. Every result is that of a program alone"""
        need_torch(run)
        run.script("turns.py", 200, "loops", run.options.gib * 2, 60)
        run.script("turns.py", 95, "cells", run.options.gib // 2, 10, 40)

    @section(200)
    def test_overhead(self, run):
        """scripts/bench overhead"""
        figures = run.work / "overhead"
        bench = (ROOT / "scripts" / "bench", "overhead", "--real", "--bin", run.bin, "--rounds", 7, "--out", figures)
        code, text, _ = run.command(*bench, seconds=190)
        if not (figures / "overhead.json").exists():
            raise Failed(f"exit code {code}: {text}")
        run.overhead = json.loads((figures / "overhead.json").read_text())["rows"]
        for row in run.overhead:
            if row["limit"] is not None:  # else it shows how far measurements scatter
                told = f"{row['extra']:+.2f} {row['unit']}, at most {row['limit']} {row['unit']}"
                run.expect(f"{row['what']}: {row['how']}", row["ok"], told)
        run.say(f"  {len(overhead.table(run.overhead)) - 2} rows measured")

    @section(540)
    def test_programs(self, run):
        """one program for each way to allocate: nvcc with the shared and the static runtime, cudaMallocAsync, the driver API, PyTorch with each of its
        allocators, Triton, CuPy, JAX, Numba; and per-thread default streams, and virtual memory of a program's own. Each is paused from the shell to
        under 1.3 GiB in use on the whole GPU, while another process uses its memory, and resumed; contents are compared and rewritten on the GPU. If
        something that a program needs is missing, it is named, and the program counts as failed"""
        kinds.section(run)


@unittest.skipUnless(gpus(), "there is no GPU")
class Driver(unittest.TestCase):
    @section(210)
    def test_restore(self, run):
        """what the driver's checkpoint and restore spend their time on: a context alone, and with one thing more: memory, streams, events, modules"""
        run.script("restore.py", 200)
