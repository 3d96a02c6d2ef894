"""scripts/bench without a GPU: its sections complete and report every row, and medians use undisturbed samples."""

import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

from benchmarks import memory_report as report  # noqa: E402
from benchmarks import overhead, rl_step  # noqa: E402
from measure import growth  # noqa: E402


def plain_environment():
    ours = ("LD_", "PYTHONPATH", "SIMGPU_", "VRAMCTL_")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


def bench(out, section, *arguments):
    built = pathlib.Path(os.environ["VRAMCTL_LIB"]).parent
    command = [ROOT / "scripts" / "bench", section, "--bin", built, "--out", out, *arguments]
    return subprocess.run(command, env=plain_environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)


class SmokeTest(unittest.TestCase):
    def bench(self, section, *arguments):
        """Runs a section; returns its data and report."""
        with tempfile.TemporaryDirectory() as folder:
            ran = bench(folder, section, "--simulated", *arguments)
            self.assertEqual(ran.returncode, 0, ran.stdout)
            data = json.loads(pathlib.Path(folder, f"{section}.json").read_text())
            self.assertEqual(data["missed"], [], ran.stdout)
            chart = pathlib.Path(folder, "memory-chart.json")
            self.chart = json.loads(chart.read_text()) if chart.exists() else None
            return data, pathlib.Path(folder, f"{section}.md").read_text()

    def test_every_row_is_measured_and_reported(self):
        data, table = self.bench("memory", "--no-tms", "--sets", "24x1g,idle,swap", "--repeat", "2")
        for row, name, _, _ in report.ROWS:
            self.assertGreater(min(data["samples"]["24x1g"]["vramctl"][row]), 0, row)
            self.assertIn(f"| {name} | ", table)
        # In two seconds, only the control thread wakes, to see once a second whether its socket is still there.
        self.assertLessEqual(data["idle"]["switches"], 6, "a thread of the library woke up")
        for row in ("released_first", "released", "retained_first", "retained"):
            self.assertGreater(min(data["swap"][row]), 0, row)
        for way in ("one_by_one", "at_once"):
            for row in ("released", "retained", "trainer_leaves", "engine_leaves"):
                self.assertGreater(min(data["swap"][f"{row}_{way}"]), 0, row)
        self.assertIn("| times as fast |", table)
        recorded = json.loads((ROOT / "docs/pictures/bench.json").read_text())
        self.assertEqual(self.chart.keys(), recorded.keys())
        self.assertEqual(self.chart["seconds"]["vramctl"].keys(), recorded["seconds"]["vramctl"].keys())

    def test_discarded_contents_alone(self):
        data, _ = self.bench("memory", "--no-tms", "--sets", "64x1g", "--discarded", "--repeat", "3")
        self.assertEqual(
            set(data["samples"]["64x1g"]["vramctl"]), {row for row, *_ in report.ROWS if row.startswith("discard")}
        )

    def test_what_others_do_too_in_turns(self):
        data, table = self.bench("memory", "--no-tms", "--turns", "--sets", "24x1g,72x1174m,2000x8m", "--repeat", "2")
        for name in ("72x1174m", "2000x8m"):
            rows = {row for row, *_ in report.ROWS if row.startswith("discard")}
            self.assertEqual(set(data["samples"][name]["vramctl"]), rows)
            self.assertGreater(min(data["calls"][name]["alone"]["pause"]), 0)
            self.assertGreater(min(data["calls"][name]["alone"]["resume_rested"]), 0)
        rows = {"first", "kept", "resume_kept", "first_retained", "steady", "resume_retained", "resume_retained_rested"}
        self.assertEqual(set(data["samples"]["24x1g"]["vramctl"]), rows)
        self.assertIn("in turns", table)

    def test_contents_on_disk(self):
        data, table = self.bench("disk", "--gib", "1", "--repeat", "1")
        self.assertEqual({row: len(samples) for row, samples in data["samples"].items()}, dict.fromkeys(data["samples"], 1))
        self.assertRegex(table, r"\| pause, on disk \| [\d.]+ m?s \| [\d.]+ \| \d+% \|")

    def test_a_job_beside_one_process(self):
        with tempfile.TemporaryDirectory() as folder:
            ran = bench(folder, "job", "--processes", "2", "--rounds", "1")
            # Whether it is within the limit is not for a test on a busy machine.
            data = json.loads(pathlib.Path(folder, "job.json").read_text())
            self.assertEqual([each for each in data["missed"] if "times as long" not in each], [], ran.stdout)
            self.assertEqual({len(samples) for step in data["figures"].values() for samples in step.values()}, {1})
            self.assertRegex(ran.stdout, r"\| pause \| [\d.]+ m?s \([\d.]+ m?s in the job\) \|")

    @unittest.skipUnless(shutil.which(os.environ.get("CC", "cc")), "no C compiler")
    def test_the_driver_without_the_library_is_the_drivers_own(self):
        with tempfile.TemporaryDirectory() as folder:
            program = pathlib.Path(folder) / "overhead_driver"
            source = ROOT / "tests" / "apps" / "overhead_driver.c"
            subprocess.run([os.environ.get("CC", "cc"), "-o", program, source, "-ldl"], check=True, timeout=60)
            calls = {call: (what, 1e9) for call, (what, _) in overhead.DRIVER_CALLS.items()}
            plain = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
            with mock.patch.object(overhead, "DRIVER_CALLS", calls):
                rows = overhead.driver_rows([program, "--batches", "3"], 1, {"without": plain, "again": plain})
        self.assertEqual(len(rows), len(calls) + 1)
        for row in rows:
            self.assertRegex(row["how"], "not replaced|in a process without")
            self.assertGreater(min(row["with"], row["without"]), 0)
        self.assertEqual(len(overhead.table(rows)), len(rows) + 2)


