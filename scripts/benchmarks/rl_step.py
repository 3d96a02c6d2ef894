"""The transitions of an RL step, with torch_memory_saver and with vramctl in its place.

Measures what slime and vime do in each step on one GPU, without the framework: a trainer process
and an engine process take turns,

  trainer out        its memory is paused, contents kept
  engine in          its weights get memory; the trainer sends them from host memory, by CUDA
                     IPC, in buckets; then its KV cache gets memory
  engine out         paused, contents discarded
  trainer in         resumed

with torch_memory_saver 0.0.10 and with vramctl's library in its place, in turns: the same program,
through the same C functions. After each resume, all contents are compared bit for bit; in between,
all of the trainer's contents change, and the engine replays a graph that was captured once.

Prints a table of seconds and GB/s, with what the link needs for the bytes, measured in the same run,
and writes rl-step.md, rl-step.json and rl-step.log. Exits with 1 if something failed or was not
reached. About 3 minutes on an H100. Needs a libcudart (CUDA 13's for the library that
torch_memory_saver has for it), a GPU that nobody else uses, and host memory for the trainer and
8 GiB more.

modes:
  tms               torch_memory_saver, its default: pinned backups
  vramctl           vramctl's library, its default
  tms-retained      torch_memory_saver with retain_cpu_backup
  vramctl-retained  vramctl's library with the same
  tms-mmap          torch_memory_saver with mmap backups
"""

import json
import os
import pathlib
import subprocess
import time

from benchmarks.sets import model_sizes, scaled
from measure import growth, run, setup
from measure.child import Failed, Program
from measure.run import host_memory
from measure.tables import GIB, MIB, median, seconds, table
from measure.tables import size as gib

HERE = pathlib.Path(__file__).resolve().parent
#: Who does it: what it is called, the program's options, and whether it is the drop-in.
MODES = {
    "tms": ("torch_memory_saver", [], False),
    "vramctl": ("vramctl", [], True),
    "tms-retained": ("torch_memory_saver, retained", ["--retain"], False),
    "vramctl-retained": ("vramctl, retained", ["--retain"], True),
    "tms-mmap": ("torch_memory_saver, mmap", ["--backend", "mmap"], False),
}
#: The transitions of a step, in their order: name, the bytes that are copied, the direction of the link.
ROWS = [
    ("trainer_out", "trainer out", "trainer", "out"),
    ("engine_in", "engine's weights in, empty", None, None),
    ("weights", "weights sent, in buckets", "weights", "in"),
    ("cache_in", "engine's KV cache in, empty", None, None),
    ("engine_out", "engine out, discarded", None, None),
    ("trainer_in", "trainer in", "trainer", "in"),
]
#: What is left of the step of vllm-project/vime#442 without sleep and wake: 18.853 - 15.000 s.
OTHER_WORK = 3.853
#: Bytes per second at which a round is planned with torch_memory_saver (out and in), else with the link; measured rounds replace it.
SLOW, FAST = (1.6e9, 7e9), (30e9, 45e9)


# ---- the pair of processes ----


