"""``python -m vramctl``: the command line installed with this package."""

import os
import sys
from pathlib import Path


def command() -> str:
    """The path of the command line that belongs to this package."""
    package = Path(__file__).resolve().parent
    above = list(package.parents)
    # `pip install --target`, the prefix above lib/python3.X/site-packages, a checkout.
    prefixes = [folder / "bin" for folder in (above[0], *above[3:4])]
    prefixes += [above[1] / "target" / profile for profile in ("release", "debug")]
    # What this process runs under: a library beside the command line, or in the `lib` next to its folder.
    if library := os.environ.get("VRAMCTL_LIB"):
        folder = Path(library).resolve().parent
        prefixes += [folder, folder.parent / "bin"]
    found = next((str(prefix / "vramctl") for prefix in prefixes if os.access(prefix / "vramctl", os.X_OK)), None)
    if found is None:
        looked = ", ".join(map(str, prefixes))
        raise FileNotFoundError(
            f"vramctl: command not found (looked in {looked}). Install the wheel, or run `cargo build --release`"
        )
    return found


def _main() -> None:
    try:
        path = command()
    except FileNotFoundError as error:
        sys.exit(str(error))
    os.execv(path, ["vramctl", *sys.argv[1:]])


if __name__ == "__main__":
    _main()