class Medians(unittest.TestCase):
    """Samples slowed down by another user of the core count in the noise, not in the median."""

    @staticmethod
    def data(slow, slow_driver=(), samples=(), driver=()):
        row = "discard_pause"
        return {
            "slow": {"set": {"vramctl": {row: list(slow)}, "beside": {row: list(slow_driver)}}},
            "samples": {"set": {"vramctl": {row: list(samples)}}},
            "calls": {"set": {"beside": {"pause": list(driver)}}},
        }

    def undisturbed(self, slow, samples):
        return report.undisturbed(self.data(slow), "set", "vramctl", "discard_pause", samples)

    def test_is_of_the_undisturbed_where_they_are_enough(self):
        self.assertEqual(self.undisturbed([1.0, 1.4, 1.1, 1.11, 1.05], [1, 2, 3, 4, 5]), [1, 3, 5])

    def test_is_of_all_where_too_few_were_undisturbed_or_nobody_looked(self):
        self.assertEqual(self.undisturbed([1.0, 1.4, 1.1, 1.2, 1.3], [1, 2, 3, 4, 5]), [1, 2, 3, 4, 5])
        self.assertEqual(self.undisturbed([], [1, 2, 3]), [1, 2, 3])

    def test_a_turn_counts_where_neither_was_disturbed(self):
        samples, driver = [2, 9, 2, 2, 2], [1, 1, 1, 1, 10]
        data = self.data([1, 2, 1, 1, 1], [1, 1, 1, 1, 2], samples, driver)
        self.assertEqual(report.times_as_long(data, "set", "discard_pause", 2, 1), 2)
        # Too few are left: all count.
        data = self.data([1, 2, 2, 2, 1], [1, 1, 1, 1, 2], [2, 9, 9, 9, 2], driver)
        self.assertEqual(report.times_as_long(data, "set", "discard_pause", 2, 1), 9)

    def test_the_noise_tells_how_many_count(self):
        self.assertEqual(report.span([0.001, 0.002, 0.003], 3, 3), "1.00 to 3.00")
        self.assertEqual(report.span([0.001, 0.002, 0.003], 5, 3), "1.00 to 3.00 (3)")
        self.assertEqual(report.span([0.001, 0.002, 0.003, 0.004], 5, 3), "1.00 to 4.00 (3 of 4)")


