"""Hundreds of cycles of an engine, and pauses while it works: the part `long`. No token may differ, and nothing may grow. And the same without
the library, asleep and awake alone: the part `long-alone`, which shows what the engine itself grows by.
"""

import random
import statistics
import time

from measure import growth
from measure.child import Failed

#: Requests at once, and tokens of each, in turns.
LOADS = ("burst 1 200", "burst 32 100")
#: Each of so many cycles has a suspend.
SUSPEND_EVERY = 20
#: Small, because every pause copies it.
KV_GIB = 2


def long(run):
    """As many cycles and pauses as earlier runs (--join) have left, and as fit into the limit."""
    kind = KINDS[run.section]
    name, wanted = f"{run.options.engine}/{run.section}", kind.wanted
    before = run.parts.get(name, {"runs": []})["runs"]
    left = {what: max(0, getattr(run.options, what) - sum(one[what] for one in before)) for what in wanted}
    if not any(left.values()):
        run.say("  nothing is left to do")
        return {"runs": [], "started": run.started(run.section)}
    more = ["--sleep"] + (["--kv-gib", KV_GIB] if run.options.engine == "vllm" else [])
    program = run.launch(kind.managed, run.section, None, *more)
    run.hear_start(program)
    found = {"cycles": 0, "pauses": 0, "suspends": [], "tokens": 0, "wrong": []}
    turns = kind(run, program, random.Random(len(before)), found)
    longest = 0.0
    try:
        while any(found[what] < left[what] for what in wanted) and not found["wrong"] and run.deadline.rest() > 2 * longest + 5:
            began = time.monotonic()
            turns.cycle(max(1, -(-left.get("pauses", 0) // max(1, left["cycles"]))))
            longest = max(longest, time.monotonic() - began)
            if found["cycles"] % 10 == 0:
                run.say("  " + ", ".join(f"{found[what]} of {left[what]} {what}" for what in wanted))
        turns.recorder.finish()
    except Failed as error:
        run.expect("runs to its end", False, error)
    one = {**found, **turns.recorder.run()}
    told = f"{found['cycles']} cycles, {found['pauses']} pauses in the middle of requests, {len(found['suspends'])} suspends"
    run.expect(f"{told}: same tokens and log-probabilities", found["cycles"] and not found["wrong"], "; ".join(found["wrong"]))
    grows = growth.growing([one])
    run.expect("nothing grows", not grows, "; ".join(grows))
    missing = [f"{left[what] - found[what]} {what}" for what in wanted if found[what] < left[what]]
    if missing:
        run.say(f"  {' and '.join(missing)} are left for another run, with --join")
    return {"runs": [one], "started": run.started(run.section)}


class Turns:
    """The cycles of an engine, of which each is recorded."""

    managed, wanted = True, ("cycles", "pauses")

    def __init__(self, run, program, chance, found):
        self.run, self.program, self.chance, self.found = run, program, chance, found
        self.begin()
        self.loads = [(burst, run.undisturbed(program, burst)) for burst in LOADS]
        self.recorder = growth.Recorder(self.look, settle=2 * SUSPEND_EVERY)

    def begin(self):
        self.other = self.run.start_other()

    def look(self, what):
        """The answer of `vramctl status` or `vramctl gpus`."""
        return self.run.vramctl(what)[1]

    def cycle(self, pauses):
        """Sleeps and wakes up by its own API; then works on requests."""
        run, program, number = self.run, self.program, self.found["cycles"] + 1
        began = time.monotonic()
        asleep_s = program.ask_json("sleep 1", 60)["s"]
        measures = {"device while asleep, bytes": run.used_mib(below=8 * 1024) << 20, "sleep, seconds": asleep_s}
        measures["wake up, seconds"] = program.ask_json("wake 1", 60)["s"]
        burst, alone_s = self.loads[number % len(self.loads)]
        wrong, more = self.work(number, burst, alone_s, pauses)
        measures |= more
        self.found["wrong"] += [f"cycle {number}: {text}" for text in wrong]
        requests, tokens = map(int, burst.split()[1:])
        self.found["tokens"] += requests * tokens
        self.found["cycles"] = number
        measures |= {"device bytes": run.used_mib() << 20, "whole cycle, seconds": time.monotonic() - began}
        if not wrong:
            self.recorder.record(measures)

    def work(self, number, burst, alone_s, pauses):
        """Is paused from outside meanwhile, or suspended. Returns what was wrong, and measures."""
        run, program = self.run, self.program
        if number % SUSPEND_EVERY == 0:
            used = []
            one, wrong = run.suspended(program, burst, alone_s, self.chance, lambda: used.append(self.other.ask("use", 60)))
            self.found["suspends"] += [one["suspend_ms"] + one["resume_ms"]] if one else []
            return wrong + [text for text in used if not text.startswith("verified")], {}
        done, wrong = run.interrupted(program, self.other, burst, alone_s, self.chance, pauses)
        self.found["pauses"] += len(done)
        if not done:
            return wrong, {}
        middle = {what: statistics.median(one[what] for one in done) for what in ("pause_ms", "resume_ms", "used_mib")}
        measures = {f"{what}, seconds": middle[f"{what}_ms"] / 1e3 for what in ("pause", "resume")}
        return wrong, {"device while paused, bytes": int(middle["used_mib"]) << 20, **measures}


class Alone(Turns):
    """The cycles of an engine without the library, which nobody pauses."""

    managed, wanted = False, ("cycles",)

    def begin(self):
        pass

    def look(self, what):
        if what == "gpus":
            return super().look(what)
        return {"processes": [{"pid": self.program.process.pid, "name": self.run.NAME, "host": {"pinned_bytes": 0}}]}

    def work(self, number, burst, alone_s, pauses):
        _, wrong = self.run.interrupted(self.program, None, burst, alone_s, self.chance, 0)
        return wrong, {}


#: By part.
KINDS = {"long": Turns, "long-alone": Alone}
