"""Tables and units of all measurements."""

import statistics

MIB, GIB = 1 << 20, 1 << 30
NONE = "–"


def table(header, align, rows):
    """The lines of a table; none if there are no rows. `align`: `l` or `r` for each column, the last one for those after it."""
    rows = [list(map(str, row)) for row in rows]
    if not rows:
        return []
    sides = align + align[-1] * (len(header) - len(align))
    rules = [{"l": "---", "r": "---:"}[side] for side in sides]
    return ["|" + "".join(f" {cell} |" if cell else " |" for cell in row) for row in (header, rules, *rows)]


def median(samples):
    return statistics.median(samples) if samples else None


def seconds(value):
    if value is None:
        return NONE
    return f"{value:.2f} s" if value >= 0.1 else f"{value * 1e3:.0f} ms" if value >= 0.01 else f"{value * 1e3:.1f} ms"


def ms(value):
    """A number of milliseconds from seconds, for a column of them."""
    if value is None:
        return NONE
    value *= 1e3
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def size(bytes):
    unit, name = (GIB, "GiB") if bytes >= GIB else (MIB, "MiB")
    return f"{round(bytes / unit, 1):g} {name}"


def gbs(bytes, took):
    return f"{bytes / took / 1e9:.1f}" if took else NONE
