"""The measurements of scripts/gpu-engines."""

import contextlib
import json
import os
import pathlib
import random
import re
import shlex
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "tests" / "gpu"), str(HERE.parent)]

import long  # noqa: E402
import many  # noqa: E402
import survey  # noqa: E402

import ledger  # noqa: E402
import report  # noqa: E402
from measure.check import Check, dig, most_gib_of  # noqa: E402
from measure.child import Child, Deadline, Failed, no_end  # noqa: E402

NAME = "gpu-engines"


class Program(Child):
    """program.py: its answers start with "@ "; all other lines are the engine's."""

    def hear(self, seconds):
        end = time.monotonic() + seconds
        while True:
            line = super().hear(max(end - time.monotonic(), 0.1))
            if line.startswith("@ "):
                return line[2:]


class Engines(Check):
    NAME = NAME

    def __init__(self, options):
        super().__init__(options, NAME)
        # At this level the library logs each pause and resume, for when a limit is missed.
        self.env.update(VRAMCTL_PYTHON=options.python, VRAMCTL_NAME=NAME, VRAMCTL_LOG="info")
        # The other process and the interpreter run without the engine's environment.
        self.plain_env = dict(self.env)
        self.env.update(given(options))
        if options.gpus == 1:
            self.env["CUDA_VISIBLE_DEVICES"] = self.plain_env["CUDA_VISIBLE_DEVICES"] = str(options.gpu)
        if options.engine_dir:
            paths = [options.engine_dir, self.env.get("PYTHONPATH", "")]
            self.env["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
        self.tags = ["cuda_graph", "kv_cache", "weights"]
        # The first of several runs with the same command has nothing to join yet.
        missing = [file for file in options.join if not os.path.exists(file)]
        if missing:
            self.say(f"nothing is joined of {', '.join(missing)}, which does not exist")
        self.parts = report.join(json.loads(pathlib.Path(file).read_text()) for file in options.join if file not in missing)

    # ---- commands (printed by --dry-run) ----

    def under_library(self, command, managed=True, name=None):
        """A command line, with or without the library."""
        share = ["--share"] if self.options.share else []
        return [str(self.bin / "vramctl"), "run", *share, "--name", name or NAME, "--", *command] if managed else list(command)

    def settings(self, part):
        """The environment variables that define a part."""
        settings = {}
        if part == "many":
            # Weights do not change; a KV cache is dropped when its engine leaves.
            settings.update(VRAMCTL_RETAIN="weights", VRAMCTL_BACKUP="kv_cache=discard")
        if part in ("hold", "suspend", "driver", "move", "many", "alternatives", "long", "long-alone", "features") and self.options.engine == "vllm":
            settings["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
        return settings

    def env_of(self, part):
        """The environment of a part's engines. The user's own settings take precedence."""
        return {**self.env, **self.settings(part), **given(self.options)}

    def started(self, part):
        """The command that starts a part's engine, for people."""
        mine = given(self.options)
        settings = {**mine, **self.settings(part), **mine}
        words = [
            *(f"{name}={value}" for name, value in settings.items()),
            *([] if part in ("alternatives", "long-alone") else ["vramctl", "run", "--"]),
        ]
        return f"{shlex.join(words)} …" if words else "plain"

    def program(self, part=""):
        options = self.options
        # Two engines share the GPU for the time per token.
        fraction = min(options.fraction, 0.4) if part == "tpot" else options.fraction
        arguments = (options.engine, options.model or "MODEL", fraction, options.gpus)
        return [sys.executable, str(HERE / "program.py"), *map(str, arguments)]

    def other(self, gib=None):
        """The command of another process that uses the memory."""
        return [sys.executable, str(HERE / "other.py"), str(gib or self.options.other_gib), str(self.options.gpus)]

    def pause(self):
        """The commands that pause the engine from the shell."""
        both = ["--name", NAME, "--json"]
        if not self.options.discard:
            return [["pause", *self.tags, *both]]
        kept = [tag for tag in self.tags if tag != "kv_cache"]
        # The program resets the engine's prefix cache itself.
        return [["pause", "kv_cache", "--discard", "--force", *both], ["pause", *kept, *both]]

    def checkpoint(self):
        """The command that has the driver checkpoint and restore a process."""
        return [sys.executable, str(HERE.parents[1] / "tests" / "gpu" / "suspend.py"), "--driver"]

    def plan(self):
        """The commands of each part."""
        vramctl = str(self.bin / "vramctl")
        outside = [
            self.under_library(self.program()),
            *[[vramctl, *line] for line in self.pause()],
            self.other(),
            [vramctl, "resume", *self.tags, "--name", NAME, "--json"],
        ]
        both = [self.program("tpot"), self.under_library(self.program("tpot"))]
        program = [*self.program(), "--kv-gib", "N"]

        def started(part, command, **how):
            settings = [f"{name}={value}" for name, value in self.settings(part).items()]
            return [*(["env", *settings] if settings else []), *self.under_library(command, **how)]

        def held(part):
            return [[*self.other(), "--serve"], [vramctl, *self.held_pause(part)], [vramctl, "resume", "--name", NAME, "--json"]]

        plans = {
            "outside": outside,
            "suspend": [
                started("suspend", self.program()),
                [vramctl, "suspend", NAME, "--json"],
                self.other("GIB"),
                [vramctl, "resume", "--name", NAME, "--json"],
            ],
            "driver": [self.program(), [*self.checkpoint(), "PID"]],
            "move": [
                started("move", self.program()),
                [vramctl, "move", NAME, "--to", str(self.options.to), "--json"],
                [vramctl, "move", NAME, "--to", str(self.options.gpu), "--json"],
            ],
            "hold": [
                started("hold", self.program()),
                *held("hold"),
            ],
            "long": [started("long", [*self.program(), "--sleep"]), *held("long"), [vramctl, "suspend", NAME, *self.kept("long"), "--json"]],
            "long-alone": [[*self.program(), "--sleep"]],
            "tpot": both,
            "many": [
                started("many", program, name="model-1"),
                ["…"],
                [vramctl, "pause", "--name", "model-1", "--force", "--json"],
                [vramctl, "resume", "--name", "model-2", "--timeout", "60", "--json"],
                [vramctl, "suspend", "--name", "model-1", "--json"],
            ],
            "alternatives": [program, [*program, "--sleep"]],
            "features": survey.plan(self),
        }
        names = ("PYTHONPATH", "VRAMCTL_LIB", "VRAMCTL_PYTHON", "VRAMCTL_LOG", *given(self.options))
        lines = [f"{name}={shlex.quote(self.env[name])}" for name in dict.fromkeys(names) if name in self.env]
        if self.needs_model():
            lines += ["# the model", shlex.join(survey.maker("llama", self.options))]
        for part in self.options.part.split(","):
            lines += [f"# {part}", *[shlex.join(command) for command in plans[part]]]
        return "\n".join(lines)

    # ---- the machine ----

    def gpu(self, what):
        """Memory in use, on the fullest GPU."""
        if what != "memory.used" or self.options.gpus == 1:
            return self.smi(f"--id={self.options.gpu}", f"--query-gpu={what}", "--format=csv,noheader,nounits")
        used = self.smi("--query-gpu=memory.used", "--format=csv,noheader,nounits").split()
        return max(used[: self.options.gpus], key=int)

    def machine(self):
        return {**super().machine(), "gpus": self.options.gpus}

    # ---- parts ----

    def needs_model(self):
        """The features make their own."""
        return not self.options.model and self.options.part != "features"

    def launch(self, managed, part="", name=None, *more, **variables):
        """Starts program.py, without waiting for it."""
        command = self.under_library([*self.program(part), *map(str, more)], managed, name)
        with no_end():
            program = Program(self, name or "program.py", command, {**self.env_of(part), **variables})
            self.children.append(program)
        return program

    def hear_start(self, program):
        started = json.loads(program.hear(300))
        self.version = started["version"]
        self.say(f"  started in {started['start_s']:.1f} s, {self.used_mib()} MiB in use")

    def start_program(self, managed, part=""):
        program = self.launch(managed, part)
        self.hear_start(program)
        return program

    def outside(self):
        program = self.start_program(managed=True)
        # Warm up: the first answers may come from kernels that are still being autotuned.
        program.ask_json("generate", 120)
        first = program.ask_json("generate", 120)
        self.expect("the engine is deterministic", first["tokens"] and first["logprobs"], first)
        tags = {name: tag["bytes"] for name, tag in self.states(NAME).items()}
        self.expect(f"the tags {', '.join(self.tags)} exist", set(self.tags) <= set(tags), json.dumps(tags))
        cycles, told = [], {"active": self.ledger("active")}
        for number in range(1, self.options.cycles + 1):
            if self.options.discard:
                program.ask_json("forget")
            pause_ms = sum(self.shell(*line) for line in self.pause())
            used_mib = self.used_mib(below=8 * 1024)
            if number == 1:
                told["paused"] = self.ledger("paused")
            code, text, _ = self.command(*self.other(), seconds=120, env=self.plain_env)
            self.expect(f"cycle {number}: another process uses {self.options.other_gib} GiB", code == 0, text)
            resume_ms = self.shell("resume", *self.tags, "--name", NAME, "--json", "--timeout", "10")
            same = program.ask_json("generate", 120)
            self.expect(f"cycle {number}: same tokens and log-probabilities", same["tokens"] and same["logprobs"], same)
            cycles.append(
                {
                    "pause_ms": pause_ms,
                    "resume_ms": resume_ms,
                    "used_mib": used_mib,
                    "other_gib": self.options.other_gib if code == 0 else 0,
                    "same": same["tokens"] and same["logprobs"],
                }
            )
        kv = "discarded" if self.options.discard else "kept"
        return {"cycles": cycles, "tags": tags, "kv": kv, "ledger": told, "started": self.started("outside")}

    def ledger(self, when):
        """Compares the ledger of each GPU with nvidia-smi. On those that the engine does not use, others may come and go meanwhile."""
        own = [self.options.gpu] if self.options.gpus == 1 else range(self.options.gpus)
        used = ledger.settled()
        code, answer, text, _ = self.vramctl("gpus")
        gpus = answer.get("gpus", []) if code == 0 and isinstance(answer, dict) else []
        self.expect(f"{when}: every GPU has a ledger", len(gpus) == len(used), text)
        told = []
        for gpu in gpus:
            ok, detail = ledger.compare(gpu, used[gpu["index"]])
            self.say(f"  {when}, GPU {gpu['index']}: {detail}")
            if gpu["index"] in own:
                self.expect(f"{when}: the ledger of GPU {gpu['index']} matches nvidia-smi", ok, detail)
            told.append(detail)
        return told

    def hold(self):
        program = self.start_program(managed=True, part="hold")
        tags = {name: tag["bytes"] for name, tag in self.states(NAME).items()}
        self.expect(f"the tags {', '.join(self.tags)} exist", set(self.tags) <= set(tags), json.dumps(tags))
        other = self.start_other()
        chance = random.Random(self.options.pauses)
        loads = [
            {"requests": requests, "tokens": tokens, **self.hold_in_flight(program, other, f"burst {requests} {tokens}", chance)}
            for requests, tokens in ((1, 600), (32, 200))
        ]
        return {"loads": loads, "tags": tags, "started": self.started("hold")}

    def start_other(self):
        """The other process, which uses the memory each time that it is asked."""
        with no_end():
            other = Child(self, "other.py", [*self.other(), "--serve"], self.plain_env)
            self.children.append(other)
        other.hear(60)
        return other

    def hold_in_flight(self, program, other, burst, chance):
        """Pauses the engine at random moments while it works on a burst of requests, again and again."""
        requests, alone_s = int(burst.split()[1]), self.undisturbed(program, burst)
        pauses, runs, failed = [], 0, []
        while len(pauses) < self.options.pauses and not failed:
            runs += 1
            done, failed = self.interrupted(program, other, burst, alone_s, chance, self.options.pauses - len(pauses))
            pauses += done
            self.say(f"  {requests} in flight: {len(pauses)} of {self.options.pauses} pauses")
        name = f"{requests} in flight, paused {len(pauses)} times in {runs} runs: same tokens and log-probabilities"
        self.expect(name, not failed and len(pauses) == self.options.pauses, "; ".join(failed))
        return {"runs": runs, "pauses": pauses, "alone_s": alone_s, "same": not failed}

    def interrupted(self, program, other, burst, alone_s, chance, most):
        """Pauses the engine up to `most` times while it works on a burst of requests. Returns those pauses, and what was wrong."""
        pauses, failed = [], []
        program.tell(burst)
        # Half of the pauses come early, when the engine may be in a prefill.
        time.sleep(chance.uniform(0, chance.choice((0.15, alone_s / 2))))
        while len(pauses) < most and not program.has_answered() and not failed:
            code, answer, text, _ = self.vramctl(*self.held_pause())
            if code != 0 or answer is None:
                failed.append(text)
                break
            used_mib, in_flight = self.used_mib(below=8 * 1024), not program.has_answered()
            used = other.ask("use", 60)
            resume_ms = self.shell("resume", "--name", NAME, "--json", "--timeout", "10")
            if not used.startswith("verified"):
                failed.append(used)
            elif in_flight:
                pause_ms = max(one["report"]["ms"] for one in answer["processes"])
                (job,) = answer["jobs"]
                times = {"pause_ms": pause_ms, "resume_ms": resume_ms, "freed_ms": job["ms"]}
                pauses.append({**times, "attempts": job["attempts"], "used_mib": used_mib})
            time.sleep(chance.uniform(0, alone_s / 4))
        reply = program.hear_json(burst, 240)
        if reply["differ"] or not reply["complete"]:
            failed.append(f"requests {reply['differ']} differ")
        return pauses, failed

    def start_burst(self, part):
        """Starts the engine. Returns how long some requests take undisturbed, and the command for them."""
        program, burst = self.start_program(managed=True, part=part), "burst 4 400"
        return program, burst, self.undisturbed(program, burst)

    def undisturbed(self, program, burst):
        """How long a burst of requests takes. The answers are what later ones are compared with."""
        # The first answer may come from kernels that are still being autotuned.
        program.ask_json(burst.replace("burst", "warm"), 240)
        program.ask_json(burst, 240)
        alone = program.ask_json(burst, 240)
        self.expect(f"{burst}: undisturbed runs are the same", not alone["differ"], alone)
        return alone["s"]

    def suspend(self):
        """Suspends the engine at random moments while it works on one request, and on 32, in turns."""
        program = self.start_program(managed=True, part="suspend")
        loads = [(burst, self.undisturbed(program, burst)) for burst in ("burst 1 600", "burst 32 200")]
        chance, times = random.Random(self.options.pauses), len(loads) * self.options.pauses
        rounds, failed, longest = [], [], 0.0
        # What there is no time for is said, and the rest is in the table.
        while len(rounds) < times and not failed and self.deadline.rest() > longest:
            began = time.monotonic()
            meanwhile = self.fill if len(rounds) in (0, times - 1) else None
            try:
                one, failed = self.suspended(program, *loads[len(rounds) % len(loads)], chance, meanwhile)
            except Failed as error:
                one, failed = None, [str(error)]
            rounds += [one] if one else []
            self.say(f"  suspended {len(rounds)} of {times} times")
            longest = max(longest, time.monotonic() - began)
        for burst, _ in loads:
            requests = int(burst.split()[1])
            done = [one for one in rounds if one["requests"] == requests]
            wanted = sum(one["in_flight"] for one in done)
            name = f"{requests} in flight, suspended {len(done)} times, {wanted} of them in the middle: same tokens and log-probabilities"
            left = [f"no time for {self.options.pauses - len(done)} more: a larger --limit may help"] if len(done) < self.options.pauses else []
            self.expect(name, not (failed or left) and wanted > 0, "; ".join(failed or left))
        used = [one["used_mib"] for one in rounds]
        self.expect("nothing of it stays on the GPU", bool(used) and max(used) < 32, f"{used} MiB in use")
        first = self.first_token(program) if not failed and len(rounds) == times else None
        return {"rounds": rounds, "first_token": first, "started": self.started("suspend")}

    def suspended(self, program, burst, alone_s, chance, meanwhile=None):
        """Suspends the engine while it works on a burst of requests, and resumes it. Returns the times, and what was wrong."""
        program.tell(burst)
        time.sleep(chance.uniform(0, 0.8 * alone_s))
        began = time.monotonic()
        code, answer, text, _ = self.vramctl("suspend", NAME, *self.kept())
        if code != 0 or answer is None:
            return None, [f"exit code {code}: {text}"]
        one = {"suspend_ms": 1e3 * (time.monotonic() - began), "down": dig(answer, "stages"), "used_mib": self.used_mib(below=64)}
        one.update(in_flight=not program.has_answered(), requests=int(burst.split()[1]))
        if meanwhile:
            meanwhile()
        began = time.monotonic()
        code, answer, text, _ = self.vramctl("resume", "--name", NAME, "--timeout", "10")
        if code != 0:
            return None, [f"exit code {code}: {text}"]
        one.update(resume_ms=1e3 * (time.monotonic() - began), up=dig(answer, "stages"))
        reply = program.hear_json(burst, 240)
        return one, [f"requests {reply['differ']} differ"] if reply["differ"] or not reply["complete"] else []

    def fill(self):
        gib = most_gib_of(int(self.gpu("memory.total")))
        code, text, _ = self.command(*self.other(gib), seconds=120, env=self.plain_env)
        self.expect(f"another process uses {gib} GiB of each GPU", code == 0, text)

    def first_token(self, program):
        """Seconds from a request to a suspended engine to its first token: alone, and with the resume before it."""
        alone = [program.ask_json("token", 60)["s"] for _ in range(3)]
        took, failed = [], []
        for _ in range(5):
            code, _, text, _ = self.vramctl("suspend", NAME)
            began = time.monotonic()
            if code == 0:
                code, _, text, _ = self.vramctl("resume", "--name", NAME, "--timeout", "10")
            reply = program.ask_json("token", 60) if code == 0 else {"same": False}
            took.append(time.monotonic() - began)
            if code != 0 or not reply["same"]:
                failed.append(f"exit code {code}: {text}")
                break
        self.expect("the first token after a resume is the same", not failed, "; ".join(failed))
        return {"alone_s": alone, "resumed_s": took}

    def driver_alone(self):
        """The driver's checkpoint of the engine without the library, twice."""
        program = self.start_program(managed=False, part="driver")
        first = program.ask_json("generate", 120)
        # Its other processes use CUDA, but have no context.
        listed = set(map(int, self.smi("--query-compute-apps=pid", "--format=csv,noheader").split()))
        pids = [pid for pid in descendants(program.process.pid) if pid in listed]
        self.expect("one process of the engine uses the GPU", len(pids) == 1, pids)
        took = [json.loads(self.command(*self.checkpoint(), str(pids[0]), seconds=120, env=self.plain_env)[1]) for _ in range(2)]
        after = program.ask_json("generate", 120)
        failed = [one["failed"] for one in took if "failed" in one]
        self.expect("the driver alone brings it back", not failed and after["tokens"] and first["tokens"], failed)
        return {"calls": took}

    def move(self):
        """Moves the engine to another GPU and back while it works on requests."""
        program, burst, alone_s = self.start_burst("move")
        chance, places = random.Random(self.options.pauses), (self.options.to, self.options.gpu)
        moves, failed = [], []
        while len(moves) < 2 * self.options.pauses and not failed:
            to, away = places[len(moves) % 2], places[1 - len(moves) % 2]
            program.tell(burst)
            time.sleep(chance.uniform(0, 0.8 * alone_s))
            began, in_flight = time.monotonic(), not program.has_answered()
            code, answer, text, _ = self.vramctl("move", NAME, "--to", str(to))
            if code != 0 or answer is None:
                failed.append(f"exit code {code}: {text}")
                break
            ms, used = 1e3 * (time.monotonic() - began), [int(mib) for mib in self.smi("--query-gpu=memory.used", "--format=csv,noheader,nounits").split()]
            reply = program.hear_json(burst, 240)
            if reply["differ"] or not reply["complete"]:
                failed.append(f"requests {reply['differ']} differ")
            if used[away] > 1024 or used[to] < 8 * 1024:
                failed.append(f"{used} MiB in use, it should be on GPU {to}")
            moves.append({"ms": ms, "stages": dig(answer, "stages"), "in_flight": in_flight})
            self.say(f"  moved {len(moves)} of {2 * self.options.pauses} times")
        wanted = sum(one["in_flight"] for one in moves)
        name = f"moved {len(moves)} times, {wanted} of them in the middle of requests: same tokens and log-probabilities"
        self.expect(name, not failed and len(moves) == 2 * self.options.pauses and wanted > 0, "; ".join(failed))
        return {"moves": moves, "started": self.started("move")}

    def held_pause(self, part=None):
        # With several ranks, each has torch's symmetric memory, which is registered with the others.
        keep = ["--registered", "keep"] if self.options.gpus > 1 else []
        return ["pause", "--force", *keep, *self.kept(part), "--name", NAME]

    def kept(self, part=None):
        """SGLang's own API has every pause drop the KV cache, which requests in flight need."""
        return ["--backup", "host"] if (part or self.section) == "long" and self.options.engine == "sglang" else []

    def shell(self, *arguments):
        """One pause or resume: the milliseconds reported by the slowest process."""
        code, answer, text, _ = self.vramctl(*[part for part in arguments if part != "--json"])
        if code != 0 or answer is None:
            raise Failed(f"vramctl {arguments[0]}: exit code {code}: {text}")
        return max(one["report"]["ms"] for one in answer["processes"])

    def tpot(self):
        """An engine with the library and one without it share the GPU and are measured in turns, so that both see the same machine."""
        programs = {which: self.start_program(managed=which == "with", part="tpot") for which in ("without", "with")}
        ms = {which: [] for which in programs}
        for number in range(self.options.rounds):
            for which in sorted(programs, reverse=number % 2 == 1):
                ms[which].append(programs[which].ask_json("tpot", 240)["ms"])
                self.say(f"  {which} the library: {ms[which][-1]:.3f} ms per token")
        self.judge(report.check_tpot(ms))
        return {"ms": ms, "started": self.started("tpot")}

    # ---- all of it ----

    def judge(self, checks):
        for check in checks:
            self.expect(check.name, check.ok, check.detail)
            if check.limit is not None:
                self.checks[-1].update(measured=check.measured, limit=check.limit, unit=check.unit)

    def last_words(self, start, count=12):
        """The library's last log lines, from offset `start`."""
        with open(self.log_file.name, errors="replace") as log:
            log.seek(start)
            # Not always at the start of a line: progress bars leave lines open.
            return [found[0] for found in (re.search(r"vramctl\[\d+\]: .*", line) for line in log) if found][-count:]

    def engine_version(self):
        code = f"import importlib.metadata as m; print(m.version({self.options.engine!r}))"
        status, text, _ = self.command(sys.executable, "-c", code)
        return text.strip() if status == 0 else "of unknown version"

    def run(self):
        begin = time.monotonic()
        self.facts = self.machine()
        self.version = self.engine_version()
        ok = True
        if self.needs_model():
            try:
                self.section, self.deadline = "model", Deadline(max(self.options.limit - 15, 0.1))
                self.options.model = str(survey.made("llama", self))
            except Failed as error:
                self.say(f"  FAILED: {error}")
                self.write()
                return False
        for part in self.options.part.split(","):
            self.section, self.checks = part, []
            log_start = os.fstat(self.log_file.fileno()).st_size
            self.say(f"{self.options.engine}: {part}")
            start = time.monotonic()
            # The remaining time, less a little to write the report.
            self.deadline = Deadline(max(self.options.limit - 15 - (start - begin), 0.1))
            measured = {}
            try:
                measured = self.measure(part)
            except Exception as error:
                self.expect("runs to its end", False, f"{type(error).__name__}: {error}")
            finally:
                self.end_children()
            passed = all(check["ok"] for check in self.checks)
            ok = ok and passed
            taken = time.monotonic() - start
            self.say(f"  {'passed' if passed else 'FAILED'} after {taken:.0f} s")
            if not passed:
                for line in self.last_words(log_start):
                    print(f"  {line}", flush=True)
            told = {"engine": {"sglang": "SGLang", "vllm": "vLLM"}[self.options.engine], "version": self.version}
            about = {**told, "machine": self.facts, "checks": self.checks, "took_s": round(taken, 1)}
            # A part that broke off has no figures for the tables; the output and the log show the failure.
            name = f"{self.options.engine}/{part}"
            if measured or name not in self.parts:
                self.parts = report.join([{"parts": self.parts}, {"parts": {name: {**about, **(measured or EMPTY[part])}}}])
            self.write()  # after each part, in case a later one crashes
        return ok

    def measure(self, part):
        if part == "features":
            return survey.survey(self)
        if part in ("many", "alternatives"):
            found = getattr(many, part)(self)
            name = f"{self.options.engine}/{part}"
            self.judge(report.check_many({**self.parts, name: found}, self.options.engine))
            return found
        if part in long.KINDS:
            return long.long(self)
        parts = {"outside": self.outside, "hold": self.hold, "suspend": self.suspend, "driver": self.driver_alone, "move": self.move}
        return {**parts, "tpot": self.tpot}[part]()

    def write(self):
        options = {name: value for name, value in vars(self.options).items() if name != "work"}
        result = {"options": options, "parts": self.parts}
        (self.out / f"{NAME}.json").write_text(json.dumps(result, indent=1) + "\n")
        (self.out / f"{NAME}.md").write_text(report.markdown(self.parts) + "\n")


def descendants(pid):
    """A process and all that it has started, directly or not."""
    found = [pid]
    for one in found:
        with contextlib.suppress(OSError):
            for task in pathlib.Path(f"/proc/{one}/task").iterdir():
                found += map(int, (task / "children").read_text().split())
    return found


def given(options):
    """The user's variables for the engines."""
    return dict(pair.split("=", 1) for pair in options.env)


#: The results of a part that broke off.
EMPTY = {
    "outside": {"cycles": [], "tags": {}, "kv": "?"},
    "hold": {"loads": [], "tags": {}},
    "suspend": {"rounds": []},
    "driver": {"calls": []},
    "move": {"moves": []},
    "tpot": {"ms": {"without": [], "with": []}},
    "many": {"turns": [], "paused": [], "left_mib": [], "kv_gib": 0},
    "alternatives": {"ways": [], "kv_gib": 0},
    "long": {"runs": []},
    "long-alone": {"runs": []},
    "features": {"rows": []},
}
