"""Checks figures against limits, and writes the tables.

    report.py gpu-engines.json…      the tables of several runs as one, and the checks of `many` against `alternatives`
"""

import json
import pathlib
import statistics
import sys
from typing import NamedTuple, Optional

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parent.parent))

from measure import growth, tables  # noqa: E402

#: Maximum slowdown per output token.
SLOWER = 0.01


class Outcome(NamedTuple):
    """A check and its outcome; for a limit, also the numbers."""

    name: str
    ok: bool
    detail: str
    measured: Optional[float] = None
    limit: Optional[float] = None
    unit: str = ""


def limited(name, measured, limit, unit, detail=None, judged=None):
    """Checks a limit; `judged` replaces the measured value in the comparison."""
    judged = measured if judged is None else judged
    ok = judged is not None and judged <= limit
    return Outcome(name, ok, detail or f"{measured} {unit}", measured, limit, unit)


def check_tpot(times):
    """Compares milliseconds per token without and with the library."""
    without, library = statistics.median(times["without"]), statistics.median(times["with"])
    slower = library / without - 1
    detail = f"{median_of(times['without'])} without, {median_of(times['with'])} with: {slower:+.2%}"
    name = f"time per output token within {SLOWER:.0%}"
    return [limited(name, round(slower * 100, 2), SLOWER * 100, "%", detail, judged=slower * 100)]


def median_of(times):
    return f"{statistics.median(times):.3f} ms ({len(times)} run{'' if len(times) == 1 else 's'})"


def ways(parts, engine):
    """All methods that were measured, ours first: what each frees, and how long it takes."""
    rows = []
    ours, others = parts.get(f"{engine}/many"), parts.get(f"{engine}/alternatives")
    if ours and ours["turns"]:
        used = statistics.median(one["used_mib"] for one in ours["turns"])
        switches = [one for one in ours["turns"] if one["from"]]
        alone = [one["first_s"] for one in ours["turns"] if not one["from"]]
        rows.append(own_way("vramctl suspend", used, max(ours["left_mib"]), switches, alone))
        left = ours.get("paused_left_mib")
        if ours["paused"] and left is not None:
            rows.append(own_way("vramctl pause", used, left, ours["paused"], []))
    for one in others["ways"] if others else []:
        away, back = statistics.median(one["leave_s"]), statistics.median(one["first_s"])
        freed = one["used_mib"] - one["left_mib"]
        told = {"way": one["way"], "freed_mib": freed, "left_mib": one["left_mib"], "same": one["same"]}
        rows.append({**told, "alone_s": back, "switch_s": [away + back], "away_s": away})
    return [one for one in rows if one]


def own_way(way, used, left, switches, alone):
    """One of our methods. A switch was measured as a whole."""
    if not switches:
        return None
    return {
        "way": way,
        "freed_mib": used - left,
        "left_mib": left,
        "away_s": statistics.median(one["pause_s"] for one in switches),
        "alone_s": statistics.median(alone) if alone else None,
        "switch_s": [one["first_s"] for one in switches],
        "same": all(one["same"] for one in switches),
    }


#: The limit in seconds for the first token of a suspended engine while another one is active.
FIRST_TOKEN = 3.0
#: How many times as fast as any other method that frees as much it must be.
TIMES_AS_FAST = 3.0


def check_many(parts, engine):
    """The checks that the parts so far allow."""
    rows = ways(parts, engine)
    ours = [one for one in rows if one["way"].startswith("vramctl suspend")]
    checks = []
    if not ours:
        return checks
    best = min(ours, key=lambda one: statistics.median(one["switch_s"]))
    name = f"first token of a suspended engine within {FIRST_TOKEN:g} s, with another to suspend ({best['way']})"
    checks.append(limited(name, round(max(best["switch_s"]), 2), FIRST_TOKEN, "s"))
    took = statistics.median(best["switch_s"])
    for other in rows:
        # What one engine leaves on the GPU, each of them leaves.
        if other["way"].startswith("vramctl") or other["left_mib"] > best["left_mib"] + 64:
            continue
        times = statistics.median(other["switch_s"]) / took
        detail = f"{times:.1f} times ({took:.2f} s and {other['alone_s']:.2f} s, or {other['alone_s'] + other['away_s']:.2f} s with another to leave)"
        checks.append(Outcome(f"at least {TIMES_AS_FAST:g} times as fast as {other['way']}", times >= TIMES_AS_FAST, detail))
    return checks


def many_table(parts):
    header = [
        "way",
        "freed",
        "stays on the GPU, of each",
        "until another is out of the way",
        "until the first token, GPU empty",
        "until the first token, another active",
        "same tokens",
    ]
    lines = []
    for engine in ("sglang", "vllm"):
        rows = ways(parts, engine)
        if not rows:
            continue
        part = parts.get(f"{engine}/many") or parts[f"{engine}/alternatives"]
        lines += [
            f"{version(part)}, an 8B model in each engine, KV cache of {part['kv_gib']} GiB; engines under vramctl started with {how(part)}.",
            "",
            *table(header, "lrrrrrl", [way_row(one) for one in rows]),
        ]
    return lines


