"""The part `features`: whether an engine with a feature gives the same tokens and log-probabilities after a pause between requests
(`cycles`), and after a pause (`hold`) and a suspend (`suspend`) in the middle of some.
"""

import json
import pathlib
import random
import sys
import time

from features import FEATURES

from measure.child import Failed

HERE = pathlib.Path(__file__).resolve().parent
STEPS = ("cycles", "hold", "suspend")
#: Tokens of each request.
TOKENS = 300
#: Pauses that may come after the answer, at least: a busy processor starts a command late.
LATE = 10


class Refused(Exception):
    """vramctl has refused; nothing has changed."""


def chosen(names):
    return list(FEATURES) if names == "all" else names.split(",")


def models_for(name):
    """The models that a feature needs."""
    return [FEATURES[name].model, *FEATURES[name].needs]


def models_in(options):
    return pathlib.Path(options.models)


def arguments(name, options):
    """What program.py is told of a feature."""
    return ["--feature", name, "--models", str(models_in(options))]


def gpus_of(feature, options):
    """The variable that gives an engine as many GPUs as it needs."""
    return {"CUDA_VISIBLE_DEVICES": f"{options.gpu},{options.to}"} if feature.gpus > 1 else {}


def plan(run):
    """The commands, for --dry-run."""
    commands = []
    for name in chosen(run.options.feature):
        commands += [maker(model, run.options) for model in models_for(name)]
        program = run.under_library([*run.program("features"), *arguments(name, run.options)])
        variables = [f"{name}={value}" for name, value in gpus_of(FEATURES[name], run.options).items()]
        commands += [["env", *variables, *program] if variables else program]
    vramctl = str(run.bin / "vramctl")
    return [*commands, [vramctl, *pause(run)], run.other(), [vramctl, "suspend", run.NAME], [vramctl, "resume", run.NAME, "--timeout", "30"]]


def maker(model, options):
    return [sys.executable, str(HERE / "models.py"), model, str(models_in(options))]


def made(model, run):
    """Makes a model if it is missing. Returns its folder."""
    folder = models_in(run.options) / model
    if not folder.exists():
        code, text, _ = run.command(*maker(model, run.options), seconds=300, stderr=run.log_file)
        if code != 0:
            raise Failed(f"models.py {model}: exit code {code}: {text.strip()[-300:]}")
    return folder


def survey(run):
    """The part: all rows that were asked for, each with an engine of its own."""
    rows = []
    for name in chosen(run.options.feature):
        run.say(f"  {name}: {FEATURES[name].title}")
        rows.append(row(run, name))
        run.end_children()
        line = json.dumps(rows[-1], ensure_ascii=False)
        run.say(line)
        with open(run.out / "features.jsonl", "a") as lines:
            lines.write(line + "\n")
        for step in STEPS:
            found = rows[-1][step]
            # A refusal is an answer: the table says so, and a limit explains it.
            run.expect(f"{name}, {step}: same tokens, or refused", found["result"] in ("equal", "refused"), found["why"])
    return {"rows": rows, "started": run.started("features")}


def row(run, name):
    told = {"engine": run.options.engine, "version": run.version, "feature": name}
    try:
        reference = started(run, name)
    except Failed as error:
        return {**told, **{step: {"result": "failed", "why": str(error)} for step in STEPS}}
    steps = {}
    for step, work in (("cycles", cycles), ("hold", hold), ("suspend", suspend)):
        steps[step] = outcome(lambda work=work: work(run, *reference))
    return {**told, **steps}


def outcome(work):
    """What came of a step: `equal`, `unequal`, `refused` or `failed`, and why. `work` returns how often it was done, and what differs."""
    try:
        times, differ = work()
    except Refused as error:
        return {"result": "refused", "why": str(error)}
    except Failed as error:
        return {"result": "failed", "why": str(error)}
    return {"result": "unequal" if differ else "equal", "times": times, "why": differ}


def started(run, name):
    """Makes the models and starts the engine. Returns it, the command for some requests, and how many seconds they take undisturbed."""
    feature = FEATURES[name]
    for model in models_for(name):
        made(model, run)
    if feature.gpus > len(run.smi("--query-gpu=index", "--format=csv,noheader").split()):
        raise Failed(f"it needs {feature.gpus} GPUs")
    program = run.launch(True, "features", None, *arguments(name, run.options), **gpus_of(feature, run.options))
    run.hear_start(program)
    burst = f"burst {feature.requests} {TOKENS}"
    # The first answer may come from kernels that are still being autotuned.
    program.ask_json(burst.replace("burst", "warm"), 240)
    program.ask_json(burst, 240)
    alone = program.ask_json(burst, 240)
    if alone["differ"]:
        raise Failed(f"two undisturbed runs differ, in requests {alone['differ']}")
    return program, burst, alone["s"]


def cycles(run, program, burst, alone_s):
    """Pauses between requests, while another process uses the memory."""
    differ = []
    for number in range(1, run.options.cycles + 1):
        try:
            ask(run, *pause(run))
        except Refused:
            differ += compared("after the refusal", program.ask_json(burst, 240))
            if differ:
                break
            raise
        code, text, _ = run.command(*run.other(), seconds=120, env=run.plain_env)
        resumed(run)
        if code != 0:
            raise Failed(f"another process cannot use the memory: {text.strip()[-300:]}")
        differ += compared(f"cycle {number}", program.ask_json(burst, 240))
    return run.options.cycles, "; ".join(differ)


def hold(run, program, burst, alone_s):
    return interrupted(run, program, burst, alone_s, pause(run))


def suspend(run, program, burst, alone_s):
    return interrupted(run, program, burst, alone_s, ["suspend", run.NAME])


def interrupted(run, program, burst, alone_s, command):
    """Takes the engine's memory in the middle of requests. What comes after the answer does not count, and the next comes earlier."""
    chance, differ, times, late = random.Random(run.options.pauses), [], 0, 0
    while times < run.options.pauses and late < max(LATE, run.options.pauses) and not differ:
        program.tell(burst)
        time.sleep(chance.uniform(0, 0.8 * alone_s / (1 + late)))
        try:
            ask(run, *command)
        except Refused:
            # The engine goes on, as if nobody had asked.
            differ += compared("after the refusal", program.hear_json(burst, 240))
            if differ:
                break
            raise
        in_flight = not program.has_answered()
        resumed(run)
        times, late = times + in_flight, late + (not in_flight)
        differ += compared(f"number {times + late}", program.hear_json(burst, 240))
    if times < run.options.pauses and not differ:
        raise Failed(f"only {times} of {times + late} came in the middle of requests")
    return times, "; ".join(differ)


def compared(when, answer):
    """What differs from the undisturbed run."""
    if not answer["complete"]:
        return [f"{when}: answers are incomplete"]
    return [f"{when}: requests {answer['differ']} differ"] if answer["differ"] else []


def pause(run):
    """The command that pauses all of the engine."""
    # torch's symmetric memory is registered with the other processes.
    return ["pause", run.NAME, "--force", "--registered", "keep"]


def ask(run, *command):
    """Has vramctl take the memory."""
    code, _, text, _ = run.vramctl(*command)
    if code != 0:
        raise Refused(f"vramctl {command[0]}: exit code {code}: {text.strip()[-500:]}")


def resumed(run):
    code, _, text, _ = run.vramctl("resume", run.NAME, "--timeout", "30")
    if code != 0:
        raise Failed(f"vramctl resume: exit code {code}: {text.strip()[-500:]}")
