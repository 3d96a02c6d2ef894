"""What a job's processes have after each cycle, and whether it grows: for bench rl-step --cycles and gpu-engines --part long."""

import collections
import os
import pathlib
import re
import statistics

from measure import tables
from measure.tables import MIB

#: What a program may have more of at the end than after its first cycles: bytes, or threads and descriptors. Threads that copy come and go.
MOST_BYTES, MOST_THINGS = MIB, 3
#: How much longer a cycle may take in the last part than in the first.
MOST_SLOWER = 1.25
#: Two parts of all cycles are compared: one after the programs have warmed up, and the last one.
PARTS = 5
#: Cycles after which it is written down who has what, at least: what has grown since then is named.
EARLY = 10
#: Rows of /proc/PID/smaps_rollup.
MEMORY = ("Rss", "Anonymous", "Locked")
#: Where glibc begins a thread's arena: at a multiple of this (HEAP_MAX_SIZE). And the largest guard in front of a thread's stack.
ARENA, LARGEST_GUARD = 64 * MIB, 64 << 10


def anonymous(start, guard_end):
    """What a mapping without a name likely is: `start` is its address, `guard_end` that behind the guard in front of it, if there is one."""
    if start == guard_end:
        return "stacks of threads"
    return "malloc's arenas of threads" if start % ARENA == 0 else "anonymous"


class Process:
    """What a process has, by its files in /proc."""

    def __init__(self, name, pid):
        self.name, self.folder = name, pathlib.Path(f"/proc/{pid}")

    def bytes(self, file):
        text = (self.folder / file).read_text()
        return {name: int(number) << 10 for name, number in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.M)}

    def sample(self):
        memory = self.bytes("smaps_rollup")
        found = {f"{self.name}: {name} bytes": memory.get(name, 0) for name in MEMORY}
        found[f"{self.name}: VmPin bytes"] = self.bytes("status").get("VmPin", 0)
        found[f"{self.name}: descriptors"] = len(os.listdir(self.folder / "fd"))
        found[f"{self.name}: threads"] = len(os.listdir(self.folder / "task"))
        return found

    def mappings(self):
        """Resident bytes by what is mapped, to name what has grown."""
        found, name, guard_end = collections.Counter(), "", 0
        for line in (self.folder / "smaps").read_text().splitlines():
            if head := re.match(r"([0-9a-f]+)-([0-9a-f]+) (\S+) \S+ \S+ \d+ *(.*)", line):
                start, end = int(head[1], 16), int(head[2], 16)
                name = head[4] or anonymous(start, guard_end)
                guard_end = end if head[3].startswith("---") and end - start <= LARGEST_GUARD else 0
            elif line.startswith("Rss:"):
                found[name] += int(line.split()[1]) << 10
        return found

    def host_bytes(self):
        """Its host memory without files, and of what it shares with others its part. 0 once it has ended."""
        try:
            memory = self.bytes("smaps_rollup")
            if "Pss_Anon" in memory:
                return memory["Pss_Anon"] + memory["Pss_Shmem"]
        except OSError:
            pass
        try:
            memory = self.bytes("status")
        except OSError:
            return 0
        return memory.get("RssAnon", 0) + memory.get("RssShmem", 0)


