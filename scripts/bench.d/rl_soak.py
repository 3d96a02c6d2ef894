"""Hundreds of steps of a trainer and an engine in turns, for scripts/bench-rl-step --cycles: nothing may grow."""

import json
import statistics
import time

import growth
from bench import host_memory


class Soak:
    """`bench` is a Bench of rl_step.py, `pair` its trainer and engine, started by `vramctl run` with the names of their roles."""

    def __init__(self, bench, pair, cycles, suspend_every):
        self.bench, self.pair, self.cycles, self.suspend_every = bench, pair, cycles, suspend_every
        self.recorder = growth.Recorder(lambda what: json.loads(bench.vramctl(what, "--json")), settle=2 * suspend_every)
        self.suspends = []  # seconds

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
                self.bench.data["missed"].append(f"{self.cycles - number + 1} of {self.cycles} steps: out of time")
                break
            self.step(number)
            if number % max(1, self.cycles // 10) == 0:
                self.bench.say(f"{number} steps")
        self.recorder.finish()

    def result(self):
        return {**self.recorder.run(), "suspends": self.suspends}


def markdown(run):
    lines = [f"{len(run['samples'])} steps, {len(run['suspends'])} suspends", "", *growth.table([run], "step")]
    if run["suspends"]:
        lines += ["", f"A suspend and the resume after it: {statistics.median(run['suspends']):.2f} s (median)."]
    return "\n".join(lines) + "\n"
