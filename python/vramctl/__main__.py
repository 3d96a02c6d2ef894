"""``python -m vramctl``: the command line that belongs to this package."""

import os
import sys
from pathlib import Path


def _main() -> None:
    package = Path(__file__).resolve().parent
    above = list(package.parents)
    # Where `pip install --target` puts it; the prefix that has the package in its lib/python3.X/site-packages; a checkout.
    prefixes = [folder / "bin" for folder in (above[0], *above[3:4])]
    prefixes += [above[1] / "target" / profile for profile in ("release", "debug")]
    command = next((str(prefix / "vramctl") for prefix in prefixes if os.access(prefix / "vramctl", os.X_OK)), None)
    if command is None:
        looked = ", ".join(map(str, prefixes))
        sys.exit(f"vramctl: the command is not there (looked in {looked}). Install the wheel, or run `cargo build --release`")
    os.execv(command, ["vramctl", *sys.argv[1:]])


_main()
