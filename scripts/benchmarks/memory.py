"""Pause and resume against the limits of the machine.

Measures, in one run on one machine:

  - the limits: copies between pinned host memory and the GPU, a pass over device memory,
    and the driver's calls for the same allocations,
  - this library: pause and resume with contents kept in host memory (first, steady,
    pre-warmed, nothing changed, 1% changed) and discarded,
  - the Python package torch_memory_saver on the same allocations, if it and PyTorch are
    installed.

Prints one table, and writes memory.md, memory.json (every figure), memory-chart.json (what `scripts/pictures bench` draws if it is docs/pictures/bench.json) and memory.log.
Checks contents after every resume, and every byte once per set. Exits with 1 if something
failed or was not reached; writes what it has measured anyway. On an H200, 3 of 10 minutes are
torch_memory_saver's. The full sizes need 100 GiB of GPU memory and 64 GiB of host memory.

sets:
  24x1g    24 allocations of 1 GiB
  model    500 of 20 to 200 MiB, as a model's weights have; 38 GiB
  4000x2m  4000 of 2 MiB
  64x1g    64 of 1 GiB, contents discarded
  1x100g   1 of 100 GiB, discarded; and kept, where the host has the memory
  72x1174m, 2000x8m  as they say; only with --turns
  idle     what the library's threads and device memory cost at rest
  swap     two processes, each with 60% of the GPU, in turns, and a trainer and an engine
"""

import contextlib
import dataclasses
import glob
import json
import os
import pathlib
import socket
import subprocess
import sys
import time

from benchmarks import memory_report as report
from benchmarks.sets import PIECE, Set, all_sets
from measure import run, setup
from measure.child import Failed, Program
from measure.run import host_memory
from measure.tables import GIB, MIB
from measure.tables import size as gib

HERE = pathlib.Path(__file__).resolve().parent

# Seconds of overhead per process: its start, the driver's, its exit.
START = 4
# Host memory to leave free.
HOST_SPARE = 6 * GIB
# Rest before each resume, and before each pause that keeps nothing, in ms.
RESTED_MS = 500
# Device memory to leave for the contexts of two programs, one of them PyTorch's.
DEVICE_SPARE = 7 * GIB
# What is measured in turns if no sets are named.
TURNS = ("1x100g", "72x1174m", "2000x8m", "24x1g")


def options(add):
    add("--sets", default="", metavar="LIST", help="only these sets, separated by commas (all)")
    add("--discarded", action="store_true", help="only the sets' steps that discard contents")
    turns = "this library and torch_memory_saver in turns, on one GPU, with what both do: discard, and keep contents with and without retained "
    add("--turns", action="store_true", help=f"{turns}backups; and the driver's calls alone ({', '.join(TURNS)}, or as much as fits)")
    add("--repeat", type=setup.count, metavar="N", help="samples per figure; reports medians (5)")
    add("--scale", type=setup.count, metavar="F", help="divides the sizes, for a trial (1)")
    add("--tms", default="", metavar="DIR", help="where torch_memory_saver is unpacked, if it is not installed")
    add("--no-tms", action="store_true", help="leave torch_memory_saver out")


def main(options):
    options.repeat, options.scale = options.repeat or (2 if options.simulated else 5), options.scale or (512 if options.simulated else 1)
    setup.machine(options, "--memory", "512M")
    setup.prepare(options)
    setup.compile(options.work / "raw", HERE / "raw.c")
    runtime = next(name for name in ("libcudart.so", *map("libcudart.so.{}".format, ("13", "12", "11.0"))) if os.path.exists(f"{options.libcudart}/{name}"))
    headers, libraries = f"-I{setup.ROOT}/tests/apps", [f"-L{options.libcudart}", f"-l:{runtime}", "-Wl,--allow-shlib-undefined"]
    setup.compile(options.work / "set", HERE / "set.c", headers, *libraries)
    return Bench(options).all()