def way_row(one):
    switch = sorted(one["switch_s"])
    longest = f" (longest of {len(switch)}: {switch[-1]:.2f})" if len(switch) > 1 else ""
    return [
        one["way"],
        f"{one['freed_mib'] / 1024:.1f} GiB",
        f"{one['left_mib']} MiB",
        f"{one['away_s']:.2f} s",
        "–" if one["alone_s"] is None else f"{one['alone_s']:.2f} s",
        f"{statistics.median(switch):.2f} s{longest}",
        yes(one["same"]),
    ]


def join(results):
    """Merges the parts of several runs; later ones replace earlier ones, or continue them."""
    parts = {}
    for name, part in (one for result in results for one in result.get("parts", {}).items()):
        earlier = parts.get(name, {}) if "runs" in part else {}
        parts[name] = {**part, **{what: [*earlier.get(what, []), *part[what]] for what in ("runs", "checks") if what in part}}
    return parts


def seconds(ms):
    return tables.seconds(None if ms is None else ms / 1e3)


def table(header, align, rows):
    """The lines of a table, and an empty one; none if there are no rows."""
    lines = tables.table(header, align, rows)
    return [*lines, ""] if lines else []


def version(part):
    return f"{part['engine']} {part['version']}"


def yes(same):
    return "yes" if same else "NO"


def of_kind(parts, kind):
    """The parts whose names end like this."""
    return [part for name, part in parts.items() if name.endswith(f"/{kind}")]


def markdown(parts):
    """The tables, for docs/performance.md."""
    of_pauses = (machines, outside_tables, hold_table, job_table, suspend_table, many_table, long_tables)
    sections = (*of_pauses, move_table, tpot_table, feature_table, limit_table, failures)
    return "\n".join(line for section in sections for line in section(parts))


def machines(parts):
    return [line for facts in unique(part["machine"] for part in parts.values()) for line in (machine(facts), "")]


def outside_tables(parts):
    header = ["cycle", "pause", "resume", "in use while paused", "other process", "same tokens and log-probabilities"]
    lines = []
    for measured in of_kind(parts, "outside"):
        tags = ", ".join(f"{tag} {size / 2**30:.2f} GiB" for tag, size in measured["tags"].items())
        about = f"{version(measured)} from outside, started with {how(measured)}, KV cache {measured['kv']}; by tag: {tags}."
        rows = [
            [
                str(number),
                seconds(cycle["pause_ms"]),
                seconds(cycle["resume_ms"]),
                f"{cycle['used_mib'] / 1024:.2f} GiB",
                f"{cycle['other_gib']} GiB",
                yes(cycle["same"]),
            ]
            for number, cycle in enumerate(measured["cycles"], 1)
        ]
        lines += [about, "", *table(header, "rrrrrl", rows)]
    return lines


def loads(parts):
    """The loads of the engines that were held, each with its part."""
    return [(measured, load) for measured in of_kind(parts, "hold") for load in measured.get("loads", [])]


def hold_table(parts):
    rows = []
    for measured, load in loads(parts):
        pauses = load["pauses"]
        if pauses:
            middle = [seconds(statistics.median(one[what] for one in pauses)) for what in ("pause_ms", "resume_ms")]
            used = max(one["used_mib"] for one in pauses)
            rows.append([version(measured), str(load["requests"]), str(len(pauses)), *middle, f"{used / 1024:.2f} GiB", yes(load["same"])])
    header = ["held in the middle of requests", "in flight", "pauses", "pause", "resume", "in use while paused", "same tokens"]
    return table(header, "lrrrrrl", rows)


def job_table(parts):
    rows = []
    for measured, load in loads(parts):
        # Runs from before these were recorded can be joined, too.
        pauses = [one for one in load["pauses"] if "attempts" in one]
        if pauses:
            tried, freed = [one["attempts"] for one in pauses], [one["freed_ms"] for one in pauses]
            attempts = f"{tried.count(1)} / {tried.count(2)} / {sum(attempts > 2 for attempts in tried)}"
            times = [f"{ms:.0f} ms" for ms in (statistics.median(freed), max(freed))]
            rows.append([version(measured), str(load["requests"]), str(len(pauses)), attempts, *times])
    header = ["paused as a job", "in flight", "pauses", "in 1 / 2 / more attempts", "from the request to memory freed", "at most"]
    return table(header, "lrrrrr", rows)


def suspend_table(parts):
    rows = []
    for name, measured in parts.items():
        if name.endswith("/suspend") and measured["rounds"]:
            rounds = measured["rounds"]
            down, up = (statistics.median(one[what] for one in rounds) for what in ("suspend_ms", "resume_ms"))
            times = [f"{seconds(down)} ({stages(rounds, 'down')})", f"{seconds(up)} ({stages(rounds, 'up')})"]
            first = measured.get("first_token")
            token = seconds(1e3 * statistics.median(first["resumed_s"])) if first else ""
            rows.append([version(measured), str(len(rounds)), *times, f"{max(one['used_mib'] for one in rounds)} MiB", token])
        if name.endswith("/driver") and measured["calls"]:
            calls = [{name.removeprefix("cuCheckpointProcess"): ms for name, ms in one.items()} for one in measured["calls"]]
            if all({"Lock", "Checkpoint", "Restore", "Unlock"} <= set(one) for one in calls):
                steps = (("Lock", "Checkpoint"), ("Restore", "Unlock"))
                times = [seconds(statistics.median(one[a] + one[b] for one in calls)) for a, b in steps]
                rows.append([f"{version(measured)}, the driver alone", str(len(calls)), *times, "", ""])
    header = ["suspended in the middle of requests", "times", "suspend", "resume", "in use meanwhile", "resume and first token"]
    return table(header, "lrrrrr", rows)


