"""The tables and the chart of the section `memory`."""

from measure.tables import GIB, MIB, ms, table
from measure.tables import gbs as rate
from measure.tables import median as middle
from measure.tables import size as gib

# Row, its name, what limits it, and torch_memory_saver's equivalent row.
ROWS = [
    ("first", "first pause", "out", "first"),
    ("prewarmed", "first pause, host memory pre-warmed", "out", "first"),
    ("again", "pause again, host memory given back before", "out", "again"),
    ("kept", "pause again, host memory kept ready", "out", "again"),
    ("first_retained", "first pause, backup retained", "out", "first"),
    ("steady", "steady pause, backup retained", "out", "steady"),
    ("unchanged", "pause, retained, nothing changed", "pass", "steady"),
    ("changed", "pause, retained, 1% changed", "pass+1%", "steady"),
    ("resume_released", "resume right after a first pause", "in", "resume"),
    ("resume_released_rested", "resume 0.5 s after a pause, host memory given back", "in", "resume"),
    ("resume_kept", "resume, host memory kept ready", "in", "resume"),
    ("resume_retained", "resume right after a steady pause", "in", "resume_retained"),
    ("resume_retained_rested", "resume 0.5 s after it", "in", "resume_retained_rested"),
    ("discard_pause", "pause 0.5 s after a resume, contents discarded", "calls", "discard_pause"),
    ("discard_resume", "resume right after it", "calls", "discard_resume"),
    ("discard_resume_rested", "resume 0.5 s after it", "calls", "discard_resume_rested"),
]


# The driver's calls equivalent to a row.
CALLS = {"discard_pause": "pause", "discard_resume": "resume", "discard_resume_rested": "resume_rested"}


# A CPU slower than this, relative to its best in the same process, is shared with someone else.
QUIET = 1.1
# The number of undisturbed samples that suffice for a median.
ENOUGH = 3


def quiet_ones(slow):
    """The number of samples taken while the CPU was undisturbed."""
    return sum(value <= QUIET for value in slow)


def slowness(data, name, system, row):
    return data["slow"].get(name, {}).get(system, {}).get(row, [])


def undisturbed(data, name, system, row, samples):
    """The samples taken while the CPU was undisturbed, if there are enough; else all."""
    slow = slowness(data, name, system, row)
    if len(slow) != len(samples) or quiet_ones(slow) < ENOUGH:
        return samples
    return [sample for sample, value in zip(samples, slow) if value <= QUIET]


def best(data, key):
    """The best median of a limit, over all piece sizes."""
    found = [middle(rates) for name, rates in data["limits"].items() if name.startswith(key)]
    return max(found) if found else None


def calls_of(data, name, key):
    """The driver's calls alone: those measured beside the library's, if there are."""
    variants = data["calls"].get(name, {})
    for chosen in ("beside", "alone"):
        if key in variants.get(chosen, {}):
            return middle(undisturbed(data, name, chosen, f"discard_{key}", variants[chosen][key]))
    return None


def limit_of(data, name, row, kind):
    """The machine's own time for a row, in seconds."""
    size = data["sets"][name]["bytes"]
    out, back, device = best(data, "copy_out"), best(data, "copy_in"), best(data, "device_copy")
    if kind == "out":
        return size / out if out else None
    if kind == "in":
        return size / back if back else None
    if kind == "calls":
        return calls_of(data, name, CALLS[row])
    calls = calls_of(data, name, "pause")
    if not device or not out or calls is None:
        return None
    return size / device + calls + (size * 0.01 / out if kind == "pass+1%" else 0)


def times_as_long(data, name, row, ours, limit):
    """The ratio to the limit. Paired by turn if the driver's calls alternated with the library's, using undisturbed turns
    if there are enough."""
    beside = data["calls"].get(name, {}).get("beside", {}).get(CALLS.get(row), [])
    samples = data["samples"][name]["vramctl"][row]
    if len(beside) != len(samples):
        return ours / limit
    slow = zip(*(slowness(data, name, system, row) for system in ("vramctl", "beside")))
    quiet = [max(both) <= QUIET for both in slow]
    turns = [own / driver for own, driver in zip(samples, beside)]
    chosen = [turn for turn, good in zip(turns, quiet) if good]
    return middle(chosen if len(chosen) >= ENOUGH else turns)


