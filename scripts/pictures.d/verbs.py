"""What pause, suspend, move and swap do: where two programs' memory is, before and after each."""

from __future__ import annotations

import html
import json
from typing import Any

MIB = 1 << 20
#: A program of three quarters of a GPU: its weights, its KV cache, which it has marked as not worth keeping, and its context.
WEIGHTS_MIB, CACHE_MIB, CONTEXT_MIB = 1900, 900, 200
KINDS = (("weights", "weights of a"), ("cache", "KV cache of a"), ("other", "another program, b"), ("rest", "contexts"))

STYLE = """
  .card { fill: #ffffff; }
  text { fill: #1f2328; font: 12.5px system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif; }
  .small { font-size: 11px; fill: #59636e; }
  .title { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; font-size: 12px; font-weight: 600; }
  .place { fill: #f0f2f4; stroke: #d1d9e0; }
  .weights { fill: #0b5fc1; } .cache { fill: #1a7f64; } .other { fill: #c2570c; } .rest { fill: #8c959f; }
  @media (prefers-color-scheme: dark) {
    .card { fill: #0d1117; }
    text { fill: #e6edf3; }
    .small { fill: #9da7b3; }
    .place { fill: #161b22; stroke: #30363d; }
    .weights { fill: #4493f8; } .cache { fill: #3fb68b; } .other { fill: #e0823d; } .rest { fill: #7d8590; }
  }
"""

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
    place.picture("verbs.svg").write_text(picture(scenes))


def look(place: Any) -> Bars:
    """Bytes by kind on GPU 0, on GPU 1, and in host memory."""
    bars: Bars = [dict.fromkeys((kind for kind, _ in KINDS), 0) for _ in range(3)]

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

LEFT, TOP, HEIGHT, BAR, GAP, PANEL = 18, 78, 120, 30, 9, 134
#: Bytes of a whole bar.
WHOLE = 4 << 30


def picture(scenes: list[tuple[str, Bars]]) -> str:
    width, bottom = LEFT + PANEL * len(scenes), TOP + HEIGHT
    label = "Where memory is: a pause moves it to host memory and leaves the context, a suspend leaves nothing, a move takes another GPU, in a swap two change places"
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + 56}" width="{width}" height="{bottom + 56}" role="img"'
        f' aria-label="{html.escape(label)}">',
        f"<style>{STYLE}</style>",
        f'<rect class="card" width="{width}" height="{bottom + 56}" rx="8"/>',
    ]
    x = LEFT
    for kind, name in KINDS:
        out.append(f'<rect class="{kind}" x="{x}" y="16" width="12" height="12" rx="2"/><text x="{x + 18}" y="26">{name}</text>')
        x += 46 + 7 * len(name)
    for number, (title, bars) in enumerate(scenes):
        origin = LEFT + number * PANEL
        out.append(f'<text class="title" x="{origin}" y="{TOP - 14}">{html.escape(title)}</text>')
        for place, (name, bar) in enumerate(zip(("GPU 0", "GPU 1", "host"), bars)):
            x, y = origin + place * (BAR + GAP), float(bottom)
            out.append(f'<rect class="place" x="{x}" y="{TOP}" width="{BAR}" height="{HEIGHT}"/>')
            out.append(f'<text class="small" x="{x + BAR / 2:.0f}" y="{bottom + 16}" text-anchor="middle">{name}</text>')
            for kind, _ in KINDS:
                height = bar[kind] / WHOLE * HEIGHT
                y -= height
                if height > 0:
                    out.append(f'<rect class="{kind}" x="{x}" y="{y:.1f}" width="{BAR}" height="{height:.1f}"/>')
    note = "From a run on two simulated GPUs of 4 GiB (scripts/pictures verbs). The KV cache is one that its engine has marked as not worth keeping."
    out.append(f'<text class="small" x="{LEFT}" y="{bottom + 42}">{html.escape(note)}</text>')
    return "\n".join([*out, "</svg>", ""])
