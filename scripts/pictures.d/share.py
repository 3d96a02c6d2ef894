"""Who has the GPU's memory in each phase of an RL step: trainer and engine side by side, and in turns."""

from __future__ import annotations

import html
import json
from typing import Any

MIB = 1 << 20
#: Parts of the GPU's memory: the trainer, the engine's weights, all of the engine in either case, and a context: 0.9 GiB of 80.
TRAINER, WEIGHTS, ASIDE, IN_TURNS, CONTEXT = 0.45, 0.18, 0.5, 0.9, 0.011
#: What the engine has beside its weights, KV cache and context.
OTHER_MIB = 16
PHASES = ("training", "weights sent", "rollout")
KINDS = (("trainer", "trainer"), ("weights", "engine: weights"), ("cache", "engine: KV cache"), ("rest", "contexts and the rest"))

STYLE = """
  .card { fill: #ffffff; }
  text { fill: #1f2328; font: 13px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
  .small { font-size: 11.5px; fill: #59636e; }
  .in { fill: #ffffff; font-size: 11.5px; }
  .title { font-size: 15px; font-weight: 600; }
  .grid { stroke: #d1d9e0; stroke-width: 1; }
  .trainer { fill: #c2570c; } .weights { fill: #0b5fc1; } .cache { fill: #1a7f64; } .rest { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; }
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .in { fill: #0d1117; }
    .grid { stroke: #30363d; }
    .trainer { fill: #e0823d; } .weights { fill: #4493f8; } .cache { fill: #3fb68b; } .rest { fill: #7d8590; }
  }
"""


def make(place: Any) -> None:
    place.build("engine")
    place.environment["SIMGPU_CONTEXT_BYTES"] = str(context(place))
    aside, turns = side_by_side(place), in_turns(place)
    for bars in (aside, turns):
        assert all(sum(bar.values()) <= 1 for bar in bars), bars
    # The KV cache that a rollout has, and that is all that differs there.
    assert turns[2]["cache"] > 2 * aside[2]["cache"] > 0
    assert turns[0]["trainer"] == aside[0]["trainer"] > 0 and turns[0]["cache"] == 0 and turns[2]["trainer"] == 0
    place.picture("share.svg").write_text(picture(aside, turns))


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
    found = dict.fromkeys((kind for kind, _ in KINDS), 0.0)
    for share in gpu["shares"]:
        kind = "rest"
        if share["what"] == "tag":
            kind = "trainer" if share["name"] == "trainer" else {"weights": "weights", "kv_cache": "cache"}.get(share["of"], "rest")
        found[kind] += share["bytes"] / gpu["total_bytes"]
    return found


# ---- the picture ----

LEFT, TOP, HEIGHT, BAR, GAP, PANEL = 56, 100, 260, 84, 22, 380


def picture(aside: list[dict[str, float]], turns: list[dict[str, float]]) -> str:
    width, bottom = LEFT + 2 * PANEL, TOP + HEIGHT
    label = "GPU memory in each phase of an RL step: with trainer and engine side by side, the KV cache has a third of the GPU; in turns, over two thirds"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 64}" width="{width}" height="{bottom + 64}" role="img"'
        f' aria-label="{html.escape(label)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{width}" height="{bottom + 64}" rx="8"/>',
        f'<text class="title" x="{LEFT}" y="28">GPU memory in each phase of an RL step</text>',
    ]
    x = LEFT
    for kind, name in KINDS:
        out.append(f'<rect class="{kind}" x="{x}" y="44" width="12" height="12" rx="2"/><text x="{x + 18}" y="54">{name}</text>')
        x += 44 + 7 * len(name)
    for percent in range(0, 101, 25):
        y = bottom - percent / 100 * HEIGHT
        out.append(f'<line class="grid" x1="{LEFT}" y1="{y:.1f}" x2="{width - 16}" y2="{y:.1f}"/>')
        out.append(f'<text class="small" x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{percent}%</text>')
    titles = (f"side by side: the engine has {ASIDE:g} of the GPU", f"in turns: the engine has {IN_TURNS:g} of the GPU")
    for number, (title, bars) in enumerate(zip(titles, (aside, turns))):
        origin = LEFT + number * PANEL + GAP
        middle = origin + (len(PHASES) * (BAR + GAP) - GAP) / 2
        out.append(f'<text x="{middle:.0f}" y="{TOP - 14}" text-anchor="middle">{title}</text>')
        for place, (phase, bar) in enumerate(zip(PHASES, bars)):
            x, y = origin + place * (BAR + GAP), float(bottom)
            out.append(f'<text class="small" x="{x + BAR / 2:.0f}" y="{bottom + 18}" text-anchor="middle">{phase}</text>')
            for kind, _ in KINDS:
                height = bar[kind] * HEIGHT
                y -= height
                if height > 0:
                    out.append(f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}"/>')
                if height > 18:
                    at = y + height / 2 + 4
                    out.append(f'<text class="in" x="{x + BAR / 2:.0f}" y="{at:.1f}" text-anchor="middle">{bar[kind]:.0%}</text>')
    note = f"From a run on the simulated GPU (scripts/pictures share); a CUDA context takes {CONTEXT:.1%}, as 0.9 GiB of 80."
    out.append(f'<text class="small" x="{LEFT}" y="{bottom + 46}">{html.escape(note)}</text>')
    return "\n".join([*out, "</svg>", ""])
