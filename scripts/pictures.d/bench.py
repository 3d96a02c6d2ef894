"""How fast kept contents leave and come back: vramctl and torch_memory_saver, measured in turns by `scripts/bench memory --turns`."""

from __future__ import annotations

from typing import Any

from measure.charts import LIGHT

#: Colour, name, system, and its rows: first pause, pause after it, resume.
SERIES = (
    ("blue", "vramctl", "vramctl", ("first", "kept", "resume_kept")),
    ("pale blue", "vramctl, backup retained", "vramctl", ("first_retained", "steady", "resume_retained")),
    ("orange", "torch_memory_saver", "torch_memory_saver", ("first", "again", "resume")),
    ("pale orange", "torch_memory_saver, backup retained", "torch_memory_saver", ("first_retained", "steady", "resume_retained")),
)
GROUPS = ("first pause", "pause after it", "resume")
BAR = 0.22


def make(place: Any) -> None:
    data = place.recorded("bench.json")
    rates = {
        (system, row): data["bytes"] / seconds / 1e9
        for system, rows in data["seconds"].items()
        for row, seconds in rows.items()
    }
    links = [data["bytes"] / data["link_seconds"][way] / 1e9 for way in ("out", "out", "in")]
    with place.chart("bench.svg", (430, 310), "Speed of pause and resume with contents kept in host memory, in GB/s") as figure:
        axes = figure.add_axes((0.07, 0.17, 0.91, 0.58))
        for number, (colour, name, system, rows) in enumerate(SERIES):
            shown = [(group + (number - 1.5) * BAR, rates[system, row]) for group, row in enumerate(rows) if (system, row) in rates]
            axes.bar([at for at, _ in shown], [rate for _, rate in shown], BAR * 0.9, color=LIGHT[colour], label=name)
            for at, rate in shown:
                # Inside where there is room, so that no figure stands on the line of the link.
                inside = rate > 10
                tint = "dim" if not inside else "on pale" if colour.startswith("pale") else "ground"
                place, va = (0, -3 if inside else 3), "top" if inside else "bottom"
                how = {"textcoords": "offset points", "ha": "center", "va": va, "fontsize": 8, "color": LIGHT[tint]}
                axes.annotate(f"{rate:.1f}", (at, rate), place, **how)
        for group, link in enumerate(links):
            axes.plot([group - 2.2 * BAR, group + 2.2 * BAR], [link, link], "--", color=LIGHT["text"], linewidth=1.2, label="" if group else "the link")
        axes.set_xticks(range(len(GROUPS)), GROUPS)
        axes.set_ylim(0, max([*links, *rates.values()]) * 1.06)
        axes.grid(axis="y")
        figure.text(0.07, 0.95, "Pause and resume with contents kept in host memory, GB/s", fontsize=11, weight="bold", va="center")
        link, *bars = axes.get_legend_handles_labels()[0]
        figure.legend(handles=[*bars, link], loc="upper left", bbox_to_anchor=(0.055, 0.92), ncols=2, columnspacing=1.5)
        figure.text(0.07, 0.04, f"{data['set']}; {data['gpu']}, {data['date']}; medians of {data['repeat']}", color=LIGHT["dim"], fontsize=8)