def long_tables(parts):
    lines = []
    for part in [*of_kind(parts, "long"), *of_kind(parts, "long-alone")]:
        runs = part["runs"]
        total = {what: sum(one[what] for one in runs) for what in ("cycles", "pauses", "tokens")}
        suspends = [ms for one in runs for ms in one["suspends"]]
        wrong = [text for one in runs for text in one["wrong"]]
        lines += [
            f"{version(part)}, started with {how(part)}: {total['cycles']} times asleep and awake again by its own API, {total['pauses']} times "
            f"paused from outside in the middle of requests, {len(suspends)} times suspended, in {len(runs)} run{'' if len(runs) == 1 else 's'}. "
            f"{total['tokens']} tokens and their log-probabilities were compared: {'**WRONG**: ' + '; '.join(wrong) if wrong else 'none differs'}.",
            "",
            *growth.table(runs, "cycle"),
            "",
        ]
        if suspends:
            lines += [f"A suspend and the resume after it: {seconds(statistics.median(suspends))} (median).", ""]
    return lines


def move_table(parts):
    rows = []
    for measured in of_kind(parts, "move"):
        took = [one["ms"] for one in measured["moves"]]
        if took:
            moves = [{"all": one["stages"]} for one in measured["moves"]]
            rows.append([version(measured), str(len(took)), f"{seconds(statistics.median(took))} ({stages(moves, 'all')})"])
    return table(["moved to another GPU in the middle of requests", "times", "took"], "lrr", rows)


def tpot_table(parts):
    rows = []
    for measured in of_kind(parts, "tpot"):
        without, library = measured["ms"]["without"], measured["ms"]["with"]
        if without and library:
            more = statistics.median(library) / statistics.median(without) - 1
            rows.append([version(measured), median_of(without), median_of(library), f"{more:+.2%}"])
    return table(["time per output token", "without the library", "with it", ""], "lrrr", rows)


def feature_table(parts):
    rows = []
    for measured in of_kind(parts, "features"):
        for one in measured["rows"]:
            found = [one[step] for step in ("cycles", "hold", "suspend")]
            why = dict.fromkeys(step["why"] for step in found if step["why"])
            rows.append([version(measured), one["feature"], *(step["result"] for step in found), "; ".join(why)])
    header = ["tokens and log-probabilities", "feature", "paused between requests", "in the middle", "suspended in the middle", ""]
    return table(header, "llllll", rows)


def limit_table(parts):
    rows = []
    for name, part in parts.items():
        limits = [check for check in part["checks"] if check.get("limit") is not None]
        rows += [[name, check["check"], shown_value(check), "holds" if check["ok"] else "**missed**"] for check in limits]
    return table(["run", "limit", "measured", ""], "llll", rows)


def failures(parts):
    failed = [f"- {name}: {check['check']}: {check['detail']}" for name, part in parts.items() for check in part["checks"] if not check["ok"]]
    return ["Failed:", "", *failed, ""] if failed else []


def stages(rounds, direction):
    """The median milliseconds of each stage."""
    names = dict.fromkeys(name for one in rounds for name in one[direction] or {})
    middle = {name: statistics.median(one[direction].get(name, 0) for one in rounds) for name in names}
    return ", ".join(f"{name} {ms:.0f}" for name, ms in middle.items())


def how(part):
    return f"`{part['started']}`" if part.get("started") else "–"


def shown_value(check):
    return "–" if check["measured"] is None else check["detail"]


def machine(facts):
    many = "" if facts.get("gpus", 1) == 1 else f"{facts['gpus']} x "
    return (
        f"{many}{facts.get('gpu', 'unknown GPU')} ({facts.get('gpu_mib', '?')} MiB), driver {facts.get('driver', '?')}, "
        f"torch {facts.get('torch', '?')}, {facts.get('cores', '?')} cores, {facts.get('host_gib', '?')} GiB host memory, "
        f"Python {facts.get('python', '?')}, {facts.get('vramctl', 'vramctl')}, {facts.get('date', '?')[:10]}."
    )


def unique(items):
    """Removes duplicates and keeps the order; entries that differ only in the time of day are duplicates."""
    seen = {}
    for item in items:
        seen.setdefault(machine(item), item)
    return seen.values()


def main():
    parts = join(json.loads(pathlib.Path(file).read_text()) for file in sys.argv[1:])
    print(markdown(parts))
    for check in check_many(parts, "vllm"):
        print(f"{'holds' if check.ok else 'MISSED'}: {check.name}: {check.detail}")


if __name__ == "__main__":
    main()
