"""A frame of `vramctl top`: an engine of two processes that is being paused, and a trainer."""

from __future__ import annotations

import subprocess
import time
from typing import Any

COLUMNS = 100


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
    for _ in range(50):
        frame = place.top(COLUMNS)
        if "save [" in frame and "/s now" in frame:
            break
        time.sleep(0.1)
    plain = place.plain(frame)
    for wanted in ("GPU 0", "engine x2", "save [", "/s now", "held, weights paused", "kv_cache", "IN HOST"):
        assert wanted in plain, f"{wanted} is not in\n{plain}"
    assert all(len(line) <= COLUMNS for line in plain.splitlines()), plain
    assert going.wait(60) == 0
    place.picture("top.svg").write_text(place.terminal([frame], COLUMNS, "A frame of vramctl top"))
