"""Charts as SVG files, drawn by matplotlib. Letters are outlines, so no reader's font changes what fits, and colours follow the reader's
dark mode. A chart in which text covers text, or leaves the picture, is not written."""

from __future__ import annotations

import contextlib
import html
import io
import itertools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

#: What draws them. The version decides each byte of a chart.
MATPLOTLIB = "matplotlib==3.10.9"

#: Each name's colour on light and on dark ground.
COLOURS = {
    "ground": ("#ffffff", "#0d1117"),
    "text": ("#1f2328", "#e6edf3"),
    "on pale": ("#1f2329", "#0d1117"),
    "dim": ("#59636e", "#9da7b3"),
    "grid": ("#d1d9e0", "#30363d"),
    "place": ("#f0f2f4", "#161b22"),
    "blue": ("#0b5fc1", "#4493f8"),
    "pale blue": ("#6cb1f5", "#9ccbff"),
    "orange": ("#c2570c", "#e0823d"),
    "pale orange": ("#f2ac6e", "#f7c99f"),
    "green": ("#1a7f64", "#3fb68b"),
    "grey": ("#8c959f", "#7d8590"),
}
LIGHT = {name: light for name, (light, _) in COLOURS.items()}

#: matplotlib draws in points, and a browser shows a point as 4/3 pixels.
POINT = 72


@contextlib.contextmanager
def chart(path: Path, size: tuple[float, float], label: str, ground: str = LIGHT["ground"]) -> Iterator[Any]:
    """A figure of so many points, for the caller to draw in; written when the caller is done. `label` is for those who do not see it."""
    import matplotlib
    from matplotlib.figure import Figure

    ours = {"svg.fonttype": "path", "svg.hashsalt": path.name, "font.family": "DejaVu Sans", "font.size": 9, "axes.spines.top": False}
    ours |= {"axes.spines.right": False, "axes.spines.left": False, "axes.edgecolor": LIGHT["grid"], "xtick.bottom": False, "ytick.left": False}
    ours |= {"text.color": LIGHT["text"], "axes.labelcolor": LIGHT["dim"], "xtick.color": LIGHT["dim"], "ytick.color": LIGHT["dim"]}
    ours |= {"legend.frameon": False, "legend.handlelength": 1.0, "axes.titlesize": 10, "grid.color": LIGHT["grid"], "axes.axisbelow": True}
    with matplotlib.rc_context(ours):
        figure = Figure(figsize=(size[0] / POINT, size[1] / POINT), dpi=POINT, facecolor=ground)
        yield figure
        if faults := misplaced(figure):
            raise AssertionError(f"{path.name}: {'; '.join(faults)}")
        written = io.StringIO()
        figure.savefig(written, format="svg", facecolor=ground, metadata={"Date": None, "Creator": None})
    path.write_text(coloured(written.getvalue(), label))


def misplaced(figure: Any) -> list[str]:
    """What is written over something else that is written, or leaves the picture."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.text import Text

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip() and is_shown(text)]
    boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    whole = figure.bbox
    faults = [f"{name!r} leaves the picture" for name, box in boxes if box.x0 < 0 or box.y0 < 0 or box.x1 > whole.x1 or box.y1 > whole.y1]
    return faults + [f"{one!r} covers {other!r}" for (one, a), (other, b) in itertools.combinations(boxes, 2) if a.overlaps(b)]


def is_shown(text: Any) -> bool:
    """Whether it is drawn: an axis has labels for ticks beyond its ends, which are not."""
    axes = text.axes
    for axis in (axes.xaxis, axes.yaxis) if axes is not None else ():
        ticks = [*axis.get_major_ticks(), *axis.get_minor_ticks()]
        if any(text in (tick.label1, tick.label2) for tick in ticks):
            low, high = sorted(axis.get_view_interval())
            return any(text is tick.label1 and low <= tick.get_loc() <= high for tick in ticks)
    return True


def coloured(picture: str, label: str) -> str:
    """The picture with its colours as variables, which have two values each, with words for those who do not see it, and with a line for each element."""
    used = {name: pair for name, pair in COLOURS.items() if pair[0] in picture}
    for name, (light, _) in used.items():
        # First the colour itself, for what knows no variables.
        picture = re.sub(rf"(fill|stroke): {light}", rf"\1: {light}; \1: var(--{name.replace(' ', '-')})", picture)
    values = [" ".join(f"--{name.replace(' ', '-')}: {pair[dark]};" for name, pair in used.items()) for dark in (0, 1)]
    style = f"<style>:root {{ {values[0]} }} @media (prefers-color-scheme: dark) {{ :root {{ {values[1]} }} }}</style>"
    picture = re.sub(r"<metadata>.*?</metadata>\s*", "", picture, flags=re.DOTALL)
    picture = re.sub(r"[ \t]*\n\s*(?![\s<]|\Z)", " ", picture)
    head, tail = picture[picture.index("<svg ") :].split(">", 1)
    return f'{head} role="img" aria-label="{html.escape(label)}">\n {style}{tail}'