class Pair:
    """A trainer and an engine, of which one has its memory on the GPU at a time."""

    def __init__(self, bench, name, command, environment, options=()):
        """`command(role)` is what starts the program of a role."""
        self.bench, self.version = bench, 0
        #: Bytes of the GPU in use while all of both is paused.
        self.left_in_use = 0
        self.children = []
        for role in ("trainer", "engine"):
            child = bench.start(*command(role), role, *options, env=environment(role), kind=Program, name=f"{name} {role}")
            self.children.append(child)
        self.trainer, self.engine = self.children

    def begin(self, sizes):
        """Both get their memory; then the trainer has it, and the engine is paused."""
        for child in self.children:
            if child.hear(120).strip() != "ok":
                raise Failed(f"{child.name} did not start")
        for tag in ("weights", "kv_cache"):
            self.ask(self.engine, "alloc", tag, sizes[tag])
        self.ask(self.engine, "fill", "weights", 0)
        self.ask(self.engine, "rollout", 0)
        self.ask(self.engine, "pause")
        for tag in ("weights", "state"):
            self.ask(self.trainer, "alloc", tag, sizes[tag])

    def ask(self, child, *words):
        return json.loads(child.ask(" ".join(map(str, words)), 180))

    def change(self):
        """A training step: everything that the trainer has is new."""
        self.version += 1
        for tag in ("weights", "state"):
            self.ask(self.trainer, "fill", tag, self.version)

    def check(self):
        for tag in ("weights", "state"):
            self.ask(self.trainer, "check", tag, self.version)

    def send(self):
        """The weights go from the trainer's host memory through buckets on the GPU into the engine's, as in slime."""
        begun = time.perf_counter()
        offered = self.ask(self.trainer, "offer")
        self.ask(self.engine, "open", *offered["handles"])
        for number in range(offered["buckets"]):
            self.ask(self.trainer, "load", number)
            self.ask(self.engine, "store", number)
        self.ask(self.engine, "close")
        self.ask(self.trainer, "withdraw")
        return time.perf_counter() - begun

    def round(self, during_rollout=lambda: None):
        """One step. Returns the seconds of its transitions; all contents are compared bit for bit."""
        took = {}
        self.change()
        took["trainer_out"] = self.ask(self.trainer, "pause")
        self.left_in_use = self.ask(self.engine, "memory")
        took["engine_in"] = self.ask(self.engine, "resume", "weights")
        took["weights"] = self.send()
        self.ask(self.engine, "check", "weights", self.version)
        took["cache_in"] = self.ask(self.engine, "resume", "kv_cache")
        self.ask(self.engine, "rollout", self.version)
        during_rollout()
        took["engine_out"] = self.ask(self.engine, "pause")
        took["trainer_in"] = self.ask(self.trainer, "resume")
        self.check()
        return took

    def end(self):
        for child in self.children:
            child.close()


