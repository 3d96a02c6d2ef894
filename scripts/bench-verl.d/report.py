"""Reads what verl and verl_timers.py have written, and makes scripts/bench-verl's tables. Needs no GPU."""

import hashlib
import json
import pathlib
import re
import statistics

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
TITLES = {"a": "plain verl", "b": "`vramctl run`", "c": "`vramctl run`, trainer managed"}
MOVES = {
    "offload_fsdp_model_to_cpu": "trainer: parameters out",
    "load_fsdp_model_to_gpu": "trainer: parameters in",
    "offload_fsdp_optimizer": "trainer: optimizer out",
    "load_fsdp_optimizer": "trainer: optimizer in",
}


# ---- reading ----

_STEP = re.compile(r"(?:^|[\s\x1b\]m])step:(\d+) - (\S.*)")
_NUMBER = re.compile(r"^(?:np\.\w+\()?([-+]?(?:\d[\d_.]*(?:e[-+]?\d+)?|nan|inf))\)?$", re.IGNORECASE)


def number(text):
    """A number as `pprint` writes it, with numpy's type or not; None if it is none."""
    found = _NUMBER.match(text.strip())
    return float(found[1]) if found else None


def from_console(text):
    """The metrics of each step in verl's console output, which Ray may prefix and color: {step: {name: value}}."""
    steps = {}
    for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;]*m", "", text)):
        found = _STEP.search(line)
        if found is None:
            continue
        pairs = [item.rpartition(":") for item in re.split(r" - (?=[^\s:]+:)", found[2])]
        metrics = {name: number(value) for name, _, value in pairs}
        steps[int(found[1])] = {name: value for name, value in metrics.items() if name and value is not None}
    return steps


def from_file(path):
    """The same from verl's logger `file`."""
    steps = {}
    for line in _lines(path):
        data = {name: value for name, value in line["data"].items() if isinstance(value, (int, float))}
        steps[int(line["step"])] = data
    return steps


def events(folder):
    """What verl_timers.py has written, in order of time."""
    found = [line for path in sorted(pathlib.Path(folder).glob("*.jsonl")) for line in _lines(path)]
    return sorted(found, key=lambda one: one["began"])


def tokens(folder):
    """A digest of each step's answers, whatever their order: {step: digest}."""
    found = {}
    for path in pathlib.Path(folder).glob("*.jsonl"):
        answers = sorted(json.dumps([line.get("input"), line.get("output")]) for line in _lines(path))
        found[int(path.stem)] = hashlib.sha256("\n".join(answers).encode()).hexdigest()[:12] if answers else ""
    return found


def _lines(path):
    path = pathlib.Path(path)
    if not path.exists():
        return []
    lines = []
    # Answers contain characters that `splitlines` takes for ends of lines.
    for line in path.read_text(errors="replace").split("\n"):
        try:
            lines.append(json.loads(line))
        except ValueError:
            pass  # the last line of a process that was killed
    return lines


# ---- deriving ----


def phases(steps, warm):
    """Median seconds by phase, without the first `warm` steps."""
    later = [metrics for step, metrics in sorted(steps.items()) if step > warm]
    names = dict.fromkeys(name[len("timing_s/") :] for metrics in later for name in metrics if name.startswith("timing_s/"))
    return {name: statistics.median(one[f"timing_s/{name}"] for one in later if f"timing_s/{name}" in one) for name in names}


def windows(found):
    """The time of each step's phases as the events tell it: [(phase, from, to)]. A rollout lasts from vLLM's wake-up to its sleep."""
    result, awake, loaded = [], None, {}
    for one in found:
        what, end = one["what"], one["began"] + one["seconds"]
        if what.startswith("wake") and ("kv_cache" in what or what == "wake all"):
            awake = end
        elif what.startswith("sleep") and awake is not None:
            result.append(("rollout", awake, one["began"]))
            awake = None
        elif what.startswith("to cuda"):
            loaded[one["pid"]] = (one["began"], "optimizer" in what)
        elif what.startswith("to cpu") and one["pid"] in loaded:
            began, is_update = loaded.pop(one["pid"])
            result.append(("update" if is_update else "log-probabilities", began, end))
        elif what == "send weights":
            result.append(("weight sync", one["began"], end))
    return result


