"""Reads what verl and verl_timers.py have written, and makes the tables of scripts/bench verl. Needs no GPU."""

import collections
import functools
import hashlib
import json
import operator
import pathlib
import statistics

from benchmarks.verl import fit
from measure import tables

#: What one direction of the link was measured to copy, in bytes per second.
LINK = 55e9
#: Which metrics must be equal where verl is deterministic.
RESULTS = (
    "critic/rewards/mean",
    "response_length/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "actor/lr",
)
PHASES = ("gen", "reward", "old_log_prob", "adv", "update_actor", "update_weights", "step")
TITLES = {
    "a": "plain verl",
    "b": "`vramctl run`",
    "c": "`vramctl run`, trainer managed",
    "d": "b, paused from outside",
    "e": "c, paused from outside",
}
#: With whose results those of a mode are compared that was paused from outside: the first that was run.
UNDISTURBED = {"d": "bca", "e": "cba"}
MOVES = {
    "offload_fsdp_model_to_cpu": "trainer: parameters out",
    "load_fsdp_model_to_gpu": "trainer: parameters in",
    "offload_fsdp_optimizer": "trainer: optimizer out",
    "load_fsdp_optimizer": "trainer: optimizer in",
}


#: Who has memory, of a look's shares: docs/out-of-memory.md.
WORDS = {
    "unmanaged": "left to CUDA by {}",
    "guard": "guard under paused memory",
    "driver": "context, loaded code, small allocations",
    "process": "all of it, without the library",
    "page_tables": "page tables of pinned host memory",
    "out_of_sight": "processes out of sight",
    "unexplained": "unexplained",
}
#: A phase and a transition.
SYNC = "send weights"
#: Less of the GPU's memory is not shown.
LITTLE = 1 << 20
#: Of a phase, what is shown besides the ledger.
PEAK = "GPU, peak"
ROWS = ("seconds", PEAK, "host, the job's processes", "host, pinned by torch, besides")


# ---- reading ----

def from_file(path):
    """The metrics of each step, from verl's logger `file`: {step: {name: value}}."""
    steps = {}
    for line in lines(path):
        data = {name: value for name, value in line["data"].items() if isinstance(value, (int, float))}
        steps[int(line["step"])] = data
    return steps


def events(folder):
    """What verl_timers.py has written, in order of time."""
    found = [line for path in sorted(pathlib.Path(folder).glob("*.jsonl")) for line in lines(path)]
    return sorted(found, key=lambda one: one["began"])


def tokens(folder):
    """Fingerprints of each prompt and its answer, whatever their order: {step: [[prompt, answer], …]}."""
    return {
        int(path.stem): sorted([fingerprint(line.get("input")), fingerprint(line.get("output"))] for line in lines(path))
        for path in pathlib.Path(folder).glob("*.jsonl")
    }


def fingerprint(value):
    return hashlib.sha256(json.dumps(value).encode()).hexdigest()[:12]


def lines(path):
    """The lines of JSON in a file; none if there is no file."""
    path, found = pathlib.Path(path), []
    if path.exists():
        # Answers contain characters that `splitlines` takes for ends of lines.
        for line in path.read_text(errors="replace").split("\n"):
            try:
                found.append(json.loads(line))
            except ValueError:
                pass  # the last line of a process that was killed
    return found


# ---- deriving ----


def phases(steps, warm):
    """Median seconds by phase, without the first `warm` steps."""
    later = [metrics for step, metrics in sorted(steps.items()) if step > warm]
    names = dict.fromkeys(name[len("timing_s/") :] for metrics in later for name in metrics if name.startswith("timing_s/"))
    return {name: statistics.median(one[f"timing_s/{name}"] for one in later if f"timing_s/{name}" in one) for name in names}


