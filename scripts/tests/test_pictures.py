"""A chart that cannot be read is refused, and what is written has both colours."""

import importlib.util
import os
import pathlib
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
python = "pictures/lib/python{}.{}/site-packages".format(*sys.version_info)
sys.path.append(str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), python)))

from measure import charts  # noqa: E402


@unittest.skipUnless(importlib.util.find_spec("matplotlib"), f"not run: {charts.MATPLOTLIB} is not here (scripts/pictures installs it)")
class Chart(unittest.TestCase):
    def drawn(self, *texts: tuple[float, float, str]) -> str:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder, "chart.svg")
            with charts.chart(path, (200, 100), 'a "label"') as figure:
                for x, y, text in texts:
                    figure.text(x, y, text)
            return path.read_text()

    def test_letters_are_outlines_and_colours_have_two_values(self):
        picture = self.drawn((0.1, 0.1, "one"), (0.1, 0.5, "other"))
        self.assertNotIn("<text", picture)
        self.assertIn('aria-label="a &quot;label&quot;"', picture)
        light, dark = charts.COLOURS["text"]
        self.assertIn(f"fill: {light}; fill: var(--text)", picture)
        self.assertIn(f"--text: {dark};", picture.split("prefers-color-scheme: dark")[1])
        self.assertEqual(picture, self.drawn((0.1, 0.1, "one"), (0.1, 0.5, "other")), "the same each time")

    def test_text_over_text_is_refused(self):
        with self.assertRaisesRegex(AssertionError, "'one' covers 'other'"):
            self.drawn((0.1, 0.1, "one"), (0.12, 0.12, "other"))

    def test_text_that_leaves_the_picture_is_refused(self):
        with self.assertRaisesRegex(AssertionError, "'a legend' leaves the picture"):
            self.drawn((0.9, 0.1, "a legend"))


if __name__ == "__main__":
    unittest.main()
