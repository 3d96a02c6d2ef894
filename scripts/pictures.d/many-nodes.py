"""Time from the request of a pause to free memory, over the number of nodes. The figures are those of a run of scripts/simulate-nodes."""

from __future__ import annotations

from typing import Any

from measure.charts import LIGHT


def make(place: Any) -> None:
    figures = place.recorded("many-nodes.json")
    nodes, flat, tree = figures["nodes"], figures["flat"], figures["tree"]
    label = "Seconds from the request to free memory, over 1 to 1000 nodes: within half a second up to 100 nodes, about three seconds at 1000"
    with place.chart("many-nodes.svg", (420, 200), label) as figure:
        axes = figure.add_axes((0.1, 0.19, 0.76, 0.76))
        axes.set_xscale("log")
        for seconds, colour, name, side in ((flat, "blue", "flat", "bottom"), (tree, "orange", "tree of 16", "top")):
            axes.plot(nodes, seconds, color=LIGHT[colour], linewidth=1.8, marker="o", markersize=3.5)
            axes.text(nodes[-1] * 1.15, seconds[-1], name, color=LIGHT[colour], va=side)
        axes.set_xticks(nodes, [f"{number}" for number in nodes])
        axes.minorticks_off()
        axes.set_ylim(0, max(*flat, *tree) * 1.1)
        axes.yaxis.set_major_formatter("{x:g} s")
        axes.grid(axis="y")
        axes.set_xlabel("nodes, with 8 ranks each; contents discarded")
