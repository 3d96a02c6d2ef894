"""The sets of allocations to measure."""

import dataclasses
import math
import random

from measure.tables import GIB, MIB
from measure.tables import size as gib

# The driver's granularity: every size is a multiple of it.
PIECE = 2 * MIB


@dataclasses.dataclass
class Set:
    name: str
    title: str
    sizes: list
    # Measure without a backup only.
    discard_only: bool = False
    # Measure with a backup once, if the host has the memory.
    huge: bool = False
    # Measured in turns with torch_memory_saver only.
    turns_only: bool = False

    @property
    def bytes(self):
        return sum(self.sizes)

    def write(self, folder):
        path = folder / f"{self.name}.sizes"
        path.write_text("".join(f"{size}\n" for size in self.sizes))
        return path


def model_sizes(count=500, least=20 * MIB, most=200 * MIB, seed=7):
    """Sizes like those of a model's weights: many of tens of MiB, a few large ones."""
    chance = random.Random(seed)
    ratio = math.log(most / least)
    return [max(PIECE, round(least * math.exp(chance.random() * ratio) / PIECE) * PIECE) for _ in range(count)]


def scaled(sizes, scale):
    """The sizes divided by `scale`; fewer of them if they would fall below the minimum."""
    if scale == 1:
        return sizes
    total = max(PIECE, sum(sizes) / scale)
    small, sum_ = [], 0
    for size in sizes:
        size = max(PIECE, int(size / scale) // PIECE * PIECE)
        if sum_ + size > total and small:
            break
        small.append(size)
        sum_ += size
    return small


def fitting(sizes, room):
    """As many of the sizes as fit into the room; of a single one, as many GiB."""
    if len(sizes) == 1:
        return [min(sizes[0], max(PIECE, room // GIB * GIB or room // PIECE * PIECE))]
    return sizes[: max(1, room // sizes[0])]


def all_sets(scale, room):
    """All sets, made to fit into this many bytes of device memory."""

    def make(name, what, sizes, **more):
        sizes = fitting(scaled(sizes, scale), room)
        total = gib(sum(sizes))
        if len(set(sizes)) == 1:
            what = f"{len(sizes)} x {gib(sizes[0])}"
            title = what if len(sizes) == 1 else f"{what} ({total})"
        else:
            title = f"{len(sizes)} {what} ({total})"
        return Set(name, title, sizes, **more)

    return [
        make("24x1g", "", [GIB] * 24),
        make("model", "of 20 to 200 MiB", model_sizes()),
        make("4000x2m", "", [PIECE] * 4000),
        make("64x1g", "", [GIB] * 64, discard_only=True),
        make("1x100g", "", [100 * GIB], discard_only=True, huge=True),
        make("72x1174m", "", [1174 * MIB] * 72, discard_only=True, turns_only=True),
        make("2000x8m", "", [8 * MIB] * 2000, discard_only=True, turns_only=True),
    ]