def windows(found):
    """The time of each step's phases, without the transitions in between, as the events tell it: [(phase, from, to)]."""
    result, awake, loaded = [], None, {}
    for one in found:
        what, end = one["what"], one["began"] + one["seconds"]
        if what.startswith("wake") and ("kv_cache" in what or what == "wake all"):
            awake = end
        elif what.startswith("sleep") and awake is not None:
            result.append(("rollout", awake, one["began"]))
            awake = None
        elif what.startswith("to cuda"):
            loaded[one["pid"]] = (end, "optimizer" in what)
        elif what.startswith("to cpu") and one["pid"] in loaded:
            began, is_update = loaded.pop(one["pid"])
            result.append(("update" if is_update else "log-probabilities", began, one["began"]))
        elif what == SYNC:
            result.append(("weight sync", one["began"], end))
    return result


def phase_at(found, moment):
    """What the job was doing then, as far as the events tell by now: a transition, a phase, or what is between them."""
    for one in found:
        if name_of(one) is not None and one["began"] <= moment < one["began"] + one["seconds"]:
            return name_of(one)
    before = [one for one in found if one["began"] + one["seconds"] <= moment]
    # As if all phases ended now.
    ends = [{"what": what, "pid": pid, "began": moment, "seconds": 0} for pid in {one["pid"] for one in before} for what in ("sleep", "to cpu")]
    return next((name for name, _, end in windows([*before, *ends]) if end == moment), "between phases")


def spans(found, warm):
    """Phases and transitions, without those of the first `warm` steps: [(name, from, to, a function that finds the look at its end)]. Of a
    phase, that is the last look that ends in it; of a transition, one after it and before whatever comes next."""
    start = first_after(found, warm)
    begins = sorted(one["began"] for one in found)

    def of_phase(began, end):
        return lambda looks: next((look for look in reversed(looks) if began <= look["began"] and look["ended"] <= end), None)

    def of_transition(end):
        until = next((at for at in begins if at >= end), float("inf"))
        return lambda looks: next((look for look in looks if end <= look["began"] and look["ended"] <= until), None)

    result = [(phase, began, end, of_phase(began, end)) for phase, began, end in windows(found) if began >= start]
    for one in found:
        if one["began"] >= start and name_of(one) not in (None, SYNC):
            end = one["began"] + one["seconds"]
            result.append((name_of(one), one["began"], end, of_transition(end)))
    return result


def by_phase(found, warm, samples, looks):
    """Of each phase and transition the medians, and of peaks the highest: {name: {row: seconds or bytes}}."""
    steps, parts = {}, roles(found)
    for name, began, end, look_at in spans(found, warm):
        row = {"seconds": end - began}
        if used := [used for at, used, *_ in samples if began <= at <= end and used is not None]:
            row[PEAK] = max(used)
        if look := look_at(looks):
            row |= {"host, the job's processes": look["host"], "ledger": ledger(look, parts)}
        # Of each process what it said last.
        pinned = {one["pid"]: one["pinned"] for one in found if one["began"] <= end and one.get("pinned") is not None}
        row["host, pinned by torch, besides"] = sum(pinned.values())
        steps.setdefault(name, []).append(row)
    return {name: medians(rows) for name, rows in steps.items()}


def medians(rows):
    found = {name: [row[name] for row in rows if name in row] for name in ROWS}
    result = {name: (max if name == PEAK else statistics.median)(values) for name, values in found.items() if values}
    ledgers = [row["ledger"] for row in rows if "ledger" in row]
    names = dict.fromkeys(name for one in ledgers for name in one)
    # Who is not in a ledger had nothing.
    return result | {f"GPU at the end, {name}": statistics.median(one.get(name, 0) for one in ledgers) for name in names}


def roles(found):
    """Whether a process trains, rolls out, or both: {pid: words}."""
    of = {}
    for one in found:
        if is_of_vllm(one):
            of.setdefault(one["pid"], set()).add("rollout")
        elif one["what"] in MOVES or one["what"].startswith("to "):
            of.setdefault(one["pid"], set()).add("trainer")
    return {pid: " and ".join(sorted(which)) for pid, which in of.items()}


def ledger(look, parts):
    """Bytes by who has them."""
    rows = {}
    for pid, what, of, bytes in look["shares"]:
        who = "" if pid is None else parts.get(pid, "others")
        words = of if what == "tag" else WORDS.get(what, what).format(of)
        for name in (f"{who}: {words}", f"{who}: all") if who else (words,):
            rows[name] = rows.get(name, 0) + bytes
    return rows


