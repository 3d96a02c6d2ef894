"""The Grafana dashboard. Not a screenshot: draws the panels in the dashboard's layout, from a real Prometheus' answers to the
dashboard's queries (scripts/check-metrics)."""

from __future__ import annotations

import html
import json
import math
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent.parent
# Grafana's grid has 24 columns.
COLUMN, ROW, GAP = 50, 34, 8
COLOURS = ["#73bf69", "#5794f2", "#f2cc0c", "#b877d9", "#ff9830", "#8ab8ff", "#f2495c", "#96d98d", "#ca95e5", "#ffcb7d", "#56a64b", "#3274d9"]
TEXT, DIM, GROUND, PANEL = "#ccccdc", "#7b7f8a", "#111217", "#181b1f"


def make(place: Any) -> None:
    saved = place.folder / "dashboard.json"
    # On a simulated machine even if there is a real GPU, because it fills the GPU.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("SIMGPU_", "VRAMCTL_"))}
    subprocess.run([sys.executable, ROOT / "scripts/check-metrics", "--seconds", "40", "--save", saved], env=environment, check=True)
    answers = json.loads(saved.read_text())
    dashboard = json.loads((ROOT / "grafana/vramctl.json").read_text())
    picture = draw(dashboard, answers)
    texts = ["".join(text.itertext()) for text in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text")]
    for panel in dashboard["panels"]:
        assert panel["title"] in texts, f"no panel {panel['title']}"
    shapes = sum(picture.count(shape) for shape in ("<polyline", "<polygon", "<rect x"))
    assert shapes > 3 * len(dashboard["panels"]), f"only {shapes} shapes"
    place.picture("dashboard.svg").write_text(picture)


def draw(dashboard: Any, answers: Any) -> str:
    panels = dashboard["panels"]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    width, height = 24 * COLUMN + GAP, rows * ROW + GAP
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img"',
        ' aria-label="The panels of the Grafana dashboard" font-family="Inter, Helvetica, Arial, sans-serif" font-size="11">',
        f'<rect width="100%" height="100%" fill="{GROUND}"/>',
    ]
    of_title = {panel["title"]: panel["series"] for panel in answers["panels"]}
    for panel in panels:
        out += draw_panel(panel, of_title[panel["title"]], answers["begun"], answers["ended"])
    return "\n".join([*out, "</svg>", ""])