class Bench(run.Bench):
    def __init__(self, options):
        none = ("sets", "limits", "calls", "samples", "slow", "memory", "stages", "idle", "swap")
        settings = {"repeat": options.repeat, "scale": options.scale, "turns": options.turns}
        super().__init__(options, "memory", **settings, **{name: {} for name in none}, torch_memory_saver=None)
        self.repeat, self.scale, self.saver = options.repeat, options.scale, None
        self.total = int(self.gpu("memory.total")) * MIB
        self.every_set = all_sets(self.scale, self.total - DEVICE_SPARE if self.total > 2 * DEVICE_SPARE else self.total * 3 // 4)
        self.sets = [a for a in self.every_set if options.turns or not a.turns_only]
        names = [a.name for a in self.sets] + ([] if options.turns else ["idle", "swap"])
        wanted = options.sets.split(",") if options.sets else TURNS if options.turns else names
        if unknown := [name for name in wanted if name not in names]:
            raise SystemExit(f"bench: no such set: {', '.join(unknown)}. There are: {', '.join(names)}")
        self.idle_wanted, self.swap_wanted = (name in wanted and not options.discarded for name in ("idle", "swap"))
        self.sets = [a for a in self.sets if a.name in wanted]
        if options.discarded:
            self.sets = [dataclasses.replace(a, discard_only=True, huge=False) for a in self.sets]
        self.files = {a.name: a.write(self.work) for a in self.sets}
        self.data["sets"] = {a.name: {"title": a.title, "bytes": a.bytes, "allocations": len(a.sizes)} for a in self.sets}

    def record(self, name, system, row, seconds, slow):
        for kind, value in (("samples", seconds), ("slow", slow)):
            rows = self.data[kind].setdefault(name, {}).setdefault(system, {})
            rows.setdefault(row, []).append(value)
        rate = self.data["sets"].get(name, {}).get("bytes", 0) / seconds / 1e9
        self.log(f"# {name} {system} {row}: {seconds * 1e3:.2f} ms, {rate:.1f} GB/s, processor {slow:.2f}")

    def until_quiet(self, wanted, chosen, system, rows):
        """Repeats until each row has enough undisturbed samples (report.QUIET), up to three times as often."""
        slow = self.data["slow"]
        for turn in range(3 * wanted):
            of_system = slow.get(chosen.name, {}).get(system, {})
            if min(report.quiet_ones(of_system.get(row, [])) for row in rows) >= wanted:
                return
            yield turn

    # ---- the machine ----

    def device_memory(self, what):
        """used or total of GPU 0, in bytes."""
        return int(self.gpu(f"memory.{what}")) * MIB

    def raw(self, *arguments, seconds=120):
        """The results of raw.c: one object per line."""
        child = self.start(self.work / "raw", *arguments, env=self.app_env)
        found = []
        child.process.stdin.close()
        try:
            while True:
                found.append(json.loads(child.hear(seconds)))
        except Failed:
            if child.process.wait(20) != 0:
                raise Failed(
                    f"raw ended with {child.process.returncode}; see the log"
                ) from None
        return found

    def touch_host(self):
        """Touches host memory before anything is measured. A virtual machine may get its memory only when
        it is first touched, at a tenth of the speed."""
        kept = [a.bytes for a in self.sets if not a.discard_only]
        if self.options.turns:
            kept = [2 * bytes for bytes in kept]
        elif any(a.huge for a in self.sets):
            kept += [a.bytes for a in self.sets if a.huge]
        if self.swap_wanted:
            kept += [2 * self.swap_size()[1], sum(self.trainer_sizes()[:2])]
        goal = int(min(max(kept, default=0) * 1.05 + GIB / self.scale, 110 * GIB))
        for found in self.raw(
            "--bytes", 1, "host", goal, HOST_SPARE, os.cpu_count() or 1, seconds=90
        ):
            rates = self.data["limits"].setdefault(f"host_touch_{found['unit']}", [])
            rates.append(found["bytes"] / found["seconds"])
            if found["unit"] == "first":
                self.data["limits"]["host_touched"] = found["bytes"]
        self.data["host_bytes"] = host_memory("MemTotal")

    def measure_limits(self):
        size = max(64 * MIB, 8 * GIB // self.scale)
        for found in self.raw("--repeat", self.repeat, "--bytes", size, "limits"):
            key = found["what"] + (
                f"_{found['chunk'] // MIB}m" if found["what"].startswith("copy") else ""
            )
            self.data["limits"].setdefault(key, []).append(found["bytes"] / found["seconds"])

    def measure_calls(self, chosen):
        rest = self.rest_ms() * 6 // 10 if self.options.turns else 0
        command = ["--repeat", min(self.repeat, 3), "--rest", rest]
        for found in self.raw(*command, "calls", chosen.name, self.files[chosen.name]):
            self.record_calls(chosen, "alone", found, rested=rest > 0, gives=True)

    def record_calls(self, chosen, variant, found, rested, gives):
        """`rested`: the memory was allocated some time after the last release. `gives`: it was used, and released after a rest."""
        again = "_rested" if rested else ""
        for key, row in (("pause", "discard_pause"), ("resume", f"discard_resume{again}")):
            if f"slow_{key}" in found and (gives or key == "resume"):
                rows = self.data["slow"].setdefault(chosen.name, {}).setdefault(variant, {})
                rows.setdefault(row, []).append(found[f"slow_{key}"])
        calls = self.data["calls"].setdefault(chosen.name, {}).setdefault(variant, {})
        taking = ("create", "map", "access")
        sums = {f"resume{again}": sum(found[part] for part in taking), **{part + again: found[part] for part in taking}}
        if gives:
            giving = ("unmap", "release")
            sums.update({"pause": sum(found[part] for part in giving), **{part: found[part] for part in giving}})
        for key, seconds in sums.items():
            calls.setdefault(key, []).append(seconds)

    # ---- this library ----

    def set(self, name, with_library=True, **settings):
        env = dict(self.app_env)
        if with_library:
            env["LD_PRELOAD"] = self.env["VRAMCTL_LIB"]
            env.update({f"VRAMCTL_{key}": str(value) for key, value in settings.items()})
        child = self.start(self.work / "set", env=env, kind=Program, name=name)
        if child.hear(60) != ("ok with the library" if with_library else "ok without the library"):
            raise Failed(f"{name} did not start; see the log")
        return child

    def holding(self, chosen, fill=True, backup=0, **settings):
        """A process that holds the set, in a region with a backup as in set.c."""
        child = self.set(chosen.name, **settings)
        child.ask(f"alloc bench {backup} {self.files[chosen.name]}")
        if fill:
            child.ask("fill")
        return child

    def finish(self, child):
        child.close()
        self.children.remove(child)

    def host_bytes(self, child, what):
        return json.loads(child.ask("status"))["host"][what]

    def wait_for_host(self, child, done, seconds):
        end = time.monotonic() + seconds
        while not done(self.host_bytes(child, "ready_bytes")):
            if time.monotonic() > end:
                raise Failed("the library's host memory did not reach the expected size")
            time.sleep(0.02)

    def pause(self, child, chosen, row, backup=0):
        self.record(chosen.name, "vramctl", row, child.took(f"pause * {backup}"), child.slow)

    def resume(self, child, chosen, row):
        self.record(chosen.name, "vramctl", row, child.took("resume * 0"), child.slow)

    def rest(self):
        """Waits until the driver has scrubbed the released memory, as in a program that works between pauses."""
        time.sleep(self.rest_ms() / 1e3)

    def rest_ms(self):
        return 20 if self.data["simulated"] else RESTED_MS

    def check(self, child, how="sample"):
        child.ask(f"check * {how}")

    def remember(self, chosen, key, value):
        self.data["memory"].setdefault(chosen.name, {})[key] = value

    def stages(self, child, chosen, how, **fields):
        """One more pause and resume, through the socket, whose answer has the time of each stage."""
        for request in ("pause", "resume"):
            asked = {"version": 1, "request": request, **(fields if request == "pause" else {})}
            with socket.socket(socket.AF_UNIX) as control:
                control.settimeout(max(1, min(120, self.left())))
                control.connect(str(self.work / "sockets" / f"{child.process.pid}.sock"))
                control.sendall(json.dumps(asked).encode() + b"\n")
                answer = json.loads(control.makefile().readline())
            if answer.get("reply") != "done":
                raise Failed(f"{request}: {answer}")
            found = self.data["stages"].setdefault(chosen.name, {}).setdefault(how, {})
            found[request] = {"ms": answer["ms"], **answer["stages"]}

    def released(self, chosen):
        """Host memory is released after each resume. Each first pause gets a new process."""
        for turn in self.turns(self.repeat):
            child = self.holding(chosen, HOST_KEEP=0)
            used = host_memory("MemAvailable")
            before = child.memory("VmRSS")
            self.pause(child, chosen, "first")
            if turn == 0:
                self.remember(chosen, "vramctl_peak", child.memory("VmHWM") - before)
                self.remember(chosen, "vramctl_host_used", used - host_memory("MemAvailable"))
            self.resume(child, chosen, "resume_released")
            self.check(child)
            if turn == 0:
                time.sleep(3 if self.scale == 1 else 1)
                self.remember(chosen, "vramctl_rss_after", child.memory("VmRSS") - before)
            if turn < (2 if self.scale == 1 else 1):
                self.wait_for_host(child, lambda ready: ready == 0, 30)
                self.pause(child, chosen, "again")
                self.rest()
                self.resume(child, chosen, "resume_released_rested")
            if turn == 0:
                self.wait_for_host(child, lambda ready: ready == 0, 30)
                self.stages(child, chosen, "released")
                self.check(child, "full")
            self.finish(child)

    def kept(self, chosen):
        """The default: host memory stays ready for the next pause."""
        child = self.holding(chosen)
        self.pause(child, chosen, "first_kept")
        self.resume(child, chosen, "resume_kept")
        for _ in self.turns(self.repeat):
            self.pause(child, chosen, "kept")
            self.resume(child, chosen, "resume_kept")
        self.check(child)
        self.finish(child)

    def change_all(self, child, chosen):
        """Changes each piece, so that a retained backup has none of it."""
        child.ask(f"change {sum(size // PIECE for size in chosen.sizes)}")

    def retained(self, chosen):
        """Backups are retained, and everything has changed each time."""
        child = self.holding(chosen, RETAIN="*")
        before = child.memory("VmRSS")
        self.pause(child, chosen, "first_retained")
        self.resume(child, chosen, "resume_retained")
        for turn in self.turns(2 * self.repeat):
            self.change_all(child, chosen)
            self.pause(child, chosen, "steady")
            if turn % 2:
                self.rest()
            self.resume(child, chosen, "resume_retained_rested" if turn % 2 else "resume_retained")
            self.check(child)
        self.remember(chosen, "vramctl_retained_peak", child.memory("VmHWM") - before)
        self.stages(child, chosen, "retained")
        self.check(child, "full")
        self.finish(child)

    def hashed(self, chosen):
        """Backups are retained, and hashing finds what has changed."""
        child = self.holding(chosen, RETAIN="*")
        self.pause(child, chosen, "first_hashed")
        self.resume(child, chosen, "resume_hashed")
        self.stages(child, chosen, "unchanged")
        for _ in self.turns(self.repeat):
            self.pause(child, chosen, "unchanged")
            self.resume(child, chosen, "resume_hashed")
            self.check(child)
        for _ in self.turns(self.repeat):
            child.ask(f"change {max(1, sum(chosen.sizes) // PIECE // 100)}")
            self.pause(child, chosen, "changed")
            self.resume(child, chosen, "resume_hashed")
            self.check(child)
        self.check(child, "full")
        self.finish(child)

    def prewarmed(self, chosen):
        for _ in self.turns(min(self.repeat, 2)):
            child = self.holding(chosen, PREWARM=chosen.bytes)
            began = time.monotonic()
            self.wait_for_host(child, lambda ready: ready >= chosen.bytes, 90)
            self.remember(chosen, "prewarm_seconds", time.monotonic() - began)
            self.pause(child, chosen, "prewarmed")
            self.resume(child, chosen, "resume_prewarmed")
            self.pause(child, chosen, "prewarmed_again")
            self.resume(child, chosen, "resume_prewarmed")
            self.check(child)
            self.finish(child)

    def driver_alone(self, child, chosen, rested):
        """The driver's calls for the same set, in the same process and close in time: machines drift within minutes."""
        parts = ("create", "map", "access", "unmap", "release", "slow_resume", "slow_pause")
        rest = 0 if rested else self.rest_ms()
        took = map(float, child.ask(f"calls {rest} {self.files[chosen.name]}").split())
        self.record_calls(chosen, "beside", dict(zip(parts, took)), rested, gives=not rested)

    def discarded(self, chosen):
        child = self.holding(chosen, fill=False, backup=1)
        child.ask("scribble")
        # Ignore the first one in a process: it includes other start-up work.
        child.took("pause * 1")
        child.took("resume * 0")
        rows = ("discard_pause", "discard_resume")
        for _ in self.until_quiet(self.repeat, chosen, "vramctl", rows):
            child.ask("scribble")
            self.rest()
            self.pause(child, chosen, "discard_pause", backup=1)
            self.driver_alone(child, chosen, rested=False)
            self.resume(child, chosen, "discard_resume")
            self.check(child, "zero")
        rested = ("discard_resume_rested",)
        for _ in self.until_quiet(min(self.repeat, 3), chosen, "vramctl", rested):
            child.ask("scribble")
            child.took("pause * 1")
            self.rest()
            self.driver_alone(child, chosen, rested=True)
            child.took("resume * 0")
            child.took("pause * 1")
            self.rest()
            self.resume(child, chosen, "discard_resume_rested")
            self.check(child, "zero")
        self.stages(child, chosen, "discarded", backup="discard")
        self.finish(child)

    def huge(self, chosen):
        needed, free = chosen.bytes + HOST_SPARE, host_memory("MemAvailable")
        if free < needed:
            self.note(
                f"{chosen.title} with a backup was skipped: it needs {gib(needed)} of host memory, {gib(free)} are free."
            )
            return
        child = self.holding(chosen, HOST_KEEP=0)
        before = child.memory("VmRSS")
        self.pause(child, chosen, "first")
        self.remember(chosen, "vramctl_peak", child.memory("VmHWM") - before)
        self.resume(child, chosen, "resume_released")
        self.check(child)
        time.sleep(3 if self.scale == 1 else 1)
        self.remember(chosen, "vramctl_rss_after", child.memory("VmRSS") - before)
        self.finish(child)

    # ---- torch_memory_saver ----

    def find_saver(self):
        if self.options.no_tms:
            self.note("torch_memory_saver was skipped on request.")
            return
        env = dict(self.env)
        paths = [self.options.tms or "", env.get("PYTHONPATH", "")]
        env["PYTHONPATH"] = ":".join(p for p in paths if p)
        look = (
            "import importlib.metadata as m, json, os, torch\n"
            "from torch_memory_saver.utils import get_binary_path_from_package as get\n"
            "assert torch.cuda.is_available(), 'torch sees no GPU'\n"
            "print(json.dumps({'version': m.version('torch_memory_saver'), 'torch': torch.__version__,"
            " 'library': str(get('torch_memory_saver_hook_mode_preload')),"
            " 'site': os.path.dirname(os.path.dirname(torch.__file__))}))"
        )
        found = subprocess.run(
            [sys.executable, "-c", look], env=env, capture_output=True, text=True, timeout=60
        )
        if found.returncode != 0:
            why = found.stderr.strip().splitlines()[-1:] or ["no reason given"]
            self.note(f"torch_memory_saver is not available: {why[0]}")
            return
        self.saver = json.loads(found.stdout.strip().splitlines()[-1])
        self.data["torch_memory_saver"] = {key: self.saver[key] for key in ("version", "torch")}
        # Its preloaded library needs libcudart before torch loads its own.
        runtimes = sorted(glob.glob(f"{self.saver['site']}/nvidia/*/lib/libcudart.so.*"))
        folders = [os.path.dirname(path) for path in runtimes[-1:]] + [
            self.options.libcudart,
            env.get("LD_LIBRARY_PATH", ""),
        ]
        env["LD_LIBRARY_PATH"] = ":".join(f for f in folders if f)
        env["LD_PRELOAD"] = self.saver["library"]
        env["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
        self.saver_env = env

    def start_saver(self):
        child = self.start(sys.executable, HERE / "saver.py", env=self.saver_env, kind=Program)
        if child.hear(60).strip() != "ok":
            raise Failed("torch_memory_saver did not start; see the log")
        return child

    def saved(self, chosen):
        def record(row, question):
            self.record(chosen.name, "torch_memory_saver", row, child.took(question, 180), child.slow)

        child = self.start_saver()
        child.ask(f"alloc discarded 1 {self.files[chosen.name]}")
        child.took("pause discarded")
        child.took("resume discarded")
        system, rows = "torch_memory_saver", ("discard_pause", "discard_resume")
        for _ in self.until_quiet(self.repeat, chosen, system, rows):
            child.ask("fill discarded")
            self.rest()
            record("discard_pause", "pause discarded")
            record("discard_resume", "resume discarded")
        rested = ("discard_resume_rested",)
        for _ in self.until_quiet(min(self.repeat, 3), chosen, system, rested):
            child.ask("fill discarded")
            child.took("pause discarded")
            self.rest()
            record("discard_resume_rested", "resume discarded")
        child.ask("drop discarded")
        if not chosen.discard_only:
            child.ask(f"alloc kept 2 {self.files[chosen.name]}")
            child.ask("fill kept")
            free = host_memory("MemAvailable")
            record("first", "pause kept")
            self.remember(chosen, "saver_host_used", free - host_memory("MemAvailable"))
            record("resume", "resume kept")
            child.ask("check kept")
            record("again", "pause kept")
            child.ask("retain 1")
            record("resume_retained", "resume kept")
            for turn in self.turns(self.repeat + min(self.repeat, 2)):
                record("steady", "pause kept")
                rested = turn >= self.repeat
                if rested:
                    self.rest()
                record("resume_retained_rested" if rested else "resume_retained", "resume kept")
            child.ask("check kept")
        self.finish(child)

    # ---- both in turns: while one has its memory, the other's is paused ----

    def turns_discarded(self, sets):
        other = self.start_saver() if self.saver else None
        for chosen in sets:
            own = self.holding(chosen, fill=False, backup=1)
            own.ask("scribble")
            # The first one in a process includes other start-up work.
            for question in ("pause * 1", "resume * 0", "pause * 1"):
                own.took(question)
            sides = [("vramctl", own, "pause * 1", "resume * 0", "scribble", "check * zero")]
            if other:
                other.ask(f"alloc {chosen.name} 1 {self.files[chosen.name]}")
                for verb in ("pause", "resume", "pause"):
                    other.took(f"{verb} {chosen.name}")
                asked = (f"{verb} {chosen.name}" for verb in ("pause", "resume", "fill"))
                sides.append(("torch_memory_saver", other, *asked, None))
            for _ in self.turns(self.repeat):
                for system, child, pause, resume, fill, check in sides:
                    # The driver accounts for the memory that it has zeroed in the next call, whoever makes it: here, for the other's.
                    child.took(resume)
                    child.ask(fill)
                    self.rest()
                    self.record(chosen.name, system, "discard_pause", child.took(pause), child.slow)
                    self.record(chosen.name, system, "discard_resume", child.took(resume), child.slow)
                    if check:
                        child.ask(check)
                    child.took(pause)
                    self.rest()
                    self.record(chosen.name, system, "discard_resume_rested", child.took(resume), child.slow)
                    child.took(pause)
            own.took("resume * 0")
            own.ask("scribble")
            self.rest()
            self.stages(own, chosen, "discarded", backup="discard")
            self.finish(own)
            if other:
                other.took(f"resume {chosen.name}")
                other.ask(f"drop {chosen.name}")
            self.say(f"  {chosen.title}")

    def turns_kept(self, chosen):
        """First as both do by default, then with retained backups."""
        other = self.start_saver() if self.saver else None
        if other:
            other.ask(f"alloc set 2 {self.files[chosen.name]}")
            other.ask("fill set")

        def turn(sides):
            for child, system, words, row, back, check, retains in sides:
                self.record(chosen.name, system, row, child.took(f"pause {words}"), child.slow)
                if back.endswith("_rested"):
                    self.rest()
                if retains:
                    child.ask("retain 1")
                self.record(chosen.name, system, back, child.took(f"resume {words}"), child.slow)
                child.ask(check)

        ours = ("vramctl", "* 0")
        theirs = (other, "torch_memory_saver", "set")
        own = self.holding(chosen)
        for at in range(max(2, self.repeat)):
            sides = [(own, *ours, "kept" if at else "first", "resume_kept", "check * sample", False)]
            # Its pauses take ten times as long.
            if other and at < 2:
                sides.append((*theirs, "again" if at else "first", "resume", "check set", at == 1))
            turn(sides)
        self.stages(own, chosen, "kept ready")
        self.check(own, "full")
        self.finish(own)
        own = self.holding(chosen, RETAIN="*")
        for at in self.turns(self.repeat + 1):
            self.change_all(own, chosen)
            back = "resume_retained_rested" if at % 2 else "resume_retained"
            sides = [(own, *ours, "steady" if at else "first_retained", back, "check * sample", False)]
            if other:
                sides.append((*theirs, "steady", back, "check set", False))
            turn(sides)
        self.stages(own, chosen, "retained")
        self.check(own, "full")
        for child in filter(None, (own, other)):
            self.finish(child)

    def run_turns(self):
        """Everything that is compared with torch_memory_saver, in turns."""
        dropped = [chosen for chosen in self.sets if chosen.discard_only]
        if dropped:
            seconds = 10 + 4 * len(dropped) * self.repeat * self.rest_ms() / 1e3
            self.step("contents discarded, in turns", seconds, self.turns_discarded, dropped)
        for chosen in self.sets:
            if not chosen.discard_only:
                self.step(f"{chosen.title}, kept, in turns", 10 + chosen.bytes / GIB, self.turns_kept, chosen)
        for chosen in dropped:
            self.step(f"{chosen.title}: the driver's calls alone", 3, self.measure_calls, chosen)

    # ---- at rest ----

    def at_rest(self):
        chosen = next((a for a in self.sets if a.name == "24x1g"), None) or self.every_set[0]
        self.files.setdefault(chosen.name, chosen.write(self.work))
        found = self.data["idle"]
        found["set"], found["bytes"] = chosen.title, chosen.bytes
        plain = self.set("plain", with_library=False)
        plain.ask(f"alloc bench 0 {self.files[chosen.name]}")
        plain.ask("fill")
        found["device_without"] = self.device_memory("used")
        plain.ask(f"pin {chosen.bytes}", 120)
        found["device_pinned"] = self.device_memory("used")
        self.finish(plain)

        child = self.holding(chosen, RETAIN="*")
        found["device_allocated"] = self.device_memory("used")
        for _ in range(2):
            child.took("pause * 0")
            found["device_paused"] = self.device_memory("used")
            child.took("resume * 0")
        found["device_with"] = self.device_memory("used")
        time.sleep(1)  # let the library finish its work after the resume
        before = self.switches(child)
        time.sleep(2)
        after = self.switches(child)
        found["threads"] = {
            name: after[thread][1] - before.get(thread, (name, 0))[1]
            for thread, (name, _) in after.items()
        }
        found["switches"] = sum(
            after[thread][1] - before.get(thread, ("", 0))[1] for thread in after
        )
        found["device_own"] = found["device_with"] - found["device_pinned"]
        self.finish(child)

    @staticmethod
    def switches(child):
        """The library's threads: name and number of context switches."""
        found = {}
        for folder in glob.glob(f"/proc/{child.process.pid}/task/*"):
            with contextlib.suppress(OSError):
                name = pathlib.Path(folder, "comm").read_text().strip()
                if name.startswith("vramctl"):
                    lines = pathlib.Path(folder, "status").read_text().splitlines()
                    found[folder] = (
                        name,
                        sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line),
                    )
        return found

    # ---- two processes ----

    def part_of_gpu(self, part):
        return self.total * part / (1 if self.data["simulated"] else self.scale)

    def unit(self):
        """The size of each allocation."""
        return GIB if self.part_of_gpu(1) > 14 * GIB else PIECE * 4

    def in_units(self, size):
        return max(self.unit(), int(size) // self.unit() * self.unit())

    def swap_size(self):
        """Bytes per process, and how many of them are kept: as much as the host can hold twice."""
        whole = self.in_units(self.part_of_gpu(0.6))
        return whole, self.in_units(min(whole * 0.4, host_memory("MemAvailable") * 0.35))

    def trainer_sizes(self):
        """Of a trainer's state, an engine's weights and its KV cache: as much as the host can hold of the first two."""
        host = host_memory("MemAvailable")
        state, weights = min(self.part_of_gpu(0.5), host * 0.55), min(self.part_of_gpu(0.12), host * 0.13)
        return [self.in_units(size) for size in (state, weights, self.part_of_gpu(0.72))]

    def holder(self, name, row, kept, rest, **settings):
        """A process with memory whose contents are kept, and with some whose contents are discarded. `row`: where it counts when it leaves."""
        child = self.set(name, **settings)
        child.row, child.tags = row, []
        for tag, policy, size in (("weights", 2, kept), ("cache", 1, rest)):
            if size:
                sizes = Set(f"{tag}-of-{name}", "", [self.unit()] * (size // self.unit()))
                child.ask(f"alloc {tag} {policy} {sizes.write(self.work)}")
                child.tags.append(tag)
        child.ask("fill")
        return child

    def swap(self, retain):
        whole, kept = self.swap_size()
        settings = {"RETAIN": "*"} if retain else {}
        key = "retained" if retain else "released"
        found = self.data["swap"]
        found.update({"bytes": whole, "kept": kept})
        a = self.holder("a", key, kept, whole - kept, **settings)
        a.took("pause * 0")
        b = self.holder("b", key, kept, whole - kept, **settings)
        for turn in self.turns(self.repeat + 1, least=2):
            if retain:  # what has not changed would not be copied
                b.ask(f"change {whole // PIECE}")
            self.rest()
            out_begin, out_end = b.timed("pause * 0")
            # Like a real one, it waits for memory that is released late.
            in_begin, in_end = a.timed("resume * 10000")
            # The first swap includes the second process's first pause.
            row = key if turn > 0 else f"{key}_first"
            found.setdefault(row, []).append(in_end - out_begin)
            found.setdefault(f"{row}_pause", []).append(out_end - out_begin)
            found.setdefault(f"{row}_resume", []).append(in_end - in_begin)
            a.ask("check weights sample")
            a, b = b, a
        if (self.bin / "vramctl").exists():
            a, b = self.swap_by_command(a, b, change=whole // PIECE if retain else 0)
        b.ask("check weights full")
        for child in (a, b):
            self.finish(child)

    def swap_trainer(self):
        """What an RL step does: a trainer, all of whose memory is kept, and an engine, of which only the weights are, change places."""
        state, weights, cache = self.trainer_sizes()
        self.data["swap"]["trainer"] = {"kept": state, "weights": weights, "cache": cache}
        engine = self.holder("engine", "engine_leaves", weights, cache)
        engine.took("pause * 0")
        trainer = self.holder("trainer", "trainer_leaves", state, 0)
        _, active = self.swap_by_command(engine, trainer)
        active.ask("check weights full", seconds=120)
        for child in (engine, trainer):
            self.finish(child)

    def swap_by_command(self, a, b, change=0):
        """A pause, then a resume, as often as `repeat` says, and then as often `vramctl swap`: each from the first command's start to the last
        one's end.

        Each way in a row of its own, as in use: in turns, each would start from memory that the other one has taken and released. So the first of a
        row does not count."""
        found, kinds = self.data["swap"], len({a.row, b.row})
        for at_once in (False, True):
            for turn in self.turns((self.repeat + 1) * kinds, least=2 * kinds):
                if change:
                    b.ask(f"change {change}")
                self.rest()
                out, into = str(b.process.pid), str(a.process.pid)
                # At first, it has paused itself: a resume from outside then needs the tags.
                one_by_one = (["pause", "--pid", out], ["resume", "--pid", into, *a.tags, "--timeout", "10"])
                begin = time.monotonic()
                answers = [self.told(*arguments) for arguments in ([["swap", out, into]] if at_once else one_by_one)]
                if turn >= kinds:
                    row = b.row + ("_at_once" if at_once else "_one_by_one")
                    found.setdefault(row, []).append(time.monotonic() - begin)
                    found.setdefault(f"{row}_answers", []).append(answers)
                a.ask("check weights sample")
                a, b = b, a
        return a, b

    # ---- everything ----

    def run(self):
        size = sum(a.bytes for a in self.sets) / GIB
        self.say(f"{self.data['gpu']}; {self.repeat} repeats; {self.options.limit} s at most")
        self.step("host memory is touched once", 5, self.touch_host)
        self.step("limits: copies and a pass over device memory", 5, self.measure_limits)
        if not self.options.turns:
            for chosen in self.sets:
                self.step(f"{chosen.title}: the driver's calls alone", 3, self.measure_calls, chosen)
        self.step("torch_memory_saver: is it here?", 10, self.find_saver)
        if self.options.turns:
            self.run_turns()
        else:
            self.run_each()
        self.data["seconds"] = round(time.monotonic() - self.began, 1)
        self.say(f"done; {size:.0f} GiB of sets")

    def run_each(self):
        for chosen in self.sets:
            gigabytes = chosen.bytes / GIB
            title = f"{chosen.title}: vramctl"
            rests = 6 * self.repeat * self.rest_ms() / 1e3
            self.step(f"{title}, contents discarded", START + rests, self.discarded, chosen)
            if chosen.discard_only:
                continue
            self.step(f"{title}, first pause", START + gigabytes / 4, self.released, chosen)
            self.step(f"{title}, kept ready", START + gigabytes / 8, self.kept, chosen)
            self.step(f"{title}, retained", START + gigabytes / 8, self.retained, chosen)
            self.step(f"{title}, retained and hashed", START + gigabytes / 8, self.hashed, chosen)
            self.step(f"{title}, pre-warmed", START + gigabytes / 2, self.prewarmed, chosen)
        if self.idle_wanted:
            self.step("at rest", 10 if self.scale == 1 else 4, self.at_rest)
        if self.saver:
            for chosen in self.sets:
                needed = 8 + 4 * self.repeat * self.rest_ms() / 1e3
                needed += 0 if chosen.discard_only else chosen.bytes / GIB
                self.step(f"{chosen.title}: torch_memory_saver", needed, self.saved, chosen)
        if self.swap_wanted:
            for retain in (False, True):
                self.step(
                    f"two processes in turns, {'retained' if retain else 'released'}",
                    3 if self.data["simulated"] else 15 + 6 * self.repeat * self.rest_ms() / 1e3,
                    self.swap,
                    retain,
                )
            if (self.bin / "vramctl").exists():
                self.step(
                    "a trainer and an engine in turns", 3 if self.data["simulated"] else 25 + 8 * self.repeat * self.rest_ms() / 1e3, self.swap_trainer
                )
        for chosen in self.sets:
            if chosen.huge:
                self.step(
                    f"{chosen.title}: vramctl, with a backup",
                    START + chosen.bytes / GIB / 8,
                    self.huge,
                    chosen,
                )

    def markdown(self, data):
        if chart := report.chart(data):
            (self.out / "memory-chart.json").write_text(json.dumps(chart, indent=1) + "\n")
        return report.markdown(data)