class Recorder:
    """Writes down, after each cycle, what the processes of a job have. `ask`: the command line's JSON answer to `status` or `gpus`.

    `settle`: cycles until the program has done all that it will do again, such as a suspend: only what grows later counts."""

    def __init__(self, ask, settle=0):
        self.ask, self.settle = ask, settle
        self.samples, self.early, self.grown = [], None, []
        statuses = ask("status")["processes"]
        # Ranks have one name.
        alike = collections.Counter(one["name"] for one in statuses)
        name = lambda one, number: one["name"] if alike[one["name"]] == 1 else f"{one['name']} {number}"
        self.processes = {one["pid"]: Process(name(one, number), one["pid"]) for number, one in enumerate(statuses, 1)}

    def record(self, measures):
        """After a cycle. A measure's name ends in what it is: bytes, seconds, or neither."""
        sample = dict(measures)
        for one in self.ask("status")["processes"]:
            if one["pid"] in self.processes:
                sample[f"{self.processes[one['pid']].name}: pinned by the library, bytes"] = one["host"]["pinned_bytes"]
        for process in self.processes.values():
            sample |= process.sample()
        self.samples.append(sample)
        if len(self.samples) == max(EARLY, self.settle):
            self.early = self.owners()

    def owners(self):
        found = owners(self.ask("gpus")["gpus"])
        for one in self.processes.values():
            found.update({f"{one.name}: {name}": bytes for name, bytes in one.mappings().items()})
        return found

    def finish(self):
        """At the end, while the processes still run: names what has grown."""
        if self.early is not None:
            more = {name: bytes - self.early[name] for name, bytes in self.owners().items()}
            self.grown = [{"name": name, "bytes": more[name]} for name in sorted(more, key=more.get, reverse=True) if more[name] >= MIB // 4]

    def run(self):
        """A run, as the functions below take it."""
        return {"samples": self.samples, "settle": self.settle, "grown": self.grown}


def owners(gpus):
    """Bytes of the GPUs by owner, from `vramctl gpus`."""
    found = collections.Counter()
    for share in (share for gpu in gpus for share in gpu["shares"]):
        found[" ".join(str(share[key]) for key in ("name", "what", "of") if share.get(key))] += share["bytes"]
    return found


# ---- of one or several runs, each with processes of its own ----


def parts(many, settle):
    """Of so many cycles the first that count, and the last ones, as many."""
    size = max(1, many // PARTS)
    begin = min(max(size, settle + 1), many - size)
    return slice(begin, begin + size), slice(many - size, many)


def is_flat(name, values, settle):
    """Compares the medians of both parts; of times the shortest, which others on the machine disturb least. The machine's memory and whole
    cycles are only shown: others use the machine, and some cycles have a suspend."""
    typical = min if name.endswith("seconds") else statistics.median
    before, after = (typical(values[part]) for part in parts(len(values), settle))
    if name.startswith(("host", "whole")):
        return True
    if name.endswith("seconds"):
        return after <= MOST_SLOWER * before
    return after - before <= (MOST_BYTES if name.endswith("bytes") else MOST_THINGS)


def slope(series):
    """The change per 100 cycles: the line of least squares, with a start of its own in each run."""
    above, below = 0.0, 0.0
    for values in series:
        middle, mean = (len(values) - 1) / 2, statistics.mean(values)
        above += sum((number - middle) * (value - mean) for number, value in enumerate(values))
        below += sum((number - middle) ** 2 for number in range(len(values)))
    return 100 * above / below if below else 0.0


def rows(runs):
    """By measure: what it was first, in the middle and last, its slope, and whether it is flat in each run."""
    for name in dict.fromkeys(name for run in runs for sample in run["samples"] for name in sample):
        found = [([sample[name] for sample in run["samples"] if name in sample], run["settle"]) for run in runs]
        found = [(values, settle) for values, settle in found if values]
        series = [values for values, _ in found]
        yield {
            "name": name,
            "first": series[0][0],
            "median": statistics.median(value for values in series for value in values),
            "last": series[-1][-1],
            "slope": slope(series),
            "flat": all(is_flat(name, values, settle) for values, settle in found),
        }


def growing(runs):
    """The measures that are not flat."""
    return [row["name"] for row in rows(runs) if not row["flat"]]


def shown(name, value, sign=""):
    if name.endswith("bytes"):
        return f"{value / MIB:{sign}.2f} MiB"
    return f"{value * 1e3:{sign}.1f} ms" if name.endswith("seconds") else f"{value:{sign}.4g}"


def table(runs, cycle):
    """The table, and what has grown. `cycle`: what one is called."""
    runs = [run for run in runs if run["samples"]]
    if not runs:
        return []
    shown_rows = []
    for row in rows(runs):
        name = re.sub(",? (bytes|seconds)$", "", row["name"])
        values = [shown(row["name"], row[which]) for which in ("first", "median", "last")] + [shown(row["name"], row["slope"], "+")]
        shown_rows.append([name, *values, "flat" if row["flat"] else "GROWS"])
    lines = tables.table(["", f"first {cycle}", "median", "last", "per 100", ""], "lrrrrl", shown_rows)
    grown = collections.Counter()
    for run in runs:
        grown.update({each["name"]: each["bytes"] for each in run["grown"]})
    if grown:
        since = max(EARLY, runs[0]["settle"])
        lines += ["", f"What has grown since {cycle} {since}{' of each run' if len(runs) > 1 else ''}:", ""]
        lines += [f"- {name}: {bytes / MIB:.2f} MiB" for name, bytes in grown.most_common(12)]
    return lines