def span(samples, wanted=0, counted=None):
    """The range of the samples, with their number if it is not `wanted`, and how many of them count in the median if not
    all do."""
    if len(samples) < 2:
        return "once"
    number = f"{len(samples)}" if wanted and len(samples) != wanted else ""
    if counted is not None and counted != len(samples):
        number = f"{counted} of {len(samples)}"
    return f"{ms(min(samples))} to {ms(max(samples))}" + (f" ({number})" if number else "")


def aside(text):
    """Strips parentheses, for use inside others."""
    return " (" + text.replace(" (", ", ").replace(")", "") + ")"


def result_rows(data):
    for name, about in data["sets"].items():
        samples = data["samples"].get(name, {})
        own, other = samples.get("vramctl", {}), samples.get("torch_memory_saver", {})
        first = True
        for row, title, kind, counterpart in ROWS:
            if row not in own and counterpart not in other:
                continue
            if row not in own and (data["turns"] or row in ("prewarmed", "unchanged", "changed")):
                continue
            limit = limit_of(data, name, row, kind)
            size = about["bytes"]
            copies = kind in ("out", "in")
            counted, theirs = own.get(row, []), other.get(counterpart, [])
            their_span = ""
            if kind == "calls":
                # Pure CPU work, so other users of the CPU matter; copies depend on the link.
                both = {("vramctl", row): counted, ("torch_memory_saver", counterpart): theirs}
                quiet = [quiet_ones(slowness(data, name, *key)) for key, some in both.items() if some]
                # Compare like with like: if either side has too few undisturbed samples, use all of both.
                if min(quiet) >= ENOUGH:
                    counted, theirs = (undisturbed(data, name, *key, some) for key, some in both.items())
                if theirs:
                    their_span = aside(span(other[counterpart], data["repeat"], len(theirs)))
            ours, theirs = middle(counted), middle(theirs)
            share = "–"
            if ours and limit:
                share = f"{limit / ours * 100:.0f}%" if copies else f"{times_as_long(data, name, row, ours, limit):.2f} x"
            if theirs and copies:
                their_span = aside(f"{span(other[counterpart], data['repeat'])}, {rate(size, theirs)} GB/s")
            yield [
                f"**{about['title']}**" if first else "",
                title,
                ms(ours),
                span(own[row], data["repeat"], len(counted)) if row in own else "–",
                rate(size, ours) if copies else "",
                ms(limit),
                share,
                ms(theirs) + their_span,
                f"{theirs / ours:.1f}" if ours and theirs else "–",
            ]
            first = False


def limit_lines(data):
    names = {
        "copy_out_16m": "copy to pinned host memory, pieces of 16 MiB",
        "copy_out_64m": "the same, 64 MiB",
        "copy_in_16m": "copy from pinned host memory, pieces of 16 MiB",
        "copy_in_64m": "the same, 64 MiB",
        "device_copy": "device copy, bytes read and written",
        "device_set": "device memset, bytes written",
        "host_touch_first": "fresh host memory touched by all cores, first time on this machine",
        "host_touch_again": "the same, again",
    }
    rows = []
    for key, title in names.items():
        rates = data["limits"].get(key)
        if rates:
            low, high = min(rates) / 1e9, max(rates) / 1e9
            rows.append([title, f"{middle(rates) / 1e9:,.1f}", f"{low:,.1f} to {high:,.1f}"])
    return table(["limit", "GB/s", "noise"], "lrr", rows)


def call_lines(data):
    titles = {
        "alone": "in a process of their own",
        "beside": "alternating with the library's in one process",
    }
    resumed = lambda key: "discard_resume_rested" if key.endswith("_rested") else "discard_resume"
    row_of = lambda key: "discard_pause" if key in ("pause", "unmap", "release") else resumed(key)
    rows = []
    for name, variants in data["calls"].items():
        for variant, title in titles.items():
            calls = variants.get(variant)
            if not calls:
                continue
            counted = lambda key: undisturbed(data, name, variant, row_of(key), calls.get(key, []))
            part = lambda key: ms(middle(counted(key)))
            taking = lambda key: part(key if key in calls else f"{key}_rested")
            whole = lambda key: part(key) + aside(span(calls[key], 0, len(counted(key)))) if key in calls else "–"
            resume = " + ".join(map(taking, ("create", "map", "access")))
            gone = [whole("pause"), f"{part('unmap')} + {part('release')}"]
            rows.append([data["sets"][name]["title"], title, *gone, whole("resume"), resume, whole("resume_rested")])
    header = ["the driver's calls alone, ms", "how", "pause", "unmap + release", "resume", "create + map + access", "resume after 0.5 s"]
    return table(header, "llr", rows)


