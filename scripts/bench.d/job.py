"""The measurements behind scripts/bench-job, which sets everything up and runs this."""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

LIMIT = 1.2


class Job:
    """Processes with a name, each on a GPU of its own. Jobs do not see each other."""

    def __init__(self, options, processes):
        self.vramctl = pathlib.Path(options.bin) / "vramctl"
        sockets = pathlib.Path(options.work) / f"sockets-{processes}"
        sockets.mkdir(mode=0o700)
        self.environment = {**os.environ, "VRAMCTL_DIR": str(sockets), "VRAMCTL_LIB": f"{options.bin}/libvramctl.so"}
        self.ranks = [self.start(options, gpu) for gpu in range(processes)]
        for rank in self.ranks:
            if not rank.stdout.readline().startswith("ready"):
                raise SystemExit("bench-job: a process did not start")

    def start(self, options, gpu):
        engine = [f"{options.work}/engine", "--device", gpu, "--weights-mib", options.mib - 8, "--kv-mib", 8, "--layers", 2]
        command = [self.vramctl, "run", "--name", "job", "--no-python", "--", *engine]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        return subprocess.Popen(list(map(str, command)), env=self.environment, **pipes)

    def ms(self, *arguments):
        """The time that a command takes; of that, the time from its request until all processes were done; and the bytes of one."""
        begun = time.perf_counter()
        command = [self.vramctl, *arguments, "--name", "job", "--json"]
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=120)
        ms = 1e3 * (time.perf_counter() - begun)
        if done.returncode:
            raise SystemExit(f"bench-job: vramctl {' '.join(arguments)}: {done.stdout}{done.stderr}")
        told = json.loads(done.stdout)
        return ms, told["jobs"][0]["ms"], told["processes"][0]["report"]["bytes"]

    def verify(self):
        for rank in self.ranks:
            rank.stdin.write("verify\n")
            rank.stdin.flush()
        answers = [rank.stdout.readline().strip() for rank in self.ranks]
        return all("ok" in answer and "corrupt" not in answer for answer in answers), answers

    def end(self):
        for rank in self.ranks:
            rank.kill()
            rank.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("bin", "work"):
        parser.add_argument(f"--{name}", required=True)
    for name in ("processes", "mib", "seconds", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--json")
    options = parser.parse_args()

    jobs = {}
    try:
        for processes in (1, options.processes):
            jobs[processes] = Job(options, processes)
        steps = {"pause": ["pause"], "resume": ["resume"], "discard": ["pause", "--discard"], "resume, discarded": ["resume"]}
        # With contents, in the order in which they must be done; then without, which nobody can verify.
        figures = {step: {processes: [] for processes in jobs} for step in steps}
        for names in (("pause", "resume"), ("discard", "resume, discarded")):
            for number in range(options.rounds + 1):
                order = sorted(jobs, reverse=number % 2 == 1)
                for processes in order:
                    for name in names:
                        ms = jobs[processes].ms(*steps[name])
                        if number:  # the first prepares host memory
                            figures[name][processes].append(ms)
            if "pause" in names:
                same = {processes: job.verify() for processes, job in jobs.items()}
    finally:
        for job in jobs.values():
            job.end()

    def median(step, processes, which):
        return statistics.median(figure[which] for figure in figures[step][processes])

    mib = median("pause", 1, 2) / 2**20
    at_best = 1e3 * options.seconds * mib / options.mib
    print(f"{options.rounds} rounds, {mib:.0f} MiB in each process, whose copy takes {at_best:.0f} ms; {os.cpu_count()} cores\n")
    print(f"| medians, ms | 1 process | {options.processes} processes | ratio | at most | |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    within = True
    for step in steps:
        one, all_of_them = (median(step, processes, 0) for processes in (1, options.processes))
        inside = [median(step, processes, 1) for processes in (1, options.processes)]
        is_limited = step in ("pause", "resume")
        ok = not is_limited or all_of_them <= LIMIT * one
        within = within and ok
        verdict = f"{all_of_them / one:.2f} | {LIMIT} | {'ok' if ok else 'OVER'}" if is_limited else " | |"
        print(f"| {step} | {one:.0f} ({inside[0]:.0f} in the job) | {all_of_them:.0f} ({inside[1]:.0f}) | {verdict} |")
    failed = [answers for good, answers in same.values() if not good]
    print(f"\ncontents: {'the same' if not failed else f'FAILED: {failed}'}")
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"cores": os.cpu_count(), "options": vars(options), "figures": figures}, file, indent=1)
    return 0 if within and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
