"""The measurements behind scripts/bench-overhead, which sets everything up and runs this."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

PAIR_LIMIT_NS = 100.0
START_LIMIT_MS = 2.0
# Live managed allocations while pairs of unmanaged ones are timed.
HELD = 256


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


def table(rows):
    lines = [
        "| what | how | without | with | more | at most | |",
        "| --- | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    for r in rows:
        unit = r["unit"]
        most = verdict = ""
        if r["limit"] is not None:
            most = f"{r['limit']:.0f} {unit}"
            verdict = "ok" if r["ok"] else "OVER"
        if r["scatter"]:
            most += f" ± {r['scatter']:.0f}"
        lines.append(
            f"| {r['what']} | {r['how']} | {r['without']:.2f} {unit} | {r['with']:.2f} {unit} "
            f"| {r['extra']:+.2f} {unit} | {most} | {verdict} |"
        )
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", required=True)
    parser.add_argument("--overhead", required=True)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--gpu", default="")
    parser.add_argument("--json")
    options = parser.parse_args()

    plain = environment()
    preloaded = environment(LD_PRELOAD=options.library)
    tagged = environment(LD_PRELOAD=options.library, VRAMCTL_TAG="default")

    rows = pair_rows(
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
    )
    rows += pair_rows(
        f"the same, beside {HELD} live allocations of 2 MiB",
        options.overhead,
        HELD,
        options.rounds,
        {
            "without": plain,
            "without, once more": plain,
            f"preloaded, VRAMCTL_TAG=default ({HELD} managed)": tagged,
        },
    )
    starts = in_turns(
        options.rounds,
        lambda env: start_ms(env, 20),
        {"without": plain, "preloaded": preloaded, "preloaded, VRAMCTL_TAG=default": tagged},
    )
    base, *others = starts
    rows += [
        row("bash -c true", name, "ms", START_LIMIT_MS, starts[base], starts[name])
        for name in others
    ]

    print(f"GPU: {options.gpu or 'unknown'}; {os.cpu_count()} cores; {options.rounds} rounds\n")
    print("\n".join(table(rows)))
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
