"""On one GPU, programs of which each takes it for its own share it by themselves (`vramctl run --share`): nobody gives a command.

loops: two training loops, always busy. Their losses are those of a loop alone, bit for bit; together they are compared with one after the other.
cells: as notebooks: one program after another, at random, is asked for work. Nobody runs out of memory.
phases: as an RL loop: a trainer works and writes weights to tmpfs, then an engine reads them and works. Once with a swap by hand before each phase, once
without a command; the losses are the same bit for bit.

usage: turns.py VRAMCTL loops [GIB [SECONDS]]           GIB of each (90), SECONDS together (120); half of that alone before
       turns.py VRAMCTL cells [GIB [PROGRAMS [SECONDS]]]    (20, 10, 60)
       turns.py VRAMCTL phases [GIB [ROUNDS [STEPS]]]       ROUNDS (6) of two phases with so many STEPS (30) of programs of GIB (90) each
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time

from common import GIB, Job, check

#: Bytes of a part of a program's memory. Torch asks the driver for each part.
PART = GIB


def work(gib):
    """Takes memory, and answers each request: `{"steps": N, "seconds": S}` does so much of either and tells the loss of each step, and how long the
    longest one took; `{"cell": K}` is a cell of a notebook; `{"write": FILE}` and `{"read": FILE}` are weights that go to another program."""
    import torch

    began = time.monotonic()
    parts = [torch.full((PART // 4,), float(number % 7 + 1), device="cuda") for number in range(gib)]
    torch.cuda.synchronize()
    print(json.dumps({"ready": True, "took": time.monotonic() - began}), flush=True)
    done = 0

    def step():
        nonlocal done
        done += 1
        for number, part in enumerate(parts):
            part.mul_(1.0 + 1.0 / (done + number + 2)).sub_(0.25)
        # All of a part would add much; a stripe of each is enough to see that it has moved with the rest.
        return float(sum(part[done % 977 :: 65537].double().sum() for part in parts))

    for line in sys.stdin:
        request = json.loads(line)
        if "cell" in request:
            began = time.monotonic()
            print(json.dumps({"loss": step(), "took": time.monotonic() - began}), flush=True)
            continue
        if "write" in request:
            parts[0].cpu().numpy().tofile(request["write"])
            print(json.dumps({"written": True}), flush=True)
            continue
        if "read" in request:
            parts[0].copy_(torch.from_file(request["read"], size=parts[0].numel(), dtype=parts[0].dtype))
            print(json.dumps({"read": True}), flush=True)
            continue
        losses, longest = [], 0.0
        began = last = time.monotonic()
        while len(losses) < request.get("steps", 1 << 60) and last - began < request.get("seconds", 1e9):
            losses.append(step())
            now = time.monotonic()
            longest, last = max(longest, now - last), now
        print(json.dumps({"losses": losses, "longest": longest, "seconds": last - began}), flush=True)


class HostPeak:
    """The most host memory in use so far, in GiB, looked at four times a second."""

    def __enter__(self):
        self.least, self.first, self.over = self.available(), self.available(), threading.Event()
        self.thread = threading.Thread(target=self.look, daemon=True)
        self.thread.start()
        return self

    def __exit__(self, *_):
        self.over.set()
        self.thread.join()

    @staticmethod
    def available():
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / (1 << 20)

    def look(self):
        while not self.over.wait(0.25):
            self.least = min(self.least, self.available())

    def gib(self):
        return self.first - self.least


def share(vramctl):
    """What `vramctl share --json` shows."""
    answer = subprocess.run([vramctl, "share", "--json"], capture_output=True, text=True)
    return json.loads(answer.stdout or "{}") if answer.returncode == 0 else {}


def loops(vramctl, gib=90, seconds=120):
    program = os.path.abspath(__file__)
    alone = Job(vramctl, "alone", program, ["work", gib])
    check("a loop alone is ready", alone.all("ready", alone.hear(180)))
    (of_one,) = alone.ask(seconds + 60, seconds=seconds / 2)
    alone.end()
    rate = len(of_one["losses"]) / of_one["seconds"]
    print(f"note: alone, {len(of_one['losses'])} steps in {of_one['seconds']:.1f} s", flush=True)

    with HostPeak() as host:
        began = time.monotonic()
        # Of one name, they would be one job.
        two = [Job(vramctl, f"loop{number}", program, ["work", gib], how=("--share",)) for number in range(2)]
        ready = [one.hear(120)[0] for one in two]
        if not check("two loops start at the same moment", all((one or {}).get("ready") for one in ready), f"{time.monotonic() - began:.1f} s: {ready}"):
            print("note: " + json.dumps(share(vramctl))[:3000], flush=True)
            return [one.end() for one in two]
        before = time.monotonic()
        for one in two:
            one.tell(seconds=seconds)
        both = [one.hear(seconds + 100)[0] for one in two]
        took = time.monotonic() - before
        changes = share(vramctl).get("changes", [])
        for one in two:
            one.end()
    if not check("both loops have ended", all(both), f"{took:.1f} s"):
        return
    for number, loop in enumerate(both):
        compared = min(len(loop["losses"]), len(of_one["losses"]))
        equal = loop["losses"][:compared] == of_one["losses"][:compared]
        check(f"the losses of loop {number} are those of a loop alone", equal and compared > 0, f"{compared} of {len(loop['losses'])} steps compared")
    together = sum(len(loop["losses"]) for loop in both) / took
    waits = [loop["longest"] for loop in both]
    durations = [change["took_ms"] for change in changes if change.get("took_ms") and change.get("outcome") == "changed"]
    print("| two loops of | alone | together | of it | longest wait | a change takes | host memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {gib} GiB | {rate:.2f} steps/s | {together:.2f} steps/s | {100 * together / rate:.1f}% | {max(waits):.1f} s "
        f"| {statistics.median(durations or [0]):.0f} ms (median of {len(durations)}) | {host.gib():.0f} GiB |",
        flush=True,
    )
    for change in changes[-4:]:
        print(f"note: {json.dumps(change)}", flush=True)


def cells(vramctl, gib=20, programs=10, seconds=60):
    program, chance = os.path.abspath(__file__), random.Random(5)
    with HostPeak() as host:
        began = time.monotonic()
        job = [Job(vramctl, f"book{number}", program, ["work", gib], how=("--share",)) for number in range(programs)]
        ready = [one.hear(240)[0] for one in job]
        if not check("all start at the same moment", all((one or {}).get("ready") for one in ready), f"{time.monotonic() - began:.1f} s"):
            print("note: " + json.dumps(share(vramctl))[:3000], flush=True)
            return [one.end() for one in job]
        waits, losses, until = [], {}, time.monotonic() + seconds
        while time.monotonic() < until:
            one = chance.randrange(programs)
            asked = time.monotonic()
            (answer,) = job[one].ask(60, cell=len(waits))
            waits.append(time.monotonic() - asked)
            if not check("a cell is answered", bool(answer and "loss" in answer), f"program {one}: {answer}"):
                break
            losses.setdefault(one, []).append(answer["loss"])
            time.sleep(max(0.0, 1.0 - waits[-1]))
        for one in job:
            one.end()
    longest = max(losses.values(), key=len)
    check("each program's answers are those of the others", all(its == longest[: len(its)] for its in losses.values()), f"{len(waits)} cells")
    ordered = sorted(waits)
    print("| programs | cells | median | 99% | longest | host memory |")
    print("| --- | ---: | ---: | ---: | ---: | ---: |")
    print(
        f"| {programs} of {gib} GiB | {len(waits)} | {statistics.median(waits):.2f} s | {ordered[int(0.99 * (len(ordered) - 1))]:.2f} s "
        f"| {ordered[-1]:.2f} s | {host.gib():.0f} GiB |",
        flush=True,
    )


def phases(vramctl, gib=90, rounds=6, steps=30):
    took, losses = {}, {}
    for how in ("by hand", "--share"):
        took[how], losses[how] = work_in_phases(vramctl, gib, rounds, steps, how)
    check("the losses of all phases are the same", losses["by hand"] == losses["--share"], f"{rounds} rounds")
    print("| rounds of two phases | by hand | without a command | ratio |")
    print("| --- | ---: | ---: | ---: |")
    print(f"| {rounds}, programs of {gib} GiB | {took['by hand']:.2f} s | {took['--share']:.2f} s | {took['--share'] / took['by hand']:.3f} |", flush=True)


def work_in_phases(vramctl, gib, rounds, steps, how):
    """The seconds that all rounds but the first took, and the losses."""
    program, by_hand = os.path.abspath(__file__), how == "by hand"
    jobs, losses, began = {}, [], None
    for name in ("engine", "trainer"):
        jobs[name] = Job(vramctl, name, program, ["work", gib], how=() if by_hand else (how,))
        check(f"the {name} is ready ({how})", jobs[name].all("ready", jobs[name].hear(180)))
        if by_hand and name == "engine":
            check("the engine leaves", jobs[name].command("pause", name)[0] == 0)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        weights, on_gpu = os.path.join(folder, "weights"), "trainer"
        for number in range(rounds + 1):
            # In the first round, host memory is made ready.
            began = time.monotonic() if number == 1 else began
            for name, order in (("trainer", "write"), ("engine", "read")):
                if by_hand and on_gpu != name:
                    code, text = jobs[name].command("swap", on_gpu, name)
                    check("a swap", code == 0, text)
                on_gpu = name
                if order == "read":
                    jobs[name].ask(60, read=weights)
                losses += [answer and answer.get("losses") for answer in jobs[name].ask(120, steps=steps)]
                if order == "write":
                    jobs[name].ask(60, write=weights)
    seconds = time.monotonic() - began
    for job in jobs.values():
        job.end()
    return seconds, losses


if __name__ == "__main__":
    if sys.argv[1] == "work":
        work(int(sys.argv[2]))
    else:
        {"loops": loops, "cells": cells, "phases": phases}[sys.argv[2]](sys.argv[1], *map(int, sys.argv[3:]))
