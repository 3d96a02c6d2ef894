"""The measurements behind scripts/bench-rl-step, which sets everything up and runs this."""

import argparse
import datetime
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

import growth
import rl_soak
from bench import Program, host_memory
from child import Deadline, Failed
from sets import GIB, MIB, gib, model_sizes, scaled

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
    ("groups_out", "process groups destroyed", None, None),
    ("trainer_out", "trainer out", "trainer", "out"),
    ("engine_in", "engine's weights in, empty", None, None),
    ("weights", "weights sent, in buckets", "weights", "in"),
    ("cache_in", "engine's KV cache in, empty", None, None),
    ("engine_out", "engine out, discarded", None, None),
    ("trainer_in", "trainer in", "trainer", "in"),
    ("groups_in", "process groups made", None, None),
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
            self.children.append(Program(bench, f"{name} {role}", [*command(role), role, *options], environment(role)))
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
        self.ask(self.trainer, "groups", "make")

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
        took["groups_out"] = self.ask(self.trainer, "groups", "destroy")
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
        took["groups_in"] = self.ask(self.trainer, "groups", "make")
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


def median(samples):
    return statistics.median(samples) if samples else None


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


def seconds(value):
    return "–" if value is None else f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.1f} ms"


def cell(data, row, value):
    what = next(each[2] for each in ROWS if each[0] == row)
    return seconds(value) + (f" ({data['bytes'][what] / value / 1e9:.1f} GB/s)" if what and value else "")


def plural(steps):
    return f"{steps} step{'s' if steps > 1 else ''}"


def markdown(data):
    """The table for the documentation."""
    modes = [mode for mode in MODES if data["samples"].get(mode)]
    size = {what: gib(data["bytes"][what]) for what in ("trainer", "weights", "cache")}
    lines = [
        f"A trainer with {size['trainer']} (of which {size['weights']} are weights) and an engine with {size['weights']} of weights and "
        f"{size['cache']} of KV cache take turns on one GPU: {data['gpu']}, driver {data['driver']}, {data['date'][:10]}, `{data['command']}`.",
        "",
        "| transition | at the link's speed | " + " | ".join(MODES[mode][0] for mode in modes) + " |",
        "| --- | ---: |" + " ---: |" * len(modes),
    ]
    found = {mode: transitions(data, mode) for mode in modes}
    for row, name, *_ in ROWS:
        if any(row in each for each in found.values()):
            cells = [cell(data, row, found[mode].get(row)) for mode in modes]
            lines.append(f"| {name} | {seconds(limit(data, row))} | " + " | ".join(cells) + " |")
    total = {mode: sum(found[mode].values()) for mode in modes}
    at_best = sum(filter(None, (limit(data, row) for row, *_ in ROWS)))
    first = {mode: sum(transitions(data, mode, first=True).values()) for mode in modes}
    other = data["other_work"]
    lines += [
        f"| **all transitions** | {seconds(at_best)} | " + " | ".join(f"**{seconds(total[mode])}**" for mode in modes) + " |",
        f"| share of a step with {other:g} s of other work (computed) | {share(at_best, other):.0%} | "
        + " | ".join(f"{share(total[mode], other):.0%}" for mode in modes) + " |",
        "| all transitions of a process's first step | | " + " | ".join(seconds(first[mode]) for mode in modes) + " |",
        "| GPU memory in use while both are paused | | " + " | ".join(gib(median(data["left_in_use"][mode])) for mode in modes) + " |",
        "",
        "Medians of " + ", ".join(f"{plural(len(data['samples'][mode]['trainer_out']))} ({MODES[mode][0]})" for mode in modes)
        + f", in turns. The link, measured in the same run with pinned memory: {data['link']['out'] / 1e9:.1f} GB/s out, "
        f"{data['link']['in'] / 1e9:.1f} GB/s in. The trainer's contents, the engine's weights and what its captured graph computed "
        "were compared bit for bit in every step.",
    ]
    lines += [f"\n{note}" for note in data["notes"]]
    if missed := data["missed"]:
        lines += ["", "Not reached:", "", *(f"- {each}" for each in missed)]
    return "\n".join(lines) + "\n"


# ---- the run ----


