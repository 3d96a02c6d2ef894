"""A busy engine is paused, another program uses its memory, and the engine goes on: a shell, and `vramctl top` below it."""

from __future__ import annotations

import re
import subprocess
import threading
import time
from typing import Any

COLUMNS, ROWS = 100, 9


def make(place: Any) -> None:
    is_simulated = "SIMGPU_DIR" in place.environment
    program, hog = place.build("engine_regions"), place.build("hog")
    weights, cache, other = (1200, 600, 3000) if is_simulated else (24 << 10, 12 << 10, 60 << 10)
    # A link as slow, relative to the memory, as a pause of 80 GB would find it.
    link = {"SIMGPU_LINK": "600M"} if is_simulated else {}
    sizes = ["--weights-mib", weights, "--kv-mib", cache, "--layers", 2]

    def start(name: str) -> subprocess.Popen[str]:
        return place.start("run", "--name", name, "--no-python", "--", program, *sizes, **link)

    client = Client(place, start("engine"))
    shell: list[str] = []
    frames = []

    def show(*wanted: str) -> None:
        """One more frame: the shell so far, and `top` now."""
        for _ in range(100):
            top = place.top(COLUMNS)
            if all(words in place.plain(top) for words in wanted):
                break
            time.sleep(0.05)
        else:
            raise SystemExit(f"{wanted} is not in\n{place.plain(top)}")
        told = [part for line in shell for part in wrapped(line)]
        rows = [*told, *[""] * (ROWS - len(told)), f"\x1b[2m{'- vramctl top ':-<{COLUMNS}}\x1b[0m"]
        frames.append("\n".join(rows) + "\n" + "\n".join(top.rstrip("\n").split("\n")[1:]) + "\n")

    def answered() -> None:
        shell.append(f"\x1b[36m# a client asks one question after the other: {client.count} answers so far\x1b[0m")

    client.wait_for(200)
    answered()
    show("engine", "active")
    shell.append("$ vramctl pause engine --backup host")
    pausing = subprocess.Popen(place.command("pause", "engine", "--backup", "host"), env=place.environment, stdout=subprocess.PIPE, text=True)
    show("save [", "/s now")
    shell.append(pausing.communicate()[0].strip())
    assert pausing.returncode == 0
    before = client.count
    shell.append(f"$ hog --mib {other}                          \x1b[36m# another program, in the engine's memory\x1b[0m")
    hogging = subprocess.Popen([hog, "--mib", str(other)], env=place.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert hogging.stdout is not None
    assert place.line(hogging).startswith("holding")
    show("held", "paused", "#")
    assert client.count == before, "a held engine has answered"
    hogging.communicate()
    assert hogging.returncode == 0, "the other program's memory was not its own"
    shell.append("$ vramctl resume engine")
    shell.append(place.vramctl("resume", "engine").strip())
    client.wait_for(before + 200)
    answered()
    show("engine", "active")
    answers = client.stop()
    # As an engine answers that nobody has paused.
    client.end()
    assert answers == Client(place, start("undisturbed")).until(len(answers)), "the answers differ"
    for words in ("paused", "resumed"):
        assert any(re.search(words, row) for row in shell), shell
    assert len(frames) == 4
    label = "A terminal: a busy engine is paused, another program uses its GPU memory, and the engine is resumed; below, vramctl top"
    place.picture("pause.svg").write_text(place.terminal(frames, COLUMNS, label))


def wrapped(line: str) -> list[str]:
    """The lines as a terminal breaks them; one with colours is short."""
    lines = line.split("\n")
    return [part for line in lines for part in ([line] if "\x1b" in line else [line[at : at + COLUMNS] for at in range(0, len(line), COLUMNS)])]


class Client:
    """Asks an engine one question after the other."""

    def __init__(self, place: Any, engine: subprocess.Popen[str]) -> None:
        self._place, self._engine = place, engine
        self._answers: list[str] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._ask, daemon=True)
        self._thread.start()

    def _ask(self) -> None:
        while not self._is_over.is_set():
            self._answers.append(self._place.ask(self._engine, f"generate {self.count}"))
            time.sleep(0.002)

    @property
    def count(self) -> int:
        return len(self._answers)

    def wait_for(self, count: int) -> None:
        while self.count < count:
            time.sleep(0.01)

    def stop(self) -> list[str]:
        self._is_over.set()
        self._thread.join()
        return self._answers

    def until(self, count: int) -> list[str]:
        self.wait_for(count)
        return self.stop()[:count]

    def end(self) -> None:
        self._engine.kill()
        self._engine.wait()