def stage_lines(data):
    rows = []
    for name, hows in data["stages"].items():
        for how, found in hows.items():
            for request, stages in found.items():
                part = lambda key: ms(stages[key] / 1e3) if stages.get(key) else ""
                took = map(part, ("ms", "wait", "save", "unmap", "release", "map", "restore"))
                rows.append([data["sets"][name]["title"], how, request, *took])
    header = ["where the time goes, ms", "contents", "", "total", "wait", "save", "unmap", "release", "map", "restore"]
    return table(header, "lllr", rows)


def memory_lines(data):
    def shown(value):
        return "–" if value is None else f"{value / GIB:.2f}"

    rows = []
    for name, found in data["memory"].items():
        after = found.get("vramctl_rss_after")
        peaks = map(shown, (data["sets"][name]["bytes"], found.get("vramctl_peak"), found.get("vramctl_retained_peak")))
        left = "–" if after is None else f"{after / MIB:+.1f} MiB"
        prewarm = f"{found['prewarm_seconds']:.1f} s" if "prewarm_seconds" in found else "–"
        rows.append([data["sets"][name]["title"], *peaks, left, shown(found.get("saver_host_used")), prewarm])
    header = ["host memory, GiB", "contents", "peak", "peak, retained", "left 3 s after the resume", "torch_memory_saver", "pre-warming took"]
    return table(header, "lr", rows)


#: What is measured by command: key and title.
BY_COMMAND = (
    ("released", "host memory given back"),
    ("retained", "backups retained"),
    ("trainer_leaves", "a trainer leaves, an engine comes"),
    ("engine_leaves", "the engine leaves, the trainer comes"),
)


def swap_lines(data):
    found = data["swap"]
    out, back = best(data, "copy_out"), best(data, "copy_in")
    if not found or not out or not back:
        return []
    limit = found["kept"] / out + found["kept"] / back
    rows = []
    for key, title in (
        ("released_first", "first swap, host memory given back"),
        ("released", "swaps after it"),
        ("retained_first", "first swap, backups retained"),
        ("retained", "swaps after it"),
    ):
        if found.get(key):
            took = middle(found[key])
            parts = f"{ms(middle(found[key + '_pause']))} + {ms(middle(found[key + '_resume']))}"
            rows.append([title, ms(took), span(found[key]), parts, ms(limit), f"{limit / took * 100:.0f}%"])
    title = f"two processes of {gib(found['bytes'])}, {gib(found['kept'])} of them kept, ms"
    lines = table([title, "swap", "noise", "pause + resume", "copies alone", "of the limit"], "lr", rows)
    rows = []
    for key, title in BY_COMMAND:
        after, at_once = (found.get(f"{key}_{how}") for how in ("one_by_one", "at_once"))
        if after and at_once:
            ratio = f"{middle(after) / middle(at_once):.2f}"
            rows.append([title, ms(middle(after)), span(after), ms(middle(at_once)), span(at_once), ratio])
    if rows:
        header = ["the same by command, ms", "`pause`, then `resume`", "noise", "`swap`", "noise", "times as fast"]
        lines += ["", *table(header, "lr", rows)]
        if trainer := found.get("trainer"):
            kept, weights, cache = (gib(trainer[what]) for what in ("kept", "weights", "cache"))
            lines += ["", f"The trainer: {kept}, all of it kept. The engine: {weights} kept, {cache} discarded."]
        header = ["of that, ms", "copies", "release", "the rest"]
        lines += ["", *table(header, "lr", shares(found))]
    return lines


def shares(found):
    """What the commands' time went to, of each way the median of each. Copies: with the wait for memory."""
    rows = []
    for key, title in BY_COMMAND:
        for how, name in (("one_by_one", "`pause`, then `resume`"), ("at_once", "`swap`")):
            parts = []
            for took, answers in zip(found.get(f"{key}_{how}", []), found.get(f"{key}_{how}_answers", [])):
                out, into = (one["report"]["stages"] for answer in answers for one in answer["processes"])
                copies = (max if how == "at_once" else sum)((out.get("save", 0), into.get("restore", 0))) / 1e3
                release = out.get("release", 0) / 1e3
                parts.append((copies, release, took - copies - release))
            if parts:
                rows.append([f"{name}, {title}", *(ms(middle(part)) for part in zip(*parts))])
    return rows