def peaks(found, samples):
    """The largest sample of GPU memory in each phase, in bytes."""
    result = {}
    for phase, began, end in windows(found):
        inside = [used for at, used, _ in samples if began <= at <= end and used is not None]
        if inside:
            result[phase] = max(result.get(phase, 0), *inside)
    return result


def transitions(found, warm):
    """Seconds and bytes of each kind of transition, without those of the first `warm` updates: {name: [{seconds, bytes}]}."""
    start = first_after(found, warm)
    result = {}
    for one in found:
        what = MOVES.get(one["what"]) or (f"vLLM: {one['what']}" if one["what"].split()[0] in ("sleep", "wake") else one["what"])
        if one["began"] >= start and not what.startswith("to "):
            moved = one.get("bytes")
            if moved is None and one.get("used_after") is not None:
                moved = abs(one["used_after"] - one["used_before"])
            result.setdefault(what, []).append({"seconds": one["seconds"], "bytes": moved})
    return result


def first_after(found, warm):
    """When the first `warm` steps have ended: with the weights sent. They are also sent once before the first step."""
    sent = sorted(one["began"] + one["seconds"] for one in found if one["what"] == "send weights")
    return sent[min(warm, len(sent) - 1)] if sent and warm else 0.0


def residue(found, warm):
    """GPU memory in use when both are off: when vLLM has gone to sleep, the trainer is offloaded. One figure a step."""
    start = first_after(found, warm)
    return [one["used_after"] for one in found if one["what"].startswith("sleep") and one["began"] >= start and one.get("used_after")]


def digest(mode, warm):
    """A mode's figures, from its raw data."""
    found, samples = mode["events"], mode["samples"]
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
        "peaks": peaks(found, samples),
        "gpu_peak": max((used for _, used, _ in samples if used is not None), default=None),
        "host_peak": max((host for _, _, host in samples if host is not None), default=None),
        "residue": residue(found, warm),
    }


# ---- tables ----


def table(header, rows):
    lines = [f"| {' | '.join(header)} |", f"| --- |{' ---: |' * (len(header) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(map(str, row))} |" for row in rows)])


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
    phases = list(dict.fromkeys(phase for one in each for phase in one["peaks"]))
    rows = [["GPU, peak", *(gib(one["gpu_peak"]) for one in each)]]
    rows += [[f"GPU, peak in {phase}", *(gib(one["peaks"].get(phase)) for one in each)] for phase in phases]
    rows.append(["GPU, both off: least", *(gib(min(one["residue"], default=None)) for one in each)])
    rows.append(["GPU, both off: last", *(gib(one["residue"][-1] if one["residue"] else None) for one in each)])
    rows.append(["host, peak above the start", *(gib(one["host_peak"]) for one in each)])
    return table(["", *map(title, labels)], rows)


def results_table(labels, modes):
    rows = []
    for step in sorted({step for mode in modes.values() for step in mode["steps"]}):
        for name in (*RESULTS, "answers"):
            values = [
                modes[label]["tokens"].get(step) if name == "answers" else modes[label]["steps"].get(step, {}).get(name)
                for label in labels
            ]
            if any(value is not None for value in values):
                there = [value for value in values if value is not None]
                same = "" if len(there) < 2 else "yes" if len(set(there)) == 1 else "no"
                rows.append([f"step {step}: {name}", *("" if value is None else value for value in values), same])
    return table(["", *map(title, labels), "equal"], rows)


def join(result, earlier):
    """Adds the modes of an earlier run, and gives repeated ones a number."""
    for mode in (mode for one in earlier for mode in one["modes"].items()):
        result["modes"][free_label(mode[0][0], result["modes"])] = whole(mode[1])
    return {**result, "modes": dict(sorted(result["modes"].items()))}


def free_label(letter, taken):
    number = 1
    while (label := letter if number == 1 else f"{letter}{number}") in taken:
        number += 1
    return label


def whole(mode):
    """A mode as JSON gives it back: the steps are numbers again."""
    return {**mode, "steps": {int(k): v for k, v in mode["steps"].items()}, "tokens": {int(k): v for k, v in mode["tokens"].items()}}
