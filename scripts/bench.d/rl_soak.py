"""Hundreds of steps of a trainer and an engine in turns, for scripts/bench-rl-step --cycles: nothing may grow."""

import collections
import json
import os
import pathlib
import re
import statistics
import time

from bench import host_memory
from sets import MIB

#: What a program may have more of at the end than after its first steps: bytes, or threads and descriptors. Threads that copy come and go.
MOST_BYTES, MOST_THINGS = MIB, 3
#: How much longer a step may take in the last part than in the first.
MOST_SLOWER = 1.25
#: Two parts of all steps are compared: one after the programs have warmed up, and the last one.
PARTS = 5
#: Rows of /proc/PID/smaps_rollup.
MEMORY = ("Rss", "Anonymous", "Locked")


class Soaked:
    """What a process has, by its files in /proc."""

    def __init__(self, child):
        self.name, self.folder = child.name.split()[-1], pathlib.Path(f"/proc/{child.process.pid}")

    def lines(self, file):
        text = (self.folder / file).read_text()
        return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}

    def sample(self):
        memory = self.lines("smaps_rollup")
        found = {f"{self.name}: {name} bytes": memory.get(name, 0) for name in MEMORY}
        found[f"{self.name}: VmPin bytes"] = self.lines("status").get("VmPin", 0)
        found[f"{self.name}: descriptors"] = len(os.listdir(self.folder / "fd"))
        found[f"{self.name}: threads"] = len(os.listdir(self.folder / "task"))
        return found

    def mappings(self):
        """Resident bytes by what is mapped, to name what has grown."""
        found, name = collections.Counter(), ""
        for line in (self.folder / "smaps").read_text().splitlines():
            if head := re.match(r"[0-9a-f]+-[0-9a-f]+ \S+ \S+ \S+ \d+ *(.*)", line):
                name = head[1] or "anonymous"
            elif line.startswith("Rss:"):
                found[name] += int(line.split()[1]) << 10
        return found


def owners(bench):
    """Bytes of the GPU by owner, from `vramctl gpus`."""
    found = collections.Counter()
    for gpu in json.loads(bench.vramctl("gpus", "--json"))["gpus"]:
        for share in gpu["shares"]:
            found[" ".join(str(share[key]) for key in ("name", "what", "of") if share.get(key))] += share["bytes"]
    return found


class Soak:
    """`bench` is a Bench of rl_step.py, `pair` its trainer and engine, started by `vramctl run` with the names of their roles."""

    def __init__(self, bench, pair, cycles, suspend_every):
        self.bench, self.pair, self.cycles, self.suspend_every = bench, pair, cycles, suspend_every
        self.soaked = [Soaked(child) for child in pair.children]
        self.samples = []  # by step
        self.suspends = []  # seconds
        self.grown = []

    def suspend(self, name):
        """Off the GPU and back; contents that a pause would discard are kept."""
        begun = time.perf_counter()
        self.bench.vramctl("suspend", name, "--backup", "host")
        self.bench.vramctl("resume", name, "--timeout", "30")
        self.suspends.append(time.perf_counter() - begun)

    def step(self, number):
        begun = time.perf_counter()
        is_suspended = self.suspend_every and number % self.suspend_every == 0

        def during_rollout():
            if is_suspended:
                self.suspend("engine")

        took = self.pair.round(during_rollout)
        if is_suspended:
            self.suspend("trainer")
            self.pair.check()
        sample = {"device bytes": self.pair.ask(self.pair.engine, "memory"), "transitions, shortest, seconds": sum(took.values())}
        for one in self.soaked:
            sample |= one.sample()
        sample["host memory in use, bytes"] = host_memory("MemTotal") - host_memory("MemAvailable")
        sample["whole step, shortest, seconds"] = time.perf_counter() - begun
        self.samples.append(sample)

    def run(self):
        early = None
        for number in range(1, self.cycles + 1):
            if self.bench.left() < 5:
                self.bench.data["missed"].append(f"{self.cycles - number + 1} of {self.cycles} steps: out of time")
                break
            self.step(number)
            if number == max(1, self.cycles // PARTS, 2 * self.suspend_every):
                early = self.residue()
            if number % max(1, self.cycles // 10) == 0:
                self.bench.say(f"{number} steps")
        late = self.residue()
        self.grown = [
            {"name": name, "bytes": late[name] - (early or late)[name]}
            for name in late
            if late[name] - (early or late)[name] >= MIB // 4
        ]
        self.grown.sort(key=lambda each: -each["bytes"])

    def residue(self):
        found = owners(self.bench)
        for one in self.soaked:
            found.update({f"{one.name}: {name}": bytes for name, bytes in one.mappings().items()})
        return found


def parts(samples, suspend_every):
    """The first steps that count, after two suspends, and the last ones, as many."""
    size = max(1, len(samples) // PARTS)
    begin = min(max(size, 2 * suspend_every + 1), len(samples) - size)
    return range(begin, begin + size), range(len(samples) - size, len(samples))


def compare(samples, suspend_every):
    """By measure: the medians of both parts, of times the shortest, which others on the machine disturb least; and whether it is flat. The
    machine's memory and whole steps are only shown: others use the machine, and some steps have a suspend."""
    rows = []
    for name in samples[0]:
        typical = min if name.endswith("seconds") else statistics.median
        before, after = (typical(samples[number][name] for number in part) for part in parts(samples, suspend_every))
        if name.startswith(("host", "whole")):
            is_flat = True
        elif name.endswith("seconds"):
            is_flat = after <= MOST_SLOWER * before
        else:
            is_flat = after - before <= (MOST_BYTES if name.endswith("bytes") else MOST_THINGS)
        rows.append({"name": name, "before": before, "after": after, "flat": is_flat})
    return rows


def shown(name, value):
    if name.endswith("bytes"):
        return f"{value / MIB:.2f} MiB"
    return f"{value * 1e3:.1f} ms" if name.endswith("seconds") else f"{value:g}"


def markdown(samples, suspends, suspend_every, grown):
    first, last = parts(samples, suspend_every)
    lines = [
        f"{len(samples)} steps, {len(suspends)} suspends",
        "",
        f"| | steps {first.start + 1} to {first.stop} | {last.start + 1} to {last.stop} | |",
        "| --- | ---: | ---: | --- |",
    ]
    for row in compare(samples, suspend_every):
        name = re.sub(",? (bytes|seconds)$", "", row["name"])
        verdict = "flat" if row["flat"] else "GROWS"
        lines.append(f"| {name} | {shown(row['name'], row['before'])} | {shown(row['name'], row['after'])} | {verdict} |")
    if suspends:
        lines += ["", f"A suspend and the resume after it: {statistics.median(suspends):.2f} s (median)."]
    if grown:
        lines += ["", "What has grown since then:", ""]
        lines += [f"- {each['name']}: {each['bytes'] / MIB:.2f} MiB" for each in grown[:12]]
    return "\n".join(lines) + "\n"


def growing(samples, suspend_every):
    """The measures that are not flat."""
    return [row["name"] for row in compare(samples, suspend_every) if not row["flat"]]
