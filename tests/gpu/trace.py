"""What the trace costs: the training steps of watch.py in jobs with and without `vramctl run --trace`, in turns in one run. One more
kind of step returns torch's cache after each, so that allocations happen in it: a step whose blocks torch keeps has no event.

usage: trace.py VRAMCTL PACKAGE        prints a line `ok: …` or `FAILED: …` for each check, and a table. PACKAGE: python/vramctl
"""

import json
import statistics
import sys
import tempfile

from common import check
from watch import SIZES, command, first, gpus, ranks

#: Jobs of each kind: a program that is started again differs from itself by more than a trace costs.
JOBS = 5
ROUNDS = 8
SECONDS = 0.15
#: Steps as (what is printed, watch.py's size, whether the cache is returned after each).
STEPS = [(what, what, False) for what, *_ in SIZES] + [("large layers, cache returned", SIZES[0][0], True)]


def measure(jobs):
    print("| step | | ms | more | ± |\n| --- | --- | ---: | ---: | ---: |")
    for title, what, empty in STEPS:
        steps = max(5, int(SECONDS * 1e3 / first(jobs[0][1], mode="plain", what=what, steps=10, empty=empty)["ms"]))
        ms = [[] for _ in jobs]
        for number in range(ROUNDS * len(jobs)):
            # Every second round backwards: a GPU that was less busy before is faster for a while.
            at = number % len(jobs) if number // len(jobs) % 2 else -number % len(jobs)
            first(jobs[at][1], mode="plain", what=what, steps=max(2, steps // 10), empty=empty)
            ms[at].append(first(jobs[at][1], mode="plain", what=what, steps=steps, empty=empty)["ms"])
        of = {
            traced: [statistics.median(times) for (is_traced, _), times in zip(jobs, ms) if is_traced is traced] for traced in (False, True)
        }
        plain, traced = (statistics.mean(of[kind]) for kind in (False, True))
        error = (sum(statistics.variance(times) / len(times) for times in of.values())) ** 0.5 / plain
        scatter = statistics.stdev(of[False]) / plain
        print(f"| {title} | plain | {plain:.3f} | | {scatter:.2%} from job to job |")
        print(f"| {title} | trace | {traced:.3f} | {traced / plain - 1:+.2%} | {error:.2%} |", flush=True)
        check(
            f"{title}: the trace costs less than 1% of a step beyond the noise",
            traced / plain - 1 - 2 * error < 0.01,
            f"{traced / plain - 1:+.2%} ± {error:.2%}",
        )


def main():
    vramctl, package = sys.argv[1:3]
    world = min(2, gpus())
    with tempfile.NamedTemporaryFile("a") as log:
        jobs = []
        try:
            for number in range(2 * JOBS):
                traced = number % 2 == 1
                name = f"trace-{number}"
                jobs.append((traced, ranks(vramctl, name, world, package, log, *(["--trace"] if traced else []))))
            ready = [job.all("ready", job.hear()) for _, job in jobs]
            check(f"{len(jobs)} jobs of {world} ranks have started", all(ready))
            measure(jobs)
            with tempfile.NamedTemporaryFile(suffix=".json") as file:
                command(vramctl, "trace", "--name", "trace-1", "-o", file.name)
                events = len(json.load(file)["traceEvents"])
            check("the trace has the allocations of the steps", events > 100, f"{events} events")
        finally:
            for _, job in jobs:
                job.end()


if __name__ == "__main__":
    main()
