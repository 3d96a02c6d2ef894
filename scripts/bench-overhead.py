"""The measurements behind scripts/bench-overhead, which sets everything up and runs this."""

import argparse
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import time

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
    env = {k: v for k, v in os.environ.items() if k not in ("LD_PRELOAD", "VRAMCTL_TAG")}
    env.update(changes)
    return env


def pair_ns(program, env, held):
    command = [program, "--hold", str(held)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"bench-overhead: {' '.join(command)}: {done.stderr.strip()}")
    figures = {word: float(first) for word, first, *_ in map(str.split, done.stdout.splitlines())}
    return figures["ns_per_pair"], figures["ns_extra"]


def driver_ns(command, env):
    """{call: (as found, the driver's own, more, whether both are the same function)}"""
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=120)
    if done.returncode != 0:
        raise SystemExit(f"bench-overhead: {command[0]}: {done.stderr.strip()}")
    lines = [line.split() for line in done.stdout.splitlines()]
    return {call: (*map(float, figures), same == "1") for call, *figures, same in lines}


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
        raise SystemExit(f"bench-overhead: {' '.join(command)}: {done.stderr.strip()[-500:]}")
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
            raise SystemExit(f"bench-overhead: `bash -c true` ended with {status}")
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
                raise SystemExit(f"bench-overhead: {program} ended with {running[name].wait()}")
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
        print("bench-overhead: not measured: importing torch, which is not installed", file=sys.stderr)
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
    lines = [
        "| what | how | without | with | more | ratio | at most | |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for r in rows:
        unit = r["unit"]
        most = verdict = ""
        ratio = f"{1 + r['extra'] / r['without']:.3f}" if r["without"] > 0 else ""
        if r["limit"] is not None:
            most = f"{r['limit']:.3g} {unit}"
            verdict = "ok" if r["ok"] else "OVER"
        if r["scatter"]:
            most += f" ± {r['scatter']:.0f}"
        lines.append(
            f"| {r['what']} | {r['how']} | {r['without']:.2f} {unit} | {r['with']:.2f} {unit} "
            f"| {r['extra']:+.2f} {unit} | {ratio} | {most} | {verdict} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--overhead", required=True)
    parser.add_argument("--overhead-driver", required=True)
    parser.add_argument("--churn", required=True)
    parser.add_argument("--library-path", default="")
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--json")
    options = parser.parse_args()

    plain = environment()
    preloaded = environment(LD_PRELOAD=options.library)
    tagged = environment(LD_PRELOAD=options.library, VRAMCTL_TAG="default")

    # Torch has its own libraries, so it gets the original path, without ours.
    bare = {"LD_LIBRARY_PATH": options.library_path}
    parts = {
        "cudaMalloc and cudaFree": lambda: pair_rows(
            "cudaMalloc + cudaFree, 4 KiB",
            options.overhead,
            0,
            options.rounds,
            {
                "without": plain,
                "without, once more": plain,
                "preloaded": preloaded,
                "preloaded, VRAMCTL_TAG=default": tagged,
            },
        ),
        "the same beside live allocations": lambda: pair_rows(
            f"the same, beside {HELD} live allocations of 2 MiB",
            options.overhead,
            HELD,
            options.rounds,
            {
                "without": plain,
                "without, once more": plain,
                f"preloaded, VRAMCTL_TAG=default ({HELD} managed)": tagged,
            },
        ),
        "the driver's functions": lambda: driver_rows(
            [options.overhead_driver],
            options.rounds,
            {"without": plain, "preloaded": preloaded, "preloaded, VRAMCTL_TAG=default": tagged},
        ),
        "allocations with and without VRAMCTL_TRACE": lambda: trace_rows(
            options.churn,
            options.rounds,
            {"without VRAMCTL_TRACE": tagged, "without, once more": tagged, "VRAMCTL_TRACE=1": {**tagged, "VRAMCTL_TRACE": "1"}},
        ),
        "bash -c true": lambda: start_rows(
            options.rounds,
            {"without": plain, "preloaded": preloaded, "preloaded, VRAMCTL_TAG=default": tagged},
        ),
        "import torch": lambda: import_rows(
            min(options.rounds, 5),
            {
                "without": {**plain, **bare},
                "without, once more": {**plain, **bare},
                "preloaded, VRAMCTL_TAG=default": {**tagged, **bare},
            },
        ),
    }
    rows = []
    print(f"GPU: {options.gpu or 'unknown'}; {os.cpu_count()} cores; {options.rounds} rounds\n")
    for number, (what, measure) in enumerate(parts.items(), 1):
        print(f"bench-overhead: {number} of {len(parts)}: {what}", file=sys.stderr, flush=True)
        measured = measure()
        rows += measured
        # At once: the last part takes minutes, and may be cut off.
        print("\n".join(table(measured)) + "\n", flush=True)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(
                {"gpu": options.gpu, "cores": os.cpu_count(), "rows": rows, "table": table(rows)},
                file,
                indent=1,
            )
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