def draw_panel(panel: Any, series: list[Any], begun: float, ended: float) -> list[str]:
    place, unit = panel["gridPos"], panel["fieldConfig"]["defaults"]["unit"]
    x, y = place["x"] * COLUMN + GAP, place["y"] * ROW + GAP
    width, height = place["w"] * COLUMN - GAP, place["h"] * ROW - GAP
    frame = f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="3" fill="{PANEL}" stroke="#25282e"/>'
    out = [frame, text(x + 10, y + 18, panel["title"], TEXT, 'font-weight="600" font-size="13"')]
    values = {one["label"]: {round(at, 1): number for at, number in one["values"] if math.isfinite(number)} for one in series}
    # Leave out series that are always zero, to save room.
    values = {label: points for label, points in values.items() if any(points.values())} or values
    if panel["type"] == "stat":
        latest = [points[max(points)] for points in values.values() if points]
        return [*out, text(x + width / 2, y + height / 2 + 14, number_text(max(latest, default=0), unit), TEXT, 'text-anchor="middle" font-size="40"')]
    legend = list(values)[:12]
    lines = legend_lines(legend, width - 20)
    left, top, right, bottom = x + 66, y + 32, x + width - 12, y + height - 24 - 15 * len(lines)
    style = panel["fieldConfig"]["defaults"]["custom"]
    is_stacked, is_bars = style["stacking"]["mode"] == "normal", style["drawStyle"] == "bars"
    times = sorted({at for points in values.values() for at in points})
    of_all = sum if is_stacked else max
    totals = [of_all([points.get(at, 0) for points in values.values()] or [0]) for at in times]
    most = nice(max(totals, default=1) or 1, unit)

    def place_x(at: float) -> float:
        return left + (right - left) * (at - begun) / (ended - begun)

    def place_y(number: float) -> float:
        return bottom - (bottom - top) * max(number, 0) / most

    for step in range(5):
        number = most * step / 4
        out.append(f'<line x1="{left}" x2="{right}" y1="{place_y(number):.1f}" y2="{place_y(number):.1f}" stroke="#2c3038"/>')
        out.append(text(left - 6, place_y(number) + 4, number_text(number, unit), DIM, 'text-anchor="end"'))
    for seconds in range(0, int(ended - begun) + 1, 10):
        out.append(text(place_x(begun + seconds), bottom + 14, f"{seconds} s", DIM, 'text-anchor="middle"'))
    base = dict.fromkeys(times, 0.0)
    for number, label in enumerate(values):
        colour, points = COLOURS[number % len(COLOURS)], values[label]
        if is_stacked:
            upper = {at: base[at] + max(points.get(at, 0), 0) for at in times}
            edge = [f"{place_x(at):.1f},{place_y(upper[at]):.1f}" for at in times] + [f"{place_x(at):.1f},{place_y(base[at]):.1f}" for at in reversed(times)]
            out.append(f'<polygon points="{" ".join(edge)}" fill="{colour}" fill-opacity="0.75"/>')
            base = upper
        elif is_bars:
            slot = (right - left) / max(len(times), 1)
            for at, amount in points.items():
                if amount > 0:
                    head = place_y(amount)
                    where = f'x="{place_x(at):.1f}" y="{head:.1f}" width="{slot:.1f}" height="{bottom - head:.1f}"'
                    out.append(f'<rect {where} fill="{colour}" fill-opacity="0.7"/>')
        else:
            # A missing value ends the line.
            for run in runs(points, times):
                line = " ".join(f"{place_x(at):.1f},{place_y(points[at]):.1f}" for at in run)
                out.append(f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="1.8"/>')
    for row, labels in enumerate(lines):
        at = x + 14.0
        for label in labels:
            line_y = y + height - 10 - 15 * (len(lines) - 1 - row)
            colour = COLOURS[list(values).index(label) % len(COLOURS)]
            out += [f'<rect x="{at:.0f}" y="{line_y - 7}" width="12" height="4" fill="{colour}"/>', text(at + 17, line_y, label, TEXT)]
            at += label_width(label)
    return out


def runs(points: dict[float, float], times: list[float]) -> list[list[float]]:
    found: list[list[float]] = [[]]
    for at in times:
        if at in points:
            found[-1].append(at)
        elif found[-1]:
            found.append([])
    return [run for run in found if run]


def label_width(label: str) -> float:
    return 34 + 5.8 * len(label)


def legend_lines(labels: list[str], width: float) -> list[list[str]]:
    lines: list[list[str]] = [[]]
    for label in labels:
        if lines[-1] and sum(map(label_width, lines[-1])) + label_width(label) > width:
            lines.append([])
        lines[-1].append(label)
    return lines[:3]


def nice(most: float, unit: str) -> float:
    """A round number that is not smaller."""
    base = 1024.0 if unit in ("bytes", "Bps") else 10.0
    scale = base ** math.floor(math.log(most, base)) if most > 0 else 1
    steps = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024) if base == 1024 else (1, 2, 4, 6, 8, 10)
    return next(step * scale for step in steps if step * scale >= most * 0.999)


def number_text(number: float, unit: str) -> str:
    if unit in ("bytes", "Bps"):
        for name in ("B", "KiB", "MiB", "GiB", "TiB"):
            if number < 1024 or name == "TiB":
                return f"{number:.3g} {name}" + ("/s" if unit == "Bps" else "")
            number /= 1024
    return f"{number:.3g}" + (" s" if unit == "s" else "")


def text(x: float, y: float, words: str, colour: str, more: str = "") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" {more}>{html.escape(words)}</text>'
