"""The cost of the preloaded library where it has nothing to do.

  - a cudaMalloc and cudaFree of 4 KiB, which it does not manage (limit: 100 ns more),
  - the same of the driver API, cuMemAlloc and cuMemFree (limit: 100 ns more),
  - dlsym and cuGetProcAddress, of functions that it answers and of others,
  - the launch of an empty kernel, which passes the gate (limit: 5 ns more), and a launch that
    the driver refuses, which shows the gate without the noise of a launch,
  - an allocation or a free of 2 to 8 MiB, which it manages, with VRAMCTL_TRACE=1 and without
    (limit: 1% more),
  - a program's own virtual memory, per call: cuMemCreate, cuMemMap, cuMemSetAccess, cuMemUnmap
    and cuMemRelease of 2 MiB (with VRAMCTL_TAG=default it may be managed),
  - the start of a program without CUDA, `bash -c true` (limit: 2 ms more),
  - importing torch, if it is installed (limit: 1% more processor time).

Runs with and without the library take turns; medians are compared. Calls of CUDA are also
compared with the runtime's and the driver's own functions within one process, which is more
precise: two processes differ by a few ns (± in the table). Prints a table, and exits
with 1 if a limit is exceeded. Run it on an idle machine.
"""

import importlib.util
import os
import resource
import statistics
import subprocess
import sys
import time

from measure import run, setup
from measure.child import Failed
from measure.tables import table as lines_of

PAIR_LIMIT_NS = 100.0
LAUNCH_LIMIT_NS = 5.0
START_LIMIT_MS = 2.0
IMPORT_LIMIT = 0.01  # of the time without the library
TRACE_LIMIT = 0.01  # of the time without the ring
# Live managed allocations while pairs of unmanaged ones are timed.
HELD = 256


# What tests/apps/overhead_driver.c measures, and how much more each may take, in ns.
DRIVER_CALLS = {
    "dlsym_cuda": ("dlsym of cuMemAlloc", None),
    "dlsym_other": ("dlsym of getpid", None),
    "address_alloc": ("cuGetProcAddress of cuMemAlloc", None),
    "address_other": ("cuGetProcAddress of cuDeviceGetCount", None),
    "alloc_free": ("cuMemAlloc + cuMemFree, 4 KiB", PAIR_LIMIT_NS),
    "launch": ("cuLaunchKernel of an empty kernel", LAUNCH_LIMIT_NS),
    "launch_refused": ("cuLaunchKernel of no blocks, refused by the driver", LAUNCH_LIMIT_NS),
    "create": ("cuMemCreate, 2 MiB", None),
    "map": ("cuMemMap, 2 MiB", None),
    "access": ("cuMemSetAccess, 2 MiB", None),
    "unmap": ("cuMemUnmap, 2 MiB", None),
    "release": ("cuMemRelease, 2 MiB", None),
}


def environment(**changes):
    return {**{k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "VRAMCTL_TAG")}, **changes}