def name_of(one):
    """What a transition is called; None if it is the sum of others, or none."""
    what = one["what"]
    if what in MOVES:
        return MOVES[what]
    if is_of_vllm(one):
        return f"vLLM: {what}"
    return SYNC if what == SYNC else None


def is_of_vllm(one):
    return one["what"].split()[0] in ("sleep", "wake")


def transitions(found, warm):
    """Seconds and bytes of each kind of transition, without those of the first `warm` updates: {name: [{seconds, bytes}]}."""
    start = first_after(found, warm)
    result = {}
    for one in found:
        what = name_of(one)
        if one["began"] >= start and what is not None:
            moved = one.get("bytes")
            if moved is None and one.get("used_after") is not None:
                moved = abs(one["used_after"] - one["used_before"])
            result.setdefault(what, []).append({"seconds": one["seconds"], "bytes": moved})
    return result


def first_after(found, warm):
    """When the first `warm` steps have ended: with the weights sent, by each of the trainer's processes. They are also sent once before the
    first step."""
    sent = {}
    for one in found:
        if one["what"] == SYNC:
            sent.setdefault(one["pid"], []).append(one["began"] + one["seconds"])
    return max((sorted(ends)[min(warm, len(ends) - 1)] for ends in sent.values()), default=0.0) if warm else 0.0


def residue(found, warm):
    """GPU memory in use when both are off: when vLLM has gone to sleep, the trainer is offloaded. One figure a step."""
    start = first_after(found, warm)
    return [one["used_after"] for one in found if one["what"].startswith("sleep") and one["began"] >= start and one.get("used_after")]


def digest(mode, warm):
    """A mode's figures, from its raw data."""
    found, samples, looks = mode["events"], mode["samples"], mode.get("looks", [])
    return {
        "steps": len(mode["steps"]),
        "phases": phases(mode["steps"], warm),
        "transitions": {
            what: {
                "seconds": statistics.median(one["seconds"] for one in each),
                "bytes": statistics.median([one["bytes"] for one in each if one["bytes"] is not None] or [0]),
                "times": len(each),
            }
            for what, each in transitions(found, warm).items()
        },
        "by_phase": by_phase(found, warm, samples, looks),
        "gpu_peak": max((used for _, used, *_ in samples if used is not None), default=None),
        "host_peak": max((look["host"] for look in looks), default=None),
        "residue": residue(found, warm),
    }


# ---- tables ----


def table(header, rows):
    return "\n".join(tables.table(header, "lr", rows))


def seconds(value):
    return "" if value is None else f"{value:.2f}"


def gib(value):
    return "" if value is None else f"{value / 2**30:.2f}"


def title(label):
    return f"{label}: {TITLES[label[0]]}"


def markdown(result):
    labels, warm = list(result["modes"]), result["warm"]
    digests = {label: digest(mode, warm) for label, mode in result["modes"].items()}
    plain, managed = (next((label for label in labels if label[0] == letter), None) for letter in "ac")
    if result.get("fits"):
        return fit_text(result)
    parts = [
        f"# verl's step\n\n{result['about']}\n\nMedians of the steps after the first {warm}. "
        + "; ".join(f"{title(label)}, {digests[label]['steps']} steps, {result['modes'][label]['ended']}" for label in labels),
        "## Seconds by phase",
        phase_table(labels, digests, plain, managed),
        f"## Transitions\n\nSeconds; what the bytes need at {LINK / 1e9:.0f} GB/s, and how often that it took. Bytes of the trainer: its "
        "parameters, or its optimizer's state. Bytes of vLLM: the change of the GPU's memory in use.",
        transition_table(labels, digests),
        "## Memory, GiB",
        memory_table(labels, digests),
        "## Phases and transitions\n\nThe GPU's memory and the host's in GiB. At the end: of a phase, before it is left; of a transition, before the "
        "next one. The host's memory is that of the job's processes, the library's backups with it.",
        "\n\n".join(span_tables(labels, digests)),
        *(outside_part(label, result["modes"]) for label in labels if label[0] in UNDISTURBED),
        "## Results",
        results_table(labels, result["modes"]),
    ]
    return "\n\n".join(parts) + "\n"