def sizes_of(total, folder, tag):
    """A file with the sizes of a tag's allocations, like a model's: many of tens of MiB, a few large ones."""
    sizes = scaled(model_sizes(2000), max(1, 64 * MIB * 16 // total))
    chosen = []
    for size in sizes * 64:
        left = total - sum(chosen)
        if left <= 0:
            break
        chosen.append(min(size, left))
    path = pathlib.Path(folder) / f"{tag}.sizes"
    path.write_text("".join(f"{size}\n" for size in chosen))
    return path


# ---- the report ----


def transitions(data, mode, first=False):
    """Seconds of each transition: in the first round of a process, or the median of the later ones."""
    samples = data["first" if first else "samples"].get(mode, {})
    return {row: median(samples[row]) for row, *_ in ROWS if samples.get(row)}


def limit(data, row):
    """Seconds that the link needs for a transition's bytes; None where none are copied."""
    _, _, what, way = next(each for each in ROWS if each[0] == row)
    rate = data["link"].get(way) if way else None
    return data["bytes"][what] / rate if rate else None


def share(took, other):
    """The share of a step: its transitions, beside work of `other` seconds."""
    return took / (took + other)


def cell(data, row, value):
    what = next(each[2] for each in ROWS if each[0] == row)
    return seconds(value) + (f" ({data['bytes'][what] / value / 1e9:.1f} GB/s)" if what and value else "")


def plural(steps):
    return f"{steps} step{'s' if steps > 1 else ''}"


def step_table(data):
    modes = [mode for mode in MODES if data["samples"].get(mode)]
    found = {mode: transitions(data, mode) for mode in modes}
    rows = [
        [name, seconds(limit(data, row)), *(cell(data, row, found[mode].get(row)) for mode in modes)]
        for row, name, *_ in ROWS
        if any(row in each for each in found.values())
    ]
    total = {mode: sum(found[mode].values()) for mode in modes}
    at_best, other = sum(filter(None, (limit(data, row) for row, *_ in ROWS))), data["other_work"]
    shares = (f"{share(took, other):.0%}" for took in (at_best, *total.values()))
    first = (seconds(sum(transitions(data, mode, first=True).values())) for mode in modes)
    rows += [
        ["**all transitions**", seconds(at_best), *(f"**{seconds(took)}**" for took in total.values())],
        [f"share of a step with {other:g} s of other work (computed)", *shares],
        ["all transitions of a process's first step", "", *first],
        ["GPU memory in use while both are paused", "", *(gib(median(data["left_in_use"][mode])) for mode in modes)],
    ]
    counts = ", ".join(f"{plural(len(data['samples'][mode]['trainer_out']))} ({MODES[mode][0]})" for mode in modes)
    return [
        *table(["transition", "at the link's speed", *(MODES[mode][0] for mode in modes)], "lr", rows),
        "",
        f"Medians of {counts}, in turns. The link, measured in the same run with pinned memory: {data['link']['out'] / 1e9:.1f} GB/s out, "
        f"{data['link']['in'] / 1e9:.1f} GB/s in. The trainer's contents, the engine's weights and what its captured graph computed "
        "were compared bit for bit in every step.",
    ]


def soak_table(soak):
    lines = [f"{len(soak['samples'])} steps, {len(soak['suspends'])} suspends", "", *growth.table([soak], "step")]
    if soak["suspends"]:
        lines += ["", f"A suspend and the resume after it: {median(soak['suspends']):.2f} s (median)."]
    return lines


def markdown(data):
    """The table for the documentation."""
    sizes = {what: gib(data["bytes"][what]) for what in ("trainer", "weights", "cache")}
    lines = [
        f"A trainer with {sizes['trainer']} (of which {sizes['weights']} are weights) and an engine with {sizes['weights']} of weights and "
        f"{sizes['cache']} of KV cache take turns on one GPU: {data['gpu']}, driver {data['driver']}, {data['date'][:10]}, `{data['command']}`.",
        "",
    ]
    lines += step_table(data) if data["link"] else []
    lines += soak_table(data["soak"]) if data.get("soak", {}).get("samples") else []
    return "\n".join([*lines, *(f"\n{note}" for note in data["notes"])]) + "\n"


# ---- the run ----


class Bench(run.Bench):
    def __init__(self, options):
        sizes = {"trainer": options.trainer, "weights": options.weights, "cache": options.kv}
        settings = {"bytes": sizes, "bucket_bytes": options.bucket_mib * MIB, "other_work": options.other_work}
        super().__init__(options, "rl-step", **settings, link={}, first={}, samples={}, left_in_use={})
        tags = {"weights": options.weights, "state": options.trainer - options.weights, "kv_cache": options.kv}
        self.sizes = {tag: sizes_of(bytes, self.work, tag) for tag, bytes in tags.items()}
        self.took = {}  # by mode: seconds of a turn

    def environment(self, mode):
        if mode is None:
            return lambda role: self.env
        plain = {**self.env, "LD_PRELOAD": self.env["VRAMCTL_LIB"] if MODES[mode][2] else self.options.saver}
        # As slime starts its trainer.
        trainer = {**plain, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        return lambda role: trainer if role == "trainer" else plain

    def program(self, _role):
        return [self.options.python, HERE / "rl_program.py"]

    def program_options(self, mode):
        piece = ["--piece-mib", self.options.piece_mib, "--bucket-mib", self.options.bucket_mib]
        managed = ["--managed-buckets"] if self.options.buckets == "managed" else []
        return [*piece, *managed, *MODES[mode][1]]

    def measure_link(self):
        piece = min(1024, self.options.trainer // MIB)
        touched = self.options.trainer // MIB if not self.data["simulated"] else 0
        child = self.start(*self.program("link"), "link", "--piece-mib", piece, "--touch-mib", touched, env=self.env, name="link")
        word, _, found = child.hear(120).partition(" ")
        child.kill()
        if word != "ok":
            raise Failed(f"link: {found}")
        found = json.loads(found)
        self.data["link"] = {way: found["bytes"] / median(found[way]) for way in ("out", "in")}

    def planned(self, mode):
        """Seconds that a turn of this mode takes: as the last one did, else as these bytes need at a cautious rate."""
        if mode in self.took:
            return self.took[mode]
        slow = mode.startswith("tms")
        out, back = SLOW if slow else FAST
        # A retained backup makes only the first round slow.
        copied = 1 if mode == "tms-retained" else 1 + self.rounds(mode)
        rest = (1 + self.rounds(mode)) * 3 * (self.options.trainer + self.options.weights) / FAST[0]
        return 5 + copied * self.options.trainer * (1 / out + 1 / back) + rest

    def rounds(self, mode):
        """Rounds after the first. Of those that keep nothing for the next pause, each is like the first."""
        return 0 if mode in ("tms", "tms-mmap") else self.options.rounds

    def turn(self, mode):
        begun = time.monotonic()
        self.say(f"{MODES[mode][0]}: {plural(1 + self.rounds(mode))}")
        pair = Pair(self, mode, self.program, self.environment(mode), self.program_options(mode))
        pair.begin(self.sizes)
        for number in range(1 + self.rounds(mode)):
            took = pair.round()
            kinds = [kind for kind, belongs in (("first", number == 0), ("samples", number or not self.rounds(mode))) if belongs]
            for kind in kinds:
                for row, value in took.items():
                    self.data[kind].setdefault(mode, {}).setdefault(row, []).append(value)
            self.data["left_in_use"].setdefault(mode, []).append(pair.left_in_use)
            self.say("  " + ", ".join(f"{row} {value:.3f}" for row, value in took.items()) + f"; all {sum(took.values()):.2f} s")
        pair.end()
        self.took[mode] = time.monotonic() - begun

    def soak(self):
        """Many steps of one pair under `vramctl run`, and what has grown by then."""

        def command(role):
            return [self.bin / "vramctl", "run", "--name", role, "--no-python", "--", *self.program(role)]

        def environment(role):
            return {name: value for name, value in self.environment("vramctl")(role).items() if name != "LD_PRELOAD"}

        pair = Pair(self, "soak", command, environment, self.program_options("vramctl"))
        pair.begin(self.sizes)
        soak = Soak(self, pair)
        try:
            soak.run()
        finally:
            self.data["soak"] = {**soak.recorder.run(), "suspends": soak.suspends}
        pair.end()
        if wrong := growth.growing([self.data["soak"]]):
            raise Failed("not flat: " + "; ".join(wrong))

    def run(self):
        if self.options.cycles:
            self.step("soak", 0, self.soak)
            return
        self.step("link", 5, self.measure_link)
        for number in range(self.options.turns):
            for mode in self.options.modes:
                self.step(f"{MODES[mode][0]}, turn {number + 1}", self.planned(mode), self.turn, mode)

    def markdown(self, data):
        return markdown(data)

    def plan(self):
        """What would run, for `--dry-run`."""
        options = self.options
        needed = options.trainer + 2 * GIB
        lines = [
            f"trainer {gib(options.trainer)}, of which weights {gib(options.weights)}; engine weights {gib(options.weights)}, "
            f"KV cache {gib(options.kv)}; buckets of {options.bucket_mib} MiB",
            f"GPU memory: up to {gib(max(options.trainer, options.weights + options.kv))} and two contexts; "
            f"host memory: about {gib(needed)} ({gib(host_memory('MemAvailable'))} is available)",
        ]
        for number in range(options.turns):
            lines += [
                f"turn {number + 1}: {MODES[mode][0]}, {plural(1 + self.rounds(mode))}, about {self.planned(mode):.0f} s"
                for mode in options.modes
            ]
        return "\n".join(lines)


class Soak:
    """Hundreds of steps of a trainer and an engine in turns, started by `vramctl run` with the names of their roles: nothing may grow."""

    def __init__(self, bench, pair):
        self.bench, self.pair = bench, pair
        self.cycles, self.suspend_every = bench.options.cycles, bench.options.suspend_every
        self.recorder = growth.Recorder(bench.told, settle=2 * self.suspend_every)
        self.suspends = []  # seconds

    def suspend(self, name):
        """Off the GPU and back; contents that a pause would discard are kept."""
        begun = time.perf_counter()
        self.bench.told("suspend", name, "--backup", "host")
        self.bench.told("resume", name, "--timeout", "30")
        self.suspends.append(time.perf_counter() - begun)

    def step(self, number):
        begun = time.perf_counter()
        is_suspended = self.suspend_every and number % self.suspend_every == 0
        took = self.pair.round(lambda: self.suspend("engine") if is_suspended else None)
        if is_suspended:
            self.suspend("trainer")
            self.pair.check()
        self.recorder.record(
            {
                "device bytes": self.pair.ask(self.pair.engine, "memory"),
                "transitions, seconds": sum(took.values()),
                "host memory in use, bytes": host_memory("MemTotal") - host_memory("MemAvailable"),
                "whole step, seconds": time.perf_counter() - begun,
            }
        )

    def run(self):
        for number in range(1, self.cycles + 1):
            if self.bench.left() < 5:
                self.bench.miss(f"{self.cycles - number + 1} of {self.cycles} steps: out of time")
                break
            self.step(number)
            if number % max(1, self.cycles // 10) == 0:
                self.bench.say(f"{number} steps")
        self.recorder.finish()


def options(add):
    add("--trainer-gib", type=float, metavar="N", help="the trainer's memory: weights, gradients, Adam's state (30)")
    add("--engine-weights-gib", type=float, metavar="N", help="the weights, of the trainer and of the engine (15)")
    add("--kv-gib", type=float, metavar="N", help="the engine's KV cache (20)")
    add("--bucket-mib", type=int, metavar="N", help="size of a bucket (512)")
    add("--modes", metavar="LIST", help="who does it, in this order (tms,vramctl,tms-retained)")
    rounds = "steps after the first one of each pair of processes (2); none with tms and tms-mmap, which keep nothing for the next pause"
    add("--rounds", type=int, default=2, metavar="N", help=rounds)
    add("--turns", type=int, default=2, metavar="N", help="how often all of LIST is done (2)")
    cycles = "in place of all that, N steps of one pair under `vramctl run`, to see that nothing grows: GPU and host memory, descriptors, threads, "
    add("--cycles", type=int, default=0, metavar="N", help=f"{cycles}time. Sizes are 1, 0.5 and 1 GiB if not given")
    buckets = "plain: CUDA's own memory, as slime's; managed (with --cycles): the library's, only without torch_memory_saver"
    add("--buckets", choices=("plain", "managed"), help=buckets)
    suspend = "with --cycles: every Nth step, each of the two leaves the GPU entirely and comes back (20; 0: never)"
    add("--suspend-every", type=int, default=20, metavar="N", help=suspend)
    other = f"the rest of a step, for the share of the transitions ({OTHER_WORK}, that of vllm-project/vime#442)"
    add("--other-work", type=float, default=OTHER_WORK, metavar="S", help=other)
    add("--tms-dir", metavar="DIR", help="where torch_memory_saver's wheel is unpacked or installed")
    add("--python", default="python3", metavar="FILE", help="the Python of the trainer and the engine (python3)")
    add("--dry-run", action="store_true", help="print the plan")


#: What `--python` finds: torch_memory_saver's folder, and the interpreter itself, because a version manager's wrapper would run other programs under
#: the preloaded libraries.
LOOK = """
import importlib.util, json, os, sys
saver = importlib.util.find_spec("torch_memory_saver")
print(json.dumps([os.path.dirname(os.path.dirname(saver.origin)) if saver else "", os.path.realpath(sys.executable)]))
"""


def complete(options):
    """The options that depend on others."""
    sizes, tiny, soak = {"trainer_gib": 30, "engine_weights_gib": 15, "kv_gib": 20, "bucket_mib": 512}, (0.09375, 0.03125, 0.0625, 8), (1, 0.5, 1, 128)
    for (name, usual), small, long in zip(sizes.items(), tiny, soak):
        if getattr(options, name) is None:
            setattr(options, name, small if options.simulated else long if options.cycles else usual)
    options.piece_mib = 1 if options.simulated else 32
    options.buckets = options.buckets or ("managed" if options.cycles else "plain")
    for name in ("trainer", "engine_weights", "kv"):
        bytes = round(getattr(options, f"{name}_gib") * GIB / (2 * MIB)) * 2 * MIB
        setattr(options, name.removeprefix("engine_"), bytes)
    if options.weights >= options.trainer:
        raise SystemExit("bench: the trainer has the weights and more: --trainer-gib must be above --engine-weights-gib")
    done = subprocess.run([options.python, "-c", LOOK], stdout=subprocess.PIPE, text=True, check=True)
    tms, options.python = json.loads(done.stdout)
    options.tms_dir = os.path.abspath(options.tms_dir) if options.tms_dir else tms
    usual = "tms,vramctl,tms-retained" if options.tms_dir or options.dry_run else "vramctl,vramctl-retained"
    options.modes = (options.modes or ("vramctl" if options.cycles else usual)).split(",")
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        raise SystemExit(f"bench: no such mode: {', '.join(unknown)}. There are: {', '.join(MODES)}")


def find_saver(options):
    """torch_memory_saver's library, for the runtime that is there."""
    variant = "preload_cu13" if os.path.exists(f"{options.libcudart}/libcudart.so.13") else "preload_cu12"
    options.saver = f"{options.tms_dir}/torch_memory_saver_hook_mode_{variant}.abi3.so" if options.tms_dir else ""
    if any(mode.startswith("tms") for mode in options.modes) and not os.path.exists(options.saver):
        how = "Give --tms-dir, where its wheel is unpacked, or --modes vramctl."
        setup.shell('missing "$1" "$2"', options.saver or "torch_memory_saver 0.0.10", how)


def main(options):
    options.limit = options.limit or 190
    if options.dry_run:
        complete(options)
        options.bin, options.work, options.libcudart, options.smi = options.bin or ".", setup.work(), "", setup.SMI
        options.gpu = options.commit = ""
        print(Bench(options).plan())
        return 0
    setup.machine(options, "--memory", "512M")
    complete(options)
    setup.prepare(options)
    find_saver(options)
    return Bench(options).all()