def output_of(*command, env):
    done = subprocess.run(list(map(str, command)), env=env, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise Failed(f"{command[0]}: {done.stderr.strip()}")
    return [line.split() for line in done.stdout.splitlines()]


def pair_ns(program, env, held):
    figures = {word: float(first) for word, first, *_ in output_of(program, "--hold", held, env=env)}
    return figures["ns_per_pair"], figures["ns_extra"]


def driver_ns(command, env):
    """{call: (as found, the driver's own, more, whether both are the same function)}"""
    return {call: (*map(float, figures), same == "1") for call, *figures, same in output_of(*command, env=env)}


def processor_ms():
    """The processor time of the children so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return (used.ru_utime + used.ru_stime) * 1e3


def run_ms(command, env):
    """The run time of a command, and its processor time."""
    start, processor = time.perf_counter_ns(), processor_ms()
    done = subprocess.run(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, timeout=300)
    taken = (time.perf_counter_ns() - start) / 1e6
    if done.returncode != 0:
        raise Failed(f"{' '.join(command)}: {done.stderr.strip()[-500:]}")
    return taken, processor_ms() - processor


def start_ms(env, repeats):
    """The median run time of `bash -c true`."""
    taken = []
    for _ in range(repeats):
        start = time.perf_counter_ns()
        process = os.posix_spawn("/bin/bash", ["bash", "-c", "true"], env)
        _, status = os.waitpid(process, 0)
        taken.append((time.perf_counter_ns() - start) / 1e6)
        if status != 0:
            raise Failed(f"`bash -c true` ended with {status}")
    return statistics.median(taken)


def in_turns(rounds, measure, variants):
    """{variant: its figure in each round}. The order rotates, so that no variant is always
    first or last."""
    names = list(variants)
    figures = {name: [] for name in names}
    for number in range(rounds):
        turn = number % len(names)
        for name in names[turn:] + names[:turn]:
            figures[name].append(measure(variants[name]))
    return figures


def row(what, how, unit, limit, without, with_library, extra=None, scatter=0.0):
    """One line of the table. Compares figures within a round, which share conditions, rather
    than medians over all rounds."""
    if extra is None:
        extra = [a - b for a, b in zip(with_library, without)]
    middle = statistics.median(extra)
    return {
        "what": what,
        "how": how,
        "unit": unit,
        "without": statistics.median(without),
        "with": statistics.median(with_library),
        "extra": middle,
        "limit": limit,
        "scatter": scatter,
        "ok": limit is None or middle <= limit,
        "rounds_without": without,
        "rounds_with": with_library,
        "rounds_extra": extra,
    }


def pair_rows(what, program, held, rounds, variants):
    """The first two `variants` preload nothing: the second shows the noise between two
    measurements of the same thing."""
    figures = in_turns(rounds, lambda env: pair_ns(program, env, held), variants)
    base, again, *others = figures
    medians = {name: [pair for pair, _ in figures[name]] for name in figures}
    # A pair takes one of two times, a microsecond apart, that vary by process even without the
    # library. So report differences between processes, but apply the limit only within one
    # process, where both kinds of call alternate.
    scatter = statistics.median(abs(a - b) for a, b in zip(medians[again], medians[base]))
    rows = [row(what, again, "ns", None, medians[base], medians[again], scatter=scatter)]
    for name in others:
        rows.append(row(what, name, "ns", None, medians[base], medians[name], scatter=scatter))
        beside = [extra for _, extra in figures[name]]
        own = [pair - extra for pair, extra in figures[name]]
        how = f"{name}, beside the runtime's own in one process"
        rows.append(row(what, how, "ns", PAIR_LIMIT_NS, own, medians[name], beside))
    return rows


def driver_rows(command, rounds, variants):
    """The driver's functions beside those that a program gets, in one process. The first variant preloads nothing: both are
    the same there, so it shows the noise.
    """
    figures = in_turns(rounds, lambda env: driver_ns(command, env), variants)
    base, *others = figures
    rows = []
    for call, (what, limit) in DRIVER_CALLS.items():
        if call not in figures[base][0]:  # a device that runs no kernels
            continue
        scatter = statistics.median(abs(round_[call][2]) for round_ in figures[base])
        for name in others:
            found, own, extra, same = zip(*(round_[call] for round_ in figures[name]))
            how = f"{name}, beside the driver's own in one process" + (", not replaced" if all(same) else "")
            rows.append(row(what, how, "ns", limit, list(own), list(found), list(extra), scatter))
            if call == "launch":
                # What a program sees. Two processes differ by more than the limit, so it is not applied.
                without = [round_[call][0] for round_ in figures[base]]
                rows.append(row(what, f"{name}, and in a process without", "ns", None, without, list(found), scatter=scatter))
    return rows


def trace_rows(program, rounds, variants):
    """What an allocation or a free of managed memory takes. All variants run at the same time and take turns of some
    milliseconds, so that what else the machine does is the same for all. They are started anew in each round: two processes
    differ.
    """
    turns, calls = 40, 200
    figures = {name: [] for name in variants}
    extra = {name: [] for name in variants}
    base, *others = variants
    for number in range(rounds):
        running = {}
        for name, env in variants.items():
            running[name] = subprocess.Popen([program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            if running[name].stdout.readline() != "ready\n":
                raise Failed(f"{program} ended with {running[name].wait()}")
        taken = {name: [] for name in variants}
        names = list(variants)
        for turn in range(turns + 1):
            shift = (number + turn) % len(names)
            for name in names[shift:] + names[:shift]:
                print(calls, file=running[name].stdin, flush=True)
                taken[name].append(int(running[name].stdout.readline().split()[1]) / calls)
        for name, process in running.items():
            process.stdin.close()
            process.wait(60)
            del taken[name][0]  # the first use of everything
            figures[name].append(statistics.median(taken[name]))
        for name in others:
            extra[name].append(statistics.median(one - other for one, other in zip(taken[name], taken[base])))
    limit = TRACE_LIMIT * statistics.median(figures[base])
    again, *traced = others
    scatter = statistics.median(map(abs, extra[again]))
    what = "an allocation or a free of 2 to 8 MiB, managed"
    rows = [row(what, again, "ns", None, figures[base], figures[again], extra[again], scatter)]
    rows += [row(what, name, "ns", limit, figures[base], figures[name], extra[name], scatter) for name in traced]
    for r in rows[1:]:
        # The programs are several processes, which differ by about as much as the limit, whatever they run.
        r["ok"] = r["extra"] <= limit + scatter
    return rows


def start_rows(rounds, variants):
    """How long a program without CUDA takes."""
    figures = in_turns(rounds, lambda env: start_ms(env, 20), variants)
    base, *others = figures
    return [row("bash -c true", name, "ms", START_LIMIT_MS, figures[base], figures[name]) for name in others]


def import_rows(rounds, variants):
    """How long it takes to import torch, if it is installed."""
    if importlib.util.find_spec("torch") is None:
        print("bench: not measured: importing torch, which is not installed", file=sys.stderr)
        return []
    command = [sys.executable, "-c", "import torch"]
    for env in variants.values():
        run_ms(command, env)  # its files come from the disk the first time
    figures = in_turns(rounds, lambda env: run_ms(command, env), variants)
    rows = []
    # Elapsed time varies by more than the limit, so it is only shown.
    for number, what in enumerate(("import torch", "import torch, processor time")):
        times = {name: [run[number] for run in runs] for name, runs in figures.items()}
        base, again, *others = times
        scatter = statistics.median(abs(a - b) for a, b in zip(times[again], times[base]))
        limit = IMPORT_LIMIT * statistics.median(times[base]) if number == 1 else None
        rows += [row(what, name, "ms", limit, times[base], times[name], scatter=scatter) for name in others]
    return rows


def table(rows):
    lines = []
    for r in rows:
        unit, extra = r["unit"], r["extra"]
        most = f"{r['limit']:.3g} {unit}" if r["limit"] is not None else ""
        most += f" ± {r['scatter']:.0f}" if r["scatter"] else ""
        verdict = "" if r["limit"] is None else "ok" if r["ok"] else "OVER"
        ratio = f"{1 + extra / r['without']:.3f}" if r["without"] > 0 else ""
        figures = [f"{r['without']:.2f} {unit}", f"{r['with']:.2f} {unit}", f"{extra:+.2f} {unit}", ratio]
        lines.append([r["what"], r["how"], *figures, most, verdict])
    return lines_of(["what", "how", "without", "with", "more", "ratio", "at most", ""], "llrrrrrl", lines)


def options(add):
    add("--real", action="store_true", help="use the real GPU, or fail; without it, the simulated one where there is no other")
    add("--rounds", type=setup.count, default=11, metavar="N", help="number of turns (11)")


#: The programs of tests/apps that are timed.
APPS = ("overhead", "overhead_driver", "churn")


def main(options):
    if not setup.on_simulated_gpu() and not setup.real_gpu():
        if options.real:
            setup.need_gpu("Check the driver, or leave out --real.")
        options.simulated = True
    # Its figures need a release build, also on the simulated GPU.
    options.given, options.bin = options.bin, setup.built(options.bin)
    # Torch has its own libraries, so it gets the original path, without ours.
    options.torch_path = os.environ.get("LD_LIBRARY_PATH", "")
    setup.machine(options, "--memory", "2G")
    setup.prepare(options)
    if not all(os.path.exists(f"{options.given}/{app}") for app in APPS):
        setup.apps(options.work, options.libcudart)
    else:
        setup.copy(options.given, APPS, options.work)
    os.environ["VRAMCTL_DIR"] = str(options.work / "sockets")
    return Bench(options).all()


class Bench(run.Bench):
    def __init__(self, options):
        super().__init__(options, "overhead", rows=[])

    def parts(self):
        """Each part, and what returns its rows."""
        rounds, programs = self.options.rounds, [self.work / app for app in APPS]
        library = self.env["VRAMCTL_LIB"]
        plain, preloaded, tagged = environment(), environment(LD_PRELOAD=library), environment(LD_PRELOAD=library, VRAMCTL_TAG="default")
        bare = {"LD_LIBRARY_PATH": self.options.torch_path}
        twice, tag = {"without": plain, "without, once more": plain}, "preloaded, VRAMCTL_TAG=default"
        each = {"without": plain, "preloaded": preloaded, tag: tagged}
        held = {**twice, f"{tag} ({HELD} managed)": tagged}
        traced = {"without VRAMCTL_TRACE": tagged, "without, once more": tagged, "VRAMCTL_TRACE=1": {**tagged, "VRAMCTL_TRACE": "1"}}
        imported = {name: {**env, **bare} for name, env in {**twice, tag: tagged}.items()}
        alone, beside = "cudaMalloc + cudaFree, 4 KiB", f"the same, beside {HELD} live allocations of 2 MiB"
        return {
            "cudaMalloc and cudaFree": lambda: pair_rows(alone, programs[0], 0, rounds, {**twice, "preloaded": preloaded, tag: tagged}),
            "the same beside live allocations": lambda: pair_rows(beside, programs[0], HELD, rounds, held),
            "the driver's functions": lambda: driver_rows([programs[1]], rounds, each),
            "allocations with and without VRAMCTL_TRACE": lambda: trace_rows(programs[2], rounds, traced),
            "bash -c true": lambda: start_rows(rounds, each),
            "import torch": lambda: import_rows(min(rounds, 5), imported),
        }

    def run(self):
        for name, measure in self.parts().items():
            self.step(name, 0, self.part, measure)

    def part(self, measure):
        measured = measure()
        self.data["rows"] += measured
        # At once: the last part takes minutes, and may be cut off.
        print("\n".join(table(measured)) + "\n", flush=True)
        self.data["missed"] += [f"{r['what']}, {r['how']}: {r['extra']:+.2f} {r['unit']} is over the limit" for r in measured if not r["ok"]]

    def markdown(self, data):
        about = f"GPU: {data['gpu'] or 'unknown'}; {data['cores']} cores; {self.options.rounds} rounds"
        return "\n".join([about, "", *table(data["rows"])]) + "\n"
