"""What pause, suspend, move and swap do: where two programs' memory is, before and after each."""

from __future__ import annotations

import json
from typing import Any

from measure.charts import LIGHT

MIB = 1 << 20
#: A program of three quarters of a GPU: its weights, its KV cache, which it has marked as not worth keeping, and its context.
WEIGHTS_MIB, CACHE_MIB, CONTEXT_MIB = 1900, 900, 200
#: What has memory, its name and its colour.
KINDS = (
    ("weights", "weights of a", "blue"),
    ("cache", "KV cache of a", "green"),
    ("other", "another program, b", "orange"),
    ("rest", "contexts", "grey"),
)

Bars = list[dict[str, int]]


def make(place: Any) -> None:
    place.environment["SIMGPU_CONTEXT_BYTES"] = str(CONTEXT_MIB * MIB)
    sizes = ["--weights-mib", WEIGHTS_MIB, "--kv-mib", CACHE_MIB]
    a = place.start("run", "--name", "a", "--no-python", "--", place.build("engine_regions"), *sizes)
    scenes = [("run -- a", look(place))]

    def command(*words: str) -> None:
        place.vramctl(*words)
        scenes.append((" ".join(words), look(place)))

    command("pause", "a")
    place.vramctl("resume", "a")
    command("suspend", "a")
    place.vramctl("resume", "a")
    command("move", "a", "--to", "1")
    place.vramctl("move", "a", "--to", "0")
    place.vramctl("pause", "a")
    b = place.start("run", "--name", "b", "--no-python", "--", place.build("engine"), "--weights-mib", WEIGHTS_MIB + 700, "--kv-mib", 8)
    scenes.append(("run -- b", look(place)))
    command("swap", "b", "a")

    (_, running), (_, paused), (_, suspended), (_, moved), _, (_, swapped) = scenes
    assert not paused[0]["weights"] + paused[0]["cache"] and paused[0]["rest"] and paused[2]["weights"] == running[0]["weights"], paused
    assert not any(suspended[0].values()) and suspended[2]["weights"] == running[0]["weights"], suspended
    assert moved[1] == running[0] and not any(moved[0].values()), moved
    assert swapped[0]["weights"] == running[0]["weights"] and swapped[2]["other"] > 0 == swapped[2]["weights"], swapped
    for program in (a, b):
        if program is b:
            place.vramctl("swap", "a", "b")
        answer = place.ask(program, "verify")
        assert "corrupt" not in answer and "error" not in answer, answer
    draw(place, scenes)


def look(place: Any) -> Bars:
    """Bytes by kind on GPU 0, on GPU 1, and in host memory."""
    bars: Bars = [dict.fromkeys((kind for kind, *_ in KINDS), 0) for _ in range(3)]

    def kind_of(program: str, tag: str) -> str:
        return "other" if program == "b" else {"weights": "weights", "kv_cache": "cache"}.get(tag, "rest")

    for bar, gpu in zip(bars, json.loads(place.vramctl("gpus", "--json"))["gpus"]):
        for share in gpu["shares"]:
            kind = kind_of(share["name"], share["of"]) if share["what"] == "tag" else "rest"
            bar[kind] += share["bytes"] if share["what"] in ("tag", "driver") else 0
    for process in json.loads(place.vramctl("status", "--json"))["processes"]:
        for tag in process["tags"]:
            bars[2][kind_of(process["name"], tag["tag"])] += tag["host_bytes"]
    return bars


# ---- the picture ----

#: Bytes of a whole bar.
WHOLE = 4 << 30


def draw(place: Any, scenes: list[tuple[str, Bars]]) -> None:
    label = "Where memory is: a pause moves it to host memory and leaves the context, a suspend leaves nothing, a move takes another GPU, in a swap two change places"
    with place.chart("verbs.svg", (620, 195), label) as figure:
        for number, (title, bars) in enumerate(scenes):
            left, width = 0.02 + number * 0.98 / len(scenes), 0.84 / len(scenes)
            axes = figure.add_axes((left, 0.24, width, 0.48))
            axes.bar(range(3), [1] * 3, 0.8, color=LIGHT["place"], edgecolor=LIGHT["grid"], linewidth=0.8)
            base = [0.0] * 3
            for kind, name, colour in KINDS:
                heights = [bar[kind] / WHOLE for bar in bars]
                axes.bar(range(3), heights, 0.8, base, color=LIGHT[colour], label=name)
                base = [under + height for under, height in zip(base, heights)]
            axes.set_xlim(-0.45, 2.45)
            axes.set_ylim(0, 1.02)
            axes.set_xticks(range(3), ["GPU 0", "GPU 1", "host"], fontsize=8)
            axes.set_yticks([])
            axes.spines.bottom.set_visible(False)
            axes.set_title(title, loc="left", family="DejaVu Sans Mono", weight="bold", fontsize=8.5)
        figure.legend(handles=axes.get_legend_handles_labels()[0], loc="upper left", bbox_to_anchor=(0.005, 1), ncols=4, columnspacing=1.5)
        note = "From a run on two simulated GPUs of 4 GiB (scripts/pictures verbs). The KV cache is one that its engine has marked as not worth keeping."
        figure.text(0.02, 0.06, note, color=LIGHT["dim"], fontsize=8)
