"""Many engines on one GPU, with examples/many_models.py, and other ways to share it: the parts `many` and `alternatives`."""

import asyncio
import json
import os
import pathlib
import random
import sys
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "examples"), str(ROOT / "python")]

import many_models  # noqa: E402

import vramctl.__main__  # noqa: E402
from measure.child import Failed  # noqa: E402

#: What an engine has besides its KV cache: the weights of an 8B model in bf16, activations, its context.
BESIDES_KV_GIB = 18
#: How many start at the same time if the GPU has room. They also share the processors.
STARTING = 3
#: Up to this many MiB in use, a GPU counts as empty: an idle one shows 4.
NOTHING = 64
#: Turns after each time the GPU was empty.
GROUP = 5


def kv_gib(run):
    """The KV cache that fits into a share of the GPU."""
    total = int(run.gpu("memory.total")) / 1024
    return max(int(total * run.options.fraction) - BESIDES_KV_GIB, 1)


class Engine(many_models.Model):
    """program.py under the library. It has no HTTP server, so it resets its prefix cache on a command."""

    def __init__(self, name, program):
        super().__init__(name)
        self.program, self.pause_s = program, 0.0

    async def pause(self):
        began = time.monotonic()
        if self.in_flight:
            await self.job.pause_async(backup="host")
        else:
            await self.ask("forget")
            await self.job.pause_async(force=True)
        self.pause_s = time.monotonic() - began

    async def ask(self, question, seconds=120):
        return await asyncio.to_thread(self.program.ask_json, question, seconds)


class Paused(many_models.Gpu):
    """A GPU on which the contexts stay."""

    async def _leave(self, old, coming):
        pass


# ---- the part `many` ----


def many(run):
    options = run.options
    # For the jobs that this process controls.
    os.environ["VRAMCTL_DIR"] = run.env["VRAMCTL_DIR"]
    vramctl.__main__.command = lambda: str(run.bin / "vramctl")
    found = {"kv_gib": kv_gib(run), "engines": options.engines, "starts": [], "turns": [], "paused": [], "left_mib": []}
    found["started"] = run.started("many")
    try:
        engines = start(run, found)
        empty(run, found, "all are suspended")
        asyncio.run(turns(run, engines, found))
        asyncio.run(paused_only(run, engines[:3], found))
        # The KV cache of requests in flight needs the host memory of the other engines.
        run.end_children(keep=[engine.program for engine in engines[:2]])
        asyncio.run(in_flight(run, *engines[:2]))
    except (Failed, vramctl.errors.Error) as error:
        run.expect("runs to its end", False, f"{type(error).__name__}: {error}")
    return found


def empty(run, found, when):
    left = run.used_mib(below=NOTHING)
    found["left_mib"].append(left)
    run.expect(f"{when}: nothing is on the GPU", left < NOTHING, f"{left} MiB in use")


def start(run, found):
    """Starts the engines, a few at a time, and suspends each once it has answered."""
    at_once = max(1, min(STARTING, int(0.95 / run.options.fraction)))
    names = [f"model-{number}" for number in range(1, run.options.engines + 1)]
    engines = []
    for first in range(0, len(names), at_once):
        began = time.monotonic()
        wave = [(name, run.launch(True, "many", name, "--kv-gib", found["kv_gib"])) for name in names[first : first + at_once]]
        for name, program in wave:
            run.hear_start(program)
            engine = Engine(name, program)
            # Warm up: the first answers may come from kernels that are still being autotuned.
            program.ask_json("generate", 120)
            again = program.ask_json("generate", 120)
            run.expect(f"{name} is deterministic", again["tokens"] and again["logprobs"], again)
            ready_s = time.monotonic() - began
            program.ask_json("forget")
            report = next(iter(engine.job.suspend(force=True).values()))
            found["starts"].append({"s": ready_s, "suspend_ms": report.ms, "stages": report.stages, "bytes": report.bytes})
            run.say(f"  {name}: answered after {ready_s:.0f} s, suspended in {report.ms / 1e3:.2f} s")
            engines.append(engine)
    return engines


async def turn(run, gpu, engine):
    """A request to an engine: it gets the GPU and answers."""
    old, began = gpu.active, time.monotonic()
    await gpu.give_to(engine)
    ready_s = time.monotonic() - began
    token = await engine.ask("token")
    first_s = time.monotonic() - began
    await gpu.left()
    gone_s = time.monotonic() - began
    used_mib = run.used_mib()
    answers = await engine.ask("generate")
    one = {
        "from": old and old.name,
        "to": engine.name,
        "pause_s": old.pause_s if old else 0.0,
        "ready_s": ready_s,
        "first_s": first_s,
        "gone_s": gone_s,
        "used_mib": used_mib,
        "same": token["same"] and answers["tokens"] and answers["logprobs"],
    }
    told = f"{one['from'] or 'nobody'} to {one['to']}"
    run.say(f"  {told}: first token after {first_s:.2f} s (pause {one['pause_s']:.2f}, active {ready_s:.2f}, left {gone_s:.2f})")
    return one