def phase_table(labels, digests, plain, managed):
    known = list(dict.fromkeys(name for label in labels for name in digests[label]["phases"]))
    names = [name for name in PHASES if name in known] + [name for name in known if name not in PHASES]
    rows = []
    for name in names:
        values = [digests[label]["phases"].get(name) for label in labels]
        if name in PHASES or any(value is not None and value >= 0.05 for value in values):
            rows.append([name, *map(seconds, values), ratio(digests, plain, managed, name)])
    return table(["phase", *map(title, labels), "a ÷ c"], rows)


def ratio(digests, plain, managed, name):
    if plain is None or managed is None:
        return ""
    before, after = (digests[label]["phases"].get(name) for label in (plain, managed))
    return f"{before / after:.2f}" if before and after else ""


def transition_table(labels, digests):
    names = sorted({what for label in labels for what in digests[label]["transitions"]})
    rows = []
    for what in names:
        row = [what]
        for label in labels:
            one = digests[label]["transitions"].get(what)
            needs = one["bytes"] / LINK if one else 0
            times = f", {one['seconds'] / needs:.2f} times" if needs > 0.001 else ""
            row.append(f"{one['seconds']:.3f} s; {one['bytes'] / 1e9:.2f} GB need {needs:.3f}{times}" if one else "")
        rows.append(row)
    return table(["transition", *map(title, labels)], rows)


def memory_table(labels, digests):
    each = [digests[label] for label in labels]
    rows = [["GPU, peak", *(gib(one["gpu_peak"]) for one in each)]]
    rows.append(["GPU, both off: least", *(gib(min(one["residue"], default=None)) for one in each)])
    rows.append(["GPU, both off: last", *(gib(one["residue"][-1] if one["residue"] else None) for one in each)])
    rows.append(["host, peak of the job's processes", *(gib(one["host_peak"]) for one in each)])
    return table(["", *map(title, labels)], rows)


def span_tables(labels, digests):
    each = [digests[label]["by_phase"] for label in labels]
    for name in dict.fromkeys(name for one in each for name in one):
        found = [one.get(name, {}) for one in each]
        known = dict.fromkeys(row for one in found for row in one if row not in ROWS)
        ledger = sorted(row for row in known if max(one.get(row, 0) for one in found) >= LITTLE)
        rows = [["seconds", *(seconds(one.get("seconds")) for one in found)]]
        rows += [[row, *(gib(one.get(row)) for one in found)] for row in (PEAK, *ledger, *ROWS[2:])]
        yield table([name, *map(title, labels)], rows)


def fit_text(result):
    """What --fit has found, by the job that it was found with."""
    parts = ["# What fits in verl's step"]
    for about in dict.fromkeys(run["about"] for run in result["fits"]):
        parts += [about, "The highest of each setting that fits, the others as the job has them:"]
        parts += fit_tables([run for run in result["fits"] if run["about"] == about])
    return "\n\n".join(parts) + "\n"


def fit_tables(runs):
    by = {}
    for run in runs:
        by.setdefault(run["setting"], {}).setdefault(run["mode"], []).append(run)
    labels = sorted({run["mode"] for run in runs})
    found = [[setting, *(fit.verdict(modes[label]) if label in modes else "" for label in labels)] for setting, modes in by.items()]
    tried = [
        [f"{title(run['mode'])}: {run['setting']} {run['value']}", run["ended"], run["steps"], f"{run['took']:.0f}", gib(run["gpu_peak"])]
        for run in runs
    ]
    return [table(["setting", *map(title, labels)], found), table(["run", "ended", "steps", "seconds", "GPU's peak, GiB"], tried)]