class Swap(unittest.TestCase):
    """What the time of a swap went to: its copies run beside each other, those of two commands one after the other."""

    def test_shares(self):
        def answer(*stages):
            return {"processes": [{"report": {"stages": one}} for one in stages]}

        out, into = {"save": 300, "release": 20}, {"restore": 310}
        found = {
            "released_at_once": [0.345],
            "released_at_once_answers": [[answer(out, into)]],
            "released_one_by_one": [0.645],
            "released_one_by_one_answers": [[answer(out), answer(into)]],
        }
        self.assertEqual(
            report.shares(found),
            [
                ["`pause`, then `resume`, host memory given back", "610", "20.0", "15.0"],
                ["`swap`, host memory given back", "310", "20.0", "15.0"],
            ],
        )


class RlStep(unittest.TestCase):
    """Both libraries do all transitions, and the table is right."""

    def run_it(self, out, *arguments):
        return bench(out, "rl-step", *arguments)

    def test_a_step_with_both_libraries(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            # The library has torch_memory_saver's functions, so it can stand in for it.
            (out / "torch_memory_saver_hook_mode_preload_cu13.abi3.so").symlink_to(os.environ["VRAMCTL_LIB"])
            options = ["--tms-dir", out, "--modes", "tms,vramctl,tms-retained", "--rounds", "1", "--turns", "1"]
            ran = self.run_it(out, "--simulated", *options)
            self.assertEqual(ran.returncode, 0, ran.stdout)
            data = json.loads((out / "rl-step.json").read_text())
            self.assertEqual((data["missed"], data["notes"]), ([], []), ran.stdout)
            for mode in ("tms", "vramctl", "tms-retained"):
                for row, *_ in rl_step.ROWS:
                    self.assertEqual(len(data["samples"][mode][row]), 1, (mode, row))
                self.assertIn(rl_step.MODES[mode][0], (out / "rl-step.md").read_text())

    def test_many_steps_with_suspends(self):
        with tempfile.TemporaryDirectory() as folder:
            out = pathlib.Path(folder)
            ran = self.run_it(out, "--simulated", "--cycles", "5", "--suspend-every", "2")
            data = json.loads((out / "rl-step.json").read_text())
            # Too few to tell what grows.
            self.assertEqual([each for each in data["missed"] if "not flat" not in each], [], ran.stdout)
            self.assertEqual((len(data["soak"]["samples"]), len(data["soak"]["suspends"])), (5, 4), ran.stdout)
            self.assertIn("| engine: descriptors |", (out / "rl-step.md").read_text())

    def run_of(self, many=200, **grown):
        flat = {"device bytes": 5 << 30, "engine: descriptors": 7, "whole step, seconds": 1.0, "transitions, seconds": 1.0}
        samples = [{name: value + number * grown.get(name, 0) for name, value in flat.items()} for number in range(many)]
        return {"samples": samples, "settle": 40, "grown": []}

    def test_what_grows_is_named(self):
        self.assertEqual(growth.growing([self.run_of()]), [])
        for name, by in (("device bytes", 10_000), ("engine: descriptors", 0.05), ("transitions, seconds", 0.01)):
            self.assertEqual(growth.growing([self.run_of(**{name: by})]), [name])
            # In one of two runs.
            self.assertEqual(growth.growing([self.run_of(), self.run_of(**{name: by})]), [name])
        # Some steps have a suspend, and others use the machine.
        self.assertEqual(growth.growing([self.run_of(**{"whole step, seconds": 1.0})]), [])
        # Fewer steps than two suspends take.
        self.assertEqual(growth.growing([self.run_of(3)]), [])

    def test_memory_without_a_name_is_told_apart(self):
        arena = 0x7F12_0400_0000
        self.assertEqual(growth.anonymous(arena, 0), "malloc's arenas of threads")
        self.assertEqual(growth.anonymous(arena + 4096, 0), "anonymous")
        self.assertEqual(growth.anonymous(arena + 4096, arena + 4096), "stacks of threads", "behind a guard")
        self.assertGreater(growth.Process("this", os.getpid()).mappings()["anonymous"], 0)

    def test_runs_are_one_table(self):
        """Each process starts anew, with as much more or less as it likes: only what it gains by cycle is growth."""
        first, second = self.run_of(100, **{"device bytes": 1 << 20}), self.run_of(50, **{"device bytes": 1 << 20})
        for sample in second["samples"]:
            sample["device bytes"] -= 1 << 30
        # Not known in each cycle.
        del second["samples"][7]["engine: descriptors"]
        second["grown"] = [{"name": "engine tag default", "bytes": 50 << 20}]
        (row,) = (row for row in growth.rows([first, second]) if row["name"] == "device bytes")
        self.assertEqual((row["first"], row["last"]), (5 << 30, (4 << 30) + (49 << 20)))
        self.assertAlmostEqual(row["slope"], 100 << 20)
        text = "\n".join(growth.table([first, second], "cycle"))
        self.assertIn("| device | 5120.00 MiB | 5144.50 MiB | 4145.00 MiB | +100.00 MiB | GROWS |", text)
        self.assertIn("| engine: descriptors | 7 | 7 | 7 | +0 | flat |", text)
        self.assertIn("- engine tag default: 50.00 MiB", text)

    def test_host_memory_of_a_process(self):
        with tempfile.TemporaryDirectory() as folder:
            process = growth.Process("one", 0)
            process.folder = pathlib.Path(folder)
            self.assertEqual(process.host_bytes(), 0, "it has ended")
            (process.folder / "status").write_text(
                "Name:\tx\nVmRSS:\t 99 kB\nRssAnon:\t 30 kB\nRssFile:\t 60 kB\nRssShmem:\t 4 kB\n"
            )
            self.assertEqual(process.host_bytes(), 34 << 10, "without files")
            (process.folder / "smaps_rollup").write_text(
                "00400000-7fff ---p 00000000 00:00 0 [rollup]\nRss:  99 kB\nPss_Anon:  20 kB\nPss_Shmem:  1 kB\n"
            )
            self.assertEqual(process.host_bytes(), 21 << 10, "its part of what several have")
        self.assertGreater(growth.Process("this", os.getpid()).host_bytes(), 1 << 20)

    def test_the_plan(self):
        with tempfile.TemporaryDirectory() as out:
            ran = self.run_it(out, "--dry-run", "--modes", "tms,vramctl", "--turns", "2")
            self.assertEqual(ran.returncode, 0, ran.stdout)
            self.assertIn("trainer 30 GiB, of which weights 15 GiB", ran.stdout)
            self.assertEqual(ran.stdout.count("turn "), 4, ran.stdout)

    def test_the_table(self):
        steps = {"engine_in": 0.5, "trainer_out": 2.0, "weights": 0.5, "trainer_in": 1.0}
        data = {
            "bytes": {"trainer": 20e9, "weights": 5e9, "cache": 2**30},
            "link": {"out": 50e9, "in": 40e9},
            "samples": {"tms": {row: [9.0, value, value] for row, value in steps.items()}},
            "first": {"tms": {row: [2 * value] for row, value in steps.items()}},
            "left_in_use": {"tms": [2**30]},
            "other_work": 4.0,
            "notes": [],
            **{name: "x" for name in ("gpu", "driver", "date", "command")},
        }
        self.assertEqual(rl_step.limit(data, "trainer_out"), 0.4)
        self.assertIsNone(rl_step.limit(data, "engine_out"))
        table = rl_step.markdown(data)
        for line in (
            "| trainer out | 0.40 s | 2.00 s (10.0 GB/s) |",
            "| weights sent, in buckets | 0.12 s | 0.50 s (10.0 GB/s) |",
            "| engine's weights in, empty | – | 0.50 s |",
            "| **all transitions** | 1.02 s | **4.00 s** |",
            "| share of a step with 4 s of other work (computed) | 20% | 50% |",
            "| all transitions of a process's first step | | 8.00 s |",
            "Medians of 3 steps (torch_memory_saver)",
        ):
            self.assertIn(line, table)
        self.assertNotIn("KV cache in", table)

    def test_sizes_add_up(self):
        with tempfile.TemporaryDirectory() as folder:
            for total in (32 << 20, 15 << 30, 50 << 30):
                path = rl_step.sizes_of(total, folder, "weights")
                sizes = [int(line) for line in path.read_text().split()]
                self.assertEqual(sum(sizes), total)
                self.assertEqual([size for size in sizes if size % (2 << 20)], [])


if __name__ == "__main__":
    unittest.main()