async def turns(run, engines, found):
    chance, gpu = random.Random(run.options.engines), many_models.Gpu(run.say)
    for number in range(run.options.switches + run.options.switches // (GROUP - 1)):
        if number % GROUP == 0:
            # Now and then, leave the GPU empty.
            if gpu.active is not None:
                await gpu.active.pause()
                await gpu.active.job.suspend_async()
                gpu.active = None
                empty(run, found, f"after {number} turns, all are suspended again")
        engine = chance.choice([one for one in engines if one is not gpu.active])
        found["turns"].append(await turn(run, gpu, engine))
    if gpu.active is not None:
        await gpu.active.pause()
        await gpu.active.job.suspend_async()
    used = [one["used_mib"] for one in found["turns"]]
    run.expect("no more is in use than one engine has", max(used) - min(used) < 1024, f"{used} MiB")
    differ = [number for number, one in enumerate(found["turns"]) if not one["same"]]
    run.expect(f"{len(used)} turns: same tokens and log-probabilities", not differ, f"turns {differ} differ")


async def paused_only(run, engines, found):
    """Engines that are paused instead of suspended: how fast that is, and what stays on the GPU."""
    gpu, seen = Paused(run.say), set()
    for engine in engines * 2:
        one = await turn(run, gpu, engine)
        if engine.name in seen:
            found["paused"].append(one)
        seen.add(engine.name)
    await gpu.active.pause()
    found["paused_left_mib"] = run.used_mib() // len(engines)
    run.expect("paused only: same tokens and log-probabilities", all(one["same"] for one in found["paused"]))


async def in_flight(run, engine, other):
    """Another engine gets the GPU in the middle of requests, whose KV cache is kept."""
    gpu, burst = many_models.Gpu(run.say), "burst 4 400"
    await gpu.give_to(engine)
    await engine.ask("warm 4 400", 240)
    alone = await engine.ask(burst, 240)
    engine.program.tell(burst)
    await asyncio.sleep(alone["s"] / 3)
    engine.in_flight = 4
    await gpu.give_to(other)
    in_the_middle = not engine.program.has_answered()
    token = await other.ask("token")
    await gpu.left()
    other.in_flight = 0
    await gpu.give_to(engine)
    reply = await asyncio.to_thread(engine.program.hear_json, burst, 240)
    engine.in_flight = 0
    ok = in_the_middle and token["same"] and reply["complete"] and not reply["differ"]
    run.expect("suspended in the middle of requests for another model: same tokens", ok, f"{in_the_middle}, {token}, {reply}")
    await gpu.left()


# ---- the part `alternatives` ----


def alternatives(run):
    """One engine without the library."""
    found = {"kv_gib": kv_gib(run), "ways": [], "started": run.started("alternatives")}
    samples = []

    def started(*more):
        began = time.monotonic()
        program = run.launch(False, "alternatives", None, "--kv-gib", found["kv_gib"], *more)
        run.hear_start(program)
        program.ask_json("token")
        took = time.monotonic() - began
        program.ask_json("generate", 120)
        samples.append(program.ask_json("generate", 120)["sample"])
        return program, took

    def ended():
        began = time.monotonic()
        run.end_children()
        left = run.used_mib(below=NOTHING)
        return time.monotonic() - began, left

    def tried(way, rounds, leave, come_back, program):
        """Leaves the GPU and comes back, again and again."""
        one = {"way": way, "used_mib": run.used_mib(), "left_mib": 0, "leave_s": [], "first_s": [], "same": True}
        for _ in range(rounds):
            one["leave_s"].append(leave())
            one["left_mib"] = max(one["left_mib"], run.used_mib(below=NOTHING))
            back = come_back()
            token = program.ask_json("token", 120)
            answers = program.ask_json("generate", 120)
            one["first_s"].append(back + token["s"])
            one["same"] = one["same"] and token["same"] and answers["tokens"] and answers["logprobs"]
        found["ways"].append(one)
        told = ", ".join(f"{away:.2f} and {back:.2f} s" for away, back in zip(one["leave_s"], one["first_s"]))
        run.say(f"  {way}: {told}; {one['left_mib']} MiB left")
        run.expect(f"{way}: same tokens and log-probabilities", one["same"])

    try:
        program, first_start = started()
        cold = {"way": "cold start", "used_mib": run.used_mib()}
        pid = program.process.pid
        tried(
            "the driver's checkpoint, without the library",
            2,
            lambda: driver(run, pid, "Lock", "Checkpoint"),
            lambda: driver(run, pid, "Restore", "Unlock"),
            program,
        )
        end_s, left = ended()
        program, second_start = started("--sleep")
        same = samples[0] == samples[1]
        # The time of a start depends on what else the processors do, so take the faster one.
        fastest = min(first_start, second_start)
        found["ways"].append({**cold, "left_mib": left, "leave_s": [end_s], "first_s": [fastest], "same": same})
        run.say(f"  cold start: {first_start:.1f} and {second_start:.1f} s")
        for level, rounds in ((1, 3), (2, 2)):
            tried(
                f"vLLM's sleep mode, level {level}",
                rounds,
                lambda level=level: program.ask_json(f"sleep {level}", 120)["s"],
                lambda level=level: program.ask_json(f"wake {level}", 120)["s"],
                program,
            )
    except Failed as error:
        run.expect("runs to its end", False, error)
    return found


def driver(run, pid, *steps):
    """The seconds that these steps of the driver's checkpoint took."""
    code, text, _ = run.command(*run.checkpoint(), pid, *steps, env=run.plain_env)
    times = json.loads(text.strip().splitlines()[-1]) if code == 0 else {"failed": text}
    if "failed" in times:
        raise Failed(times["failed"])
    return sum(ms for name, ms in times.items() if name != "cuInit") / 1e3