class Bench:
    def __init__(self, options):
        self.options, self.began = options, time.monotonic()
        self.out = pathlib.Path(options.out)
        self.log_file, self.deadline = open(self.out / "rl-step.log", "w"), Deadline(options.limit)
        sizes = {"weights": options.weights, "state": options.trainer - options.weights, "kv_cache": options.kv}
        self.sizes = {tag: sizes_of(size, options.work, tag) for tag, size in sizes.items()}
        self.took = {}  # by mode: seconds of a turn
        self.data = {
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
            "command": options.command,
            "commit": options.commit,
            "gpu": options.gpu,
            "driver": options.driver,
            "host_bytes": host_memory("MemTotal"),
            "simulated": "SIMGPU_DIR" in os.environ,
            "bytes": {"trainer": options.trainer, "weights": options.weights, "cache": options.kv},
            "bucket_bytes": options.bucket_mib * MIB,
            "other_work": options.other_work,
            "link": {},
            "first": {},
            "samples": {},
            "left_in_use": {},
            "notes": [],
            "missed": [],
        }

    def left(self):
        return self.deadline.rest()

    def log(self, text):
        print(text, file=self.log_file, flush=True)

    def say(self, text):
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", file=sys.stderr, flush=True)
        self.log(f"# {text}")

    def environment(self, mode):
        ours = ("LD_PRELOAD", "TMS_", "VRAMCTL_")
        plain = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        if mode is None:
            return lambda role: plain
        library = self.options.library if MODES[mode][2] else self.options.saver
        plain |= {"LD_PRELOAD": library, "VRAMCTL_DIR": self.options.sockets}
        # As slime starts its trainer.
        trainer = {**plain, "TMS_INIT_ENABLE": "1", "TMS_INIT_ENABLE_CPU_BACKUP": "1"}
        return lambda role: trainer if role == "trainer" else plain

    def command(self, _role):
        return [self.options.python, HERE / "rl_program.py"]

    def program_options(self, mode):
        piece = ["--piece-mib", self.options.piece_mib, "--bucket-mib", self.options.bucket_mib]
        managed = ["--managed-buckets"] if self.options.buckets == "managed" else []
        return [*piece, *managed, *MODES[mode][1], *(["--nccl", self.options.nccl] if self.options.nccl else [])]

    def measure_link(self):
        piece = min(1024, self.options.trainer // MIB)
        touched = self.options.trainer // MIB if not self.data["simulated"] else 0
        words = ["link", "--piece-mib", piece, "--touch-mib", touched, *(["--nccl", self.options.nccl] if self.options.nccl else [])]
        child = Program(self, "link", [*self.command("link"), *words], self.environment(None)("link"))
        try:
            word, _, found = child.hear(120).partition(" ")
        finally:
            child.kill()
        if word != "ok":
            raise Failed(f"link: {found}")
        found = json.loads(found)
        self.data["link"] = {way: found["bytes"] / median(found[way]) for way in ("out", "in")}
        if self.options.nccl and found["nccl"]:
            self.data["notes"].append(f"Without process groups: {found['nccl']}.")
            self.options.nccl = ""

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
        pair = Pair(self, mode, self.command, self.environment(mode), self.program_options(mode))
        try:
            pair.begin(self.sizes)
            for number in range(1 + self.rounds(mode)):
                # No process groups, no rows for them.
                took = {row: value for row, value in pair.round().items() if self.options.nccl or not row.startswith("groups")}
                kinds = [kind for kind, belongs in (("first", number == 0), ("samples", number or not self.rounds(mode))) if belongs]
                for kind in kinds:
                    for row, value in took.items():
                        self.data[kind].setdefault(mode, {}).setdefault(row, []).append(value)
                self.data["left_in_use"].setdefault(mode, []).append(pair.left_in_use)
                self.say("  " + ", ".join(f"{row} {value:.3f}" for row, value in took.items()) + f"; all {sum(took.values()):.2f} s")
            pair.end()
        finally:
            for child in pair.children:
                child.kill()
        self.took[mode] = time.monotonic() - begun

    def step(self, name, wanted, function, *arguments):
        if self.left() < wanted:
            self.data["missed"].append(f"{name}: out of time")
            self.say(f"{name}: skipped, {self.left():.0f} s left and it takes {wanted:.0f}")
            return
        try:
            function(*arguments)
        except (Failed, OSError, subprocess.SubprocessError) as error:
            self.data["missed"].append(f"{name}: {error}")
            self.say(f"{name}: {error}")

    def soak(self):
        """Many steps of one pair under `vramctl run`, and what has grown by then."""
        def environment(role):
            found = self.environment("vramctl")(role)
            del found["LD_PRELOAD"]
            return found

        def command(role):
            return [self.options.vramctl, "run", "--name", role, "--no-python", "--", *self.command(role)]

        pair = Pair(self, "soak", command, environment, self.program_options("vramctl"))
        try:
            pair.begin(self.sizes)
            soak = rl_soak.Soak(self, pair, self.options.cycles, self.options.suspend_every)
            try:
                soak.run()
            finally:
                self.data["soak"] = soak.result()
            pair.end()
        finally:
            for child in pair.children:
                child.kill()
        if wrong := growth.growing([self.data["soak"]]):
            raise Failed("not flat: " + "; ".join(wrong))

    def vramctl(self, *arguments):
        """What the command line prints."""
        done = subprocess.run(
            [self.options.vramctl, *arguments], env=self.environment("vramctl")("") | {"LD_PRELOAD": ""}, capture_output=True, text=True, timeout=120
        )
        if done.returncode:
            raise Failed(f"vramctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def run(self):
        if self.options.cycles:
            self.step("soak", 0, self.soak)
            return
        self.step("link", 5, self.measure_link)
        for number in range(self.options.turns):
            for mode in self.options.modes:
                self.step(f"{MODES[mode][0]}, turn {number + 1}", self.planned(mode), self.turn, mode)
                self.write()

    def write(self):
        (self.out / "rl-step.json").write_text(json.dumps(self.data, indent=1) + "\n")
        text = "\n".join(self.data["missed"]) + "\n"
        if self.data["link"]:
            text = markdown(self.data)
        elif (soak := self.data.get("soak")) and soak["samples"]:
            text = rl_soak.markdown(soak) + "\n" + text
        (self.out / "rl-step.md").write_text(text)
        return text

    def plan(self):
        """What would run, for `--dry-run`."""
        options = self.options
        needed = options.trainer + 2 * GIB
        lines = [
            f"trainer {gib(options.trainer)}, of which weights {gib(options.weights)}; engine weights {gib(options.weights)}, "
            f"KV cache {gib(options.kv)}; buckets of {options.bucket_mib} MiB",
            f"GPU memory: up to {gib(max(options.trainer, options.weights + options.kv))} and two contexts; "
            f"host memory: about {gib(needed)} ({gib(host_memory('MemAvailable'))} is available)",
            f"process groups: {options.nccl or 'none (no --nccl)'}",
        ]
        for number in range(options.turns):
            lines += [
                f"turn {number + 1}: {MODES[mode][0]}, {plural(1 + self.rounds(mode))}, about {self.planned(mode):.0f} s"
                for mode in options.modes
            ]
        return "\n".join(lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("work", "out", "library", "vramctl", "saver", "sockets", "python", "modes", "gpu", "driver", "command"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("trainer-gib", "engine-weights-gib", "kv-gib", "limit"):
        parser.add_argument(f"--{name}", type=float, required=True)
    for name in ("rounds", "turns", "piece-mib", "bucket-mib", "cycles", "suspend-every"):
        parser.add_argument(f"--{name}", type=int, required=True)
    for name in ("commit", "nccl"):
        parser.add_argument(f"--{name}", default="")
    parser.add_argument("--other-work", type=float, default=OTHER_WORK)
    parser.add_argument("--buckets", choices=("plain", "managed"), default="plain")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args()
    options.modes = options.modes.split(",")
    if unknown := [mode for mode in options.modes if mode not in MODES]:
        parser.error(f"no such mode: {', '.join(unknown)}. There are: {', '.join(MODES)}")
    sizes = {"trainer": options.trainer_gib, "weights": options.engine_weights_gib, "kv": options.kv_gib}
    for name, size in sizes.items():
        setattr(options, name, round(size * GIB / (2 * MIB)) * 2 * MIB)
    if options.weights >= options.trainer:
        parser.error("the trainer has the weights and more: --trainer-gib must be above --engine-weights-gib")
    bench = Bench(options)
    if options.dry_run:
        print(bench.plan())
        return 0
    try:
        bench.run()
    except KeyboardInterrupt:
        bench.data["missed"].append("everything after the interruption")
    print(bench.write())
    bench.say(f"{bench.out}/rl-step.md, rl-step.json and rl-step.log")
    return 1 if bench.data["missed"] else 0


if __name__ == "__main__":
    sys.exit(main())