def idle_lines(data):
    found = data["idle"]
    if "device_own" not in found:
        return []
    pages = found["device_pinned"] - found["device_without"]
    names = ", ".join(sorted(found["threads"])) or "none"
    rows = [
        ["threads of the library", names],
        ["their context switches in 2 s", str(found["switches"])],
        ["device memory used by the library, with a retained and hashed backup", f"{found['device_own'] / MIB:.0f} MiB"],
        ["plus pinning as much host memory, which costs the same without the library", f"{pages / MIB:.0f} MiB"],
    ]
    return table([f"at rest, {found['set']}", ""], "lr", rows)


def markdown(data):
    saver = data["torch_memory_saver"]
    about = [
        f"{data['gpu']}, driver {data['driver']}, {data['cores']} cores, {data['host_bytes'] / GIB:.0f} GiB of host memory",
        f"{data['date'][:16].replace('T', ' ')} UTC",
        f"vramctl {data['commit']}" if data["commit"] else "",
        f"torch_memory_saver {saver['version']} with torch {saver['torch']}" if saver else "",
        f"`{data['command']}`",
        f"{data.get('seconds', 0):.0f} s",
    ]
    lines = ["; ".join(part for part in about if part) + ".", ""]
    if data["simulated"]:
        lines += ["**On the simulated GPU: a smoke test. The figures mean nothing.**", ""]
    elif data["scale"] != 1:
        lines += [f"**Sizes divided by {data['scale']}.**", ""]
    header = ["allocations", "what", "ms", "noise", "GB/s", "limit, ms", "of the limit", "torch_memory_saver, ms", "times as fast"]
    lines += table(header, "llr", result_rows(data))
    lines += [
        "",
        f"Medians of {data['repeat']}. Noise is the range, with the number of samples in parentheses if it differs. Each first pause "
        "runs in a new process. GB = 1e9 bytes. Limits: for a copy, the link as measured in the same run, with the share "
        "reached; for a pause that finds nothing or 1% changed, a pass over device memory at the speed of a "
        "device copy, the copy of what changed, and the driver's calls; for discarded contents, the driver's calls alone for the same "
        "allocations, with memory that GPUDirect RDMA can reach (like `cudaMalloc`'s), alternating with the library's in one process and after the same rest, "
        "with the ratio as the median of the turns.",
        "",
        "The driver's calls are pure CPU work. On a virtual machine, another tenant may use the other half of the core, and "
        f"they take 1.3 to 1.5 times as long. So a thousand system calls are timed before and after each of them, and each pause and resume "
        f"of discarded contents. If these take more than {QUIET} times as long as the fastest in that process, the sample counts in the noise "
        f"but not in the median, for the driver, the library and torch_memory_saver alike, unless that leaves fewer than {ENOUGH} for either side. "
        f"Parentheses then show how many samples of how many count in the median.",
        "",
    ]
    if data["turns"]:
        lines += [
            "The programs ran in turns; while one had its discarded memory, the other's was paused. torch_memory_saver: pinned backup (its default), "
            "and with its `retain_cpu_backup`.",
            "",
        ]
    elif saver:
        lines += [
            "torch_memory_saver: pinned backup (its default); first pause, first resume and second pause once each; steady and retained with its "
            "`retain_cpu_backup`. It has no pre-warm and copies unchanged contents, so those rows compare with its first and its retained pause.",
            "",
        ]
    for part in (limit_lines, call_lines, stage_lines, memory_lines, swap_lines, idle_lines):
        if found := part(data):
            lines += [*found, ""]
    for note in data["notes"]:
        lines += [f"- {note}"]
    return "\n".join(lines).rstrip() + "\n"


# ---- the chart ----

#: The rows of scripts/pictures.d/bench.py, by system.
CHART = {
    "vramctl": ("first", "kept", "resume_kept", "first_retained", "steady", "resume_retained"),
    "torch_memory_saver": ("first", "again", "resume", "first_retained", "steady", "resume_retained"),
}


def chart(data):
    """What docs/pictures/bench.json has: medians, of the first set whose contents were kept in each way. None without such a set."""
    names = [name for name in data["sets"] if {"first", "steady"} <= set(data["samples"].get(name, {}).get("vramctl", {}))]
    if not names:
        return None
    about, samples = data["sets"][names[0]], data["samples"][names[0]]
    seconds = {
        system: {row: middle(samples[system][row]) for row in rows if row in samples[system]} for system, rows in CHART.items() if system in samples
    }
    link = {way: about["bytes"] / best(data, f"copy_{way}") for way in ("out", "in")}
    where = {"gpu": data["gpu"], "date": data["date"][:10], "repeat": data["repeat"], "set": about["title"]}
    return {**where, "bytes": about["bytes"], "link_seconds": link, "seconds": seconds}