def outside_part(label, modes):
    """The pauses from outside, and whether they have changed a result."""
    header = ["", "in", "ranks", "s until free", "MiB before", "left", "a second later", "s back", "MiB then", "error"]
    rows = []
    for row in modes[label].get("outside", []):
        what = [row["what"], phase_at(modes[label]["events"], row["began"]), row.get("ranks", "")]
        figures = [seconds(row.get("seconds")), *(mib(row.get(name)) for name in ("before", "left", "later")), seconds(row.get("back"))]
        rows.append([*what, *figures, mib(row.get("after")), row.get("error", "")])
    about = "MiB: of the fullest GPU, above what is in use without the job. The steps' seconds contain the pauses."
    return "\n\n".join([f"## {title(label)}", f"{about} {verdict(label, modes)}", table(header, rows)])


def verdict(label, modes):
    """How many results of a mode that was paused from outside are those of one that was not."""
    other = next((one for letter in UNDISTURBED[label[0]] for one in modes if one[0] == letter), None)
    if other is None:
        return f"No undisturbed run to compare with: add {UNDISTURBED[label[0]][0]} to --modes, or --join one."
    pairs = [[result_of(modes[one], step, name) for one in (label, other)] for step in modes[label]["steps"] for name in (*RESULTS, "answers")]
    both = [one == two for one, two in pairs if one is not None and two is not None]
    equal = f"{sum(both)} of {len(both)} results equal those of {title(other)}"
    return f"**{equal}.** Those of two undisturbed runs may differ, too: with --modes c,c, the table shows it."


def outside_text(row, found):
    """One pause, in a line."""
    words = [f"{row['what']} from outside, {phase_at(found, row['began'])}:"]
    if "seconds" in row:
        words.append(f"free after {seconds(row['seconds'])} s, {mib(row['left'])} of {mib(row['before'])} MiB left,")
    if "back" in row:
        words.append(f"back in {seconds(row['back'])} s with {mib(row['after'])} MiB")
    return " ".join([*words, row.get("error", "")])


def mib(value):
    return "" if value is None else str(round(value / 2**20))


def result_of(mode, step, name):
    if name != "answers":
        return mode["steps"].get(step, {}).get(name)
    answers = mode["tokens"].get(step)
    return fingerprint(answers) if answers else None


def results_table(labels, modes):
    rows = []
    for step in sorted({step for mode in modes.values() for step in mode["steps"]}):
        for name in (*RESULTS, "answers"):
            values = [result_of(modes[label], step, name) for label in labels]
            if any(value is not None for value in values):
                there = [value for value in values if value is not None]
                same = "" if len(there) < 2 else "yes" if len(set(there)) == 1 else "no"
                if same == "no" and name == "answers":
                    same += ": " + common([modes[label]["tokens"].get(step) for label in labels])
                rows.append([f"step {step}: {name}", *("" if value is None else value for value in values), same])
    return table(["", *map(title, labels), "equal"], rows)


def common(modes):
    """How many of a step's prompts and answers all modes have that have any."""

    def shared(parts):
        counts = [collections.Counter(map(tuple, part)) for part in parts]
        return sum(functools.reduce(operator.and_, counts).values())

    there = [answers for answers in modes if answers]
    of = max(map(len, there))
    return f"{shared(there)} of {of} answers, {shared([[one[:1] for one in answers] for answers in there])} of {of} prompts"


def join(result, earlier):
    """Adds the modes of an earlier run, gives repeated ones a number, and adds what it has found to fit."""
    for mode in (mode for one in earlier for mode in one["modes"].items()):
        result["modes"][free_label(mode[0][0], result["modes"])] = whole(mode[1])
    fits = [run for one in [*earlier, result] for run in one.get("fits", [])]
    return {**result, "modes": dict(sorted(result["modes"].items())), "fits": fits}


def free_label(letter, taken):
    number = 1
    while (label := letter if number == 1 else f"{letter}{number}") in taken:
        number += 1
    return label


def whole(mode):
    """A mode as JSON gives it back: the steps are numbers again."""
    return {**mode, "steps": {int(k): v for k, v in mode["steps"].items()}, "tokens": {int(k): v for k, v in mode["tokens"].items()}}
