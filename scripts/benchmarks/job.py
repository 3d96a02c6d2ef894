"""How much longer a job of several processes takes to pause and resume than a job of one.

On the simulated GPU. Each process has its own GPU and its own link to the host, so unless something
is serialized, both take the same time. Copies wait for the link (SIMGPU_LINK) and use no processor,
so the number of cores does not matter.

Both jobs run at the same time and are paused and resumed in turns. Prints the medians of the time
that the command takes, from start to end, their ratio (limit: 1.2), and the time without contents to
copy, which is that of the command and the protocol alone. Verifies the contents at the end. Exits
with 1 if the limit is exceeded or something failed.
"""

import json
import os
import time

from measure import run, setup
from measure.child import Failed
from measure.tables import MIB, median, seconds, table

LIMIT = 1.2
STEPS = {"pause": ["pause"], "resume": ["resume"], "discard": ["pause", "--discard"], "resume, discarded": ["resume"]}


def options(add):
    add("--processes", type=int, choices=range(1, 9), default=8, metavar="N", help="processes of the larger job, at most 8 (8)")
    add("--mib", type=int, default=32, metavar="N", help="MiB of weights and cache in each process, which has some more memory; 16 or more (32)")
    add("--seconds", type=setup.count, default=1, metavar="S", help="time that their copy takes (1)")
    add("--rounds", type=setup.count, default=7, metavar="N", help="number of turns (7)")


def main(options):
    if options.mib < 16:
        raise SystemExit("bench: --mib must be 16 or more")
    setup.enter_simulated_gpu("--devices", options.processes, "--memory", "1G", SIMGPU_LINK=f"{options.mib * 1024 // options.seconds}K")
    setup.prepare(options)
    setup.apps(options.work, options.libcudart)
    return Bench(options).all()


class Job:
    """Processes with a name, each on a GPU of its own. Jobs do not see each other."""

    def __init__(self, bench, processes):
        self.bench, self.env = bench, {**bench.app_env, **run.environment(bench.work / f"sockets-{processes}")}
        self.ranks = []
        for gpu in range(processes):
            engine = [bench.work / "engine", "--device", gpu, "--weights-mib", bench.options.mib - 8, "--kv-mib", 8, "--layers", 2]
            self.ranks.append(bench.start(*engine, managed=["--name", "job", "--no-python"], env=self.env))
        for rank in self.ranks:
            if not rank.hear(60).startswith("ready"):
                raise Failed("a process did not start")

    def took(self, *arguments):
        """The seconds that a command takes; of that, those from its request until all processes were done; and the bytes of one."""
        begun = time.perf_counter()
        code, text, _ = self.bench.command(self.bench.bin / "vramctl", *arguments, "--name", "job", "--json", env=self.env)
        took = time.perf_counter() - begun
        if code:
            raise Failed(f"vramctl {' '.join(arguments)}: {text}")
        told = json.loads(text)
        return took, told["jobs"][0]["ms"] / 1e3, told["processes"][0]["report"]["bytes"]

    def verify(self):
        for rank in self.ranks:
            rank.tell("verify")
        answers = [rank.hear(60) for rank in self.ranks]
        if not all("ok" in answer and "corrupt" not in answer for answer in answers):
            raise Failed(f"contents: {answers}")


class Bench(run.Bench):
    def __init__(self, options):
        settings = {name: getattr(options, name) for name in ("processes", "mib", "seconds", "rounds")}
        super().__init__(options, "job", settings=settings, figures={})

    def run(self):
        self.step("two jobs in turns", 0, self.measure)

    def measure(self):
        rounds, jobs = self.options.rounds, {processes: Job(self, processes) for processes in (1, self.options.processes)}
        figures = self.data["figures"] = {step: {processes: [] for processes in jobs} for step in STEPS}
        # With contents, in the order in which they must be done; then without, which nobody can verify.
        for names in (("pause", "resume"), ("discard", "resume, discarded")):
            for number in range(rounds + 1):
                for processes in sorted(jobs, reverse=number % 2 == 1):
                    for name in names:
                        took = jobs[processes].took(*STEPS[name])
                        if number:  # the first prepares host memory
                            figures[name][processes].append(took)
            if "pause" in names:
                for job in jobs.values():
                    job.verify()
        for step in ("pause", "resume"):
            one, of_all = (self.median(step, processes, 0) for processes in jobs)
            if of_all > LIMIT * one:
                self.miss(f"{step}: {of_all / one:.2f} times as long, at most {LIMIT}")

    def median(self, step, processes, which):
        return median([figure[which] for figure in self.data["figures"][step][processes]])

    def markdown(self, data):
        settings, processes = data["settings"], (1, data["settings"]["processes"])
        if not data["figures"] or not all(data["figures"]["resume, discarded"].values()):
            return ""
        mib = self.median("pause", 1, 2) / MIB
        rows = []
        for step in STEPS:
            took, inside = ([self.median(step, many, which) for many in processes] for which in (0, 1))
            ratio = [f"{took[1] / took[0]:.2f}", LIMIT, "ok" if took[1] <= LIMIT * took[0] else "OVER"] if "discard" not in step else [""] * 3
            rows.append([step, *(f"{seconds(whole)} ({seconds(part)} in the job)" for whole, part in zip(took, inside)), *ratio])
        about = f"{settings['rounds']} rounds, {mib:.0f} MiB in each process, whose copy takes {settings['seconds'] * mib / settings['mib']:.2f} s"
        header = ["medians", "1 process", f"{processes[1]} processes", "ratio", "at most", ""]
        return "\n".join([f"{about}; {os.cpu_count()} cores. The contents were the same.", "", *table(header, "lrrrrl", rows)]) + "\n"
