"""Who has the GPU's memory in each phase of an RL step: trainer and engine side by side, and in turns."""

from __future__ import annotations

import json
from typing import Any

from measure.charts import LIGHT

MIB = 1 << 20
#: Parts of the GPU's memory: the trainer, the engine's weights, all of the engine in either case, and a context: 0.9 GiB of 80.
TRAINER, WEIGHTS, ASIDE, IN_TURNS, CONTEXT = 0.45, 0.18, 0.5, 0.9, 0.011
#: What the engine has beside its weights, KV cache and context.
OTHER_MIB = 16
PHASES = ("training", "weights sent", "rollout")
#: What has memory, its name and its colour.
KINDS = (
    ("trainer", "trainer", "orange"),
    ("weights", "engine: weights", "blue"),
    ("cache", "engine: KV cache", "green"),
    ("rest", "contexts and the rest", "grey"),
)


def make(place: Any) -> None:
    place.build("engine")
    place.environment["SIMGPU_CONTEXT_BYTES"] = str(context(place))
    aside, turns = side_by_side(place), in_turns(place)
    for bars in (aside, turns):
        assert all(sum(bar.values()) <= 1 for bar in bars), bars
    # The KV cache that a rollout has, and that is all that differs there.
    assert turns[2]["cache"] > 2 * aside[2]["cache"] > 0
    assert turns[0]["trainer"] == aside[0]["trainer"] > 0 and turns[0]["cache"] == 0 and turns[2]["trainer"] == 0
    draw(place, aside, turns)


def total(place: Any) -> int:
    return int(json.loads(place.vramctl("gpus", "--gpu", "0", "--json"))["gpus"][0]["total_bytes"])


def context(place: Any) -> int:
    return round(CONTEXT * total(place) / MIB) * MIB


def start(place: Any, share: float) -> tuple[Any, Any]:
    """A trainer, paused, and an engine that has this part of the GPU."""
    mib = total(place) // MIB
    weights = round(WEIGHTS * mib)
    # The trainer's memory has no tags; its last MiB are what the program itself needs.
    trainer = place.start("run", "--name", "trainer", "--", place.apps / "engine", "--weights-mib", round(TRAINER * mib) - 24, "--kv-mib", 8)
    place.vramctl("pause", "trainer")
    cache = round(share * mib) - weights - context(place) // MIB - OTHER_MIB
    sizes = ["--weights-mib", weights, "--kv-mib", cache]
    return trainer, place.start("run", "--name", "engine", "--", place.apps / "engine_regions", *sizes)


def side_by_side(place: Any) -> list[dict[str, float]]:
    """Nobody leaves, so each phase is the same."""
    programs = start(place, ASIDE)
    place.vramctl("resume", "trainer")
    bars = [used(place)] * len(PHASES)
    end(place, *programs)
    return bars


def in_turns(place: Any) -> list[dict[str, float]]:
    trainer, engine = start(place, IN_TURNS)
    place.vramctl("pause", "engine")
    place.vramctl("resume", "trainer")
    bars = [used(place)]
    place.vramctl("pause", "trainer")
    place.vramctl("resume", "weights", "--name", "engine")
    bars.append(used(place))
    place.vramctl("resume", "engine")
    bars.append(used(place))
    place.vramctl("pause", "engine")
    place.vramctl("resume", "trainer")
    assert used(place) == bars[0], "something stays on the GPU"
    place.vramctl("pause", "trainer")
    place.vramctl("resume", "engine")
    end(place, engine)
    place.vramctl("resume", "trainer")
    end(place, trainer)
    return bars


def end(place: Any, *programs: Any) -> None:
    """Each has its contents, and its captured graph computes on them."""
    for program in programs:
        for question in ("generate 7", "verify"):
            answer = place.ask(program, question)
            assert "corrupt" not in answer and "error" not in answer, answer
        program.communicate("quit\n")
        assert program.returncode == 0


def used(place: Any) -> dict[str, float]:
    """Parts of the GPU's memory, by kind."""
    gpu = json.loads(place.vramctl("gpus", "--gpu", "0", "--json"))["gpus"][0]
    found = dict.fromkeys((kind for kind, *_ in KINDS), 0.0)
    for share in gpu["shares"]:
        kind = "rest"
        if share["what"] == "tag":
            kind = "trainer" if share["name"] == "trainer" else {"weights": "weights", "kv_cache": "cache"}.get(share["of"], "rest")
        found[kind] += share["bytes"] / gpu["total_bytes"]
    return found


# ---- the picture ----


def draw(place: Any, aside: list[dict[str, float]], turns: list[dict[str, float]]) -> None:
    label = "GPU memory in each phase of an RL step: with trainer and engine side by side, the KV cache has a third of the GPU; in turns, over two thirds"
    with place.chart("share.svg", (600, 310), label) as figure:
        panels = (f"side by side: the engine has {ASIDE:g} of the GPU", aside), (f"in turns: the engine has {IN_TURNS:g} of the GPU", turns)
        for number, (title, bars) in enumerate(panels):
            axes = figure.add_axes((0.07 + 0.47 * number, 0.2, 0.44, 0.57))
            base = [0.0] * len(bars)
            for kind, name, colour in KINDS:
                heights = [bar[kind] for bar in bars]
                drawn = axes.bar(PHASES, heights, 0.8, base, color=LIGHT[colour], label=name)
                said = [f"{height:.0%}" if height > 0.07 else "" for height in heights]
                axes.bar_label(drawn, said, label_type="center", color=LIGHT["ground"], fontsize=8)
                base = [under + height for under, height in zip(base, heights)]
            axes.set_title(title, fontsize=9.5)
            axes.set_ylim(0, 1)
            axes.set_yticks([0, 0.25, 0.5, 0.75, 1], ["0%", "25%", "50%", "75%", "100%"] if number == 0 else [""] * 5)
            axes.grid(axis="y")
        figure.text(0.07, 0.95, "GPU memory in each phase of an RL step", fontsize=11, weight="bold", va="center")
        figure.legend(handles=axes.get_legend_handles_labels()[0], loc="upper left", bbox_to_anchor=(0.055, 0.93), ncols=4, columnspacing=1.5)
        note = f"From a run on the simulated GPU (scripts/pictures share); a CUDA context takes {CONTEXT:.1%}, as 0.9 GiB of 80."
        figure.text(0.07, 0.05, note, color=LIGHT["dim"], fontsize=8)
