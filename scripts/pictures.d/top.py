"""A frame of `vramctl top`: an engine of two processes that is being paused, and a trainer."""

from __future__ import annotations

import html
import re
import subprocess
import time
import xml.etree.ElementTree as ElementTree
from typing import Any

COLUMNS = 100
CELL, LINE, MARGIN = 8.4, 18, 14
COLOURS = {"31": "#ff7b72", "32": "#7ee787", "33": "#e3b341", "34": "#79c0ff", "35": "#d2a8ff", "36": "#76e3ea"}
TEXT, GROUND, DIM = "#e6edf3", "#0d1117", "#6e7681"


def make(place: Any) -> None:
    is_simulated = "SIMGPU_DIR" in place.environment
    program = place.build("engine_regions")
    # As slow as an 80 GB engine would be, relative to its size.
    link = {"SIMGPU_LINK": "120M"} if is_simulated else {}
    weights, cache = (300, 500) if is_simulated else (24 << 10, 12 << 10)

    def start(name: str, weights: int, cache: int) -> None:
        sizes = ["--weights-mib", weights, "--kv-mib", cache, "--layers", 2]
        place.start("run", "--name", name, "--no-python", "--", program, *sizes, **link)

    for _ in range(2):
        start("engine", weights, cache)
    start("trainer", 2 * weights, cache)
    place.vramctl("pause", "weights", "--name", "trainer")
    going = subprocess.Popen(place.command("pause", "--name", "engine"), env=place.environment, stdout=subprocess.DEVNULL)
    environment = {**place.environment, "CLICOLOR_FORCE": "1", "COLUMNS": str(COLUMNS)}
    environment.pop("NO_COLOR", None)
    for _ in range(50):
        frame = subprocess.run(place.command("top", "--once"), env=environment, capture_output=True, text=True, check=True).stdout
        if "save [" in frame and "/s now" in frame:
            break
        time.sleep(0.1)
    plain = re.sub(r"\x1b\[[0-9;]*m", "", frame)
    for wanted in ("GPU 0", "engine x2", "save [", "/s now", "held, weights paused", "kv_cache", "IN HOST"):
        assert wanted in plain, f"{wanted} is not in\n{plain}"
    assert all(len(line) <= COLUMNS for line in plain.splitlines()), plain
    assert going.wait(60) == 0
    picture = svg(frame)
    shown = "\n".join("".join(line.itertext()) for line in ElementTree.fromstring(picture).iter("{http://www.w3.org/2000/svg}text"))
    assert "".join(shown.split()) == "".join(plain.split()), "the picture shows something else"
    place.picture("top.svg").write_text(picture)


def svg(frame: str) -> str:
    """The terminal's text as a picture."""
    lines = frame.rstrip("\n").split("\n")
    width, height = COLUMNS * CELL + 2 * MARGIN, len(lines) * LINE + 2 * MARGIN
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height}" width="{width:.0f}" height="{height}" role="img"',
        ' aria-label="A frame of vramctl top"',
        f' font-family="ui-monospace, SFMono-Regular, Menlo, Consolas, monospace" font-size="14" fill="{TEXT}">',
        f'<rect width="100%" height="100%" rx="8" fill="{GROUND}"/>',
    ]
    for number, line in enumerate(lines):
        at, style, y = 0, "", MARGIN + LINE * (number + 0.75)
        for part in re.split(r"(\x1b\[[0-9;]*m)", line):
            if part.startswith("\x1b["):
                style = part[2:-1]
                continue
            # Each run of words has its own position, whatever the font.
            for words in re.finditer(r"\S+(?: \S+)*", part):
                x, length = MARGIN + CELL * (at + words.start()), CELL * len(words[0])
                codes = style.split(";")
                fill = next((COLOURS[code] for code in codes if code in COLOURS), DIM if "2" in codes else "")
                look = (f' fill="{fill}"' if fill else "") + (' font-weight="bold"' if "1" in codes else "")
                fit = f' textLength="{length:.1f}" lengthAdjust="spacingAndGlyphs"'
                out.append(f'<text x="{x:.1f}" y="{y:.1f}"{fit}{look} xml:space="preserve">{html.escape(words[0])}</text>')
            at += len(part)
    return "\n".join([*out, "</svg>", ""])
