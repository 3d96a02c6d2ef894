"""scripts/bench-verl without a GPU: it reads verl's output, derives its figures, times calls, and runs a job from start to end."""

import asyncio
import importlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest
from unittest import mock

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
HERE = ROOT / "scripts" / "bench-verl.d"
sys.path[:0] = [str(HERE), str(pathlib.Path(__file__).resolve().parent)]

import report  # noqa: E402

import test_verl  # noqa: E402

GIB = 1 << 30

#: As verl's console logger and Ray print them: `concat_dict_to_str` with `pprint.pformat` of Python's and numpy's numbers.
CONSOLE = (
    "\x1b[36m(TaskRunner pid=812)\x1b[0m ray init kwargs: {'num_cpus': 14}\n"
    "\x1b[36m(TaskRunner pid=812)\x1b[0m Total steps: 3, num_warmup_steps: 0\n"
    "\x1b[36m(TaskRunner pid=812)\x1b[0m Training Progress:  33%|███▎      | 1/3 [00:20<00:40, 20.1s/it]\r"
    "\x1b[36m(TaskRunner pid=812)\x1b[0m step:1 - global_seqlen/min:78621 - actor/pg_loss:np.float64(-0.0012) - actor/grad_norm:0.5"
    " - critic/rewards/mean:0.4912 - perf/mfu/actor:np.float32(0.31) - actor/lr:1e-06 - timing_s/gen:12.5 - timing_s/update_actor:4.25"
    " - val-core/made/reward/mean@1:np.float64(nan) - timing_s/step:20.0 - training/epoch:0\n"
    "(WorkerDict pid=900) vramctl: paused actor_params: 3.00 GiB in 60 ms - kept\n"
    "step:2 - actor/pg_loss:2.5e-05 - timing_s/gen:10.0 - timing_s/step:16.0\n"
)


def event(what, began, seconds=1.0, **more):
    return {"what": what, "pid": 1, "began": began, "seconds": seconds, "used_before": 0, "used_after": 0, **more}


class Reading(unittest.TestCase):
    def test_the_console(self):
        steps = report.from_console(CONSOLE)
        self.assertEqual(sorted(steps), [1, 2])
        first = steps[1]
        wanted = {
            "global_seqlen/min": 78621,
            "actor/pg_loss": -0.0012,
            "timing_s/gen": 12.5,
            "actor/lr": 1e-06,
            "training/epoch": 0,
        }
        self.assertEqual({name: first[name] for name in wanted}, wanted)
        self.assertAlmostEqual(first["perf/mfu/actor"], 0.31)
        self.assertNotEqual(first["val-core/made/reward/mean@1"], first["val-core/made/reward/mean@1"], "not a number")
        self.assertEqual(steps[2], {"actor/pg_loss": 2.5e-05, "timing_s/gen": 10.0, "timing_s/step": 16.0})

    def test_the_file_and_a_last_line_that_is_cut_off(self):
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "metrics.jsonl"
            path.write_text('{"step": 1, "data": {"timing_s/gen": 12.5, "note": "text"}}\n{"step": 2, "da')
            self.assertEqual(report.from_file(path), {1: {"timing_s/gen": 12.5}})
            self.assertEqual(report.from_file(path.with_name("none")), {})

    def test_answers_in_any_order(self):
        with tempfile.TemporaryDirectory() as folder:
            one, two = '{"input": "q", "output": "x\u2028\x85", "score": 1}', '{"input": "r", "output": "y", "score": 2}'
            for step, lines in ((1, [one, two]), (2, [two, one]), (3, [one])):
                (pathlib.Path(folder) / f"{step}.jsonl").write_text("\n".join(lines))
            digests = report.tokens(folder)
            self.assertEqual(digests[1], digests[2])
            self.assertNotEqual(digests[1], digests[3])
            self.assertTrue(digests[3], "not split within an answer")


class Deriving(unittest.TestCase):
    def test_medians_leave_the_first_steps_out(self):
        steps = {number: {"timing_s/gen": float(seconds)} for number, seconds in enumerate((90, 80, 3, 5, 4), 1)}
        self.assertEqual(report.phases(steps, 2), {"gen": 4.0})

    def found(self):
        """Two steps, with the weights sent once before."""
        found = [event("send weights", 0), event("wake kv_cache", 2)]
        for step in (0, 1):
            at = 10 + 40 * step
            found += [
                event("sleep level 2", at, used_before=60 * GIB, used_after=(2 + step) * GIB),
                event("to cuda: model", at + 2),
                event("load_fsdp_model_to_gpu", at + 2, 0.5, bytes=8 * GIB),
                event("to cpu: model", at + 5),
                event("to cuda: model+optimizer", at + 7),
                event("to cpu: model+optimizer", at + 15),
                event("send weights", at + 20, 2),
                event("wake kv_cache", at + 25),
            ]
        return found

    def test_phases_in_the_events(self):
        self.assertEqual(
            report.windows(self.found())[:5],
            [
                ("weight sync", 0, 1),
                ("rollout", 3, 10),
                ("log-probabilities", 12, 16),
                ("update", 17, 26),
                ("weight sync", 30, 32),
            ],
        )

    def test_peaks_residue_and_transitions(self):
        found = self.found()
        samples = [(5, 50 * GIB, 0), (20, 70 * GIB, GIB), (26.5, 79 * GIB, 0), (55, None, 0), (60, 40 * GIB, 2 * GIB)]
        mode = {"events": found, "samples": samples, "steps": {}}
        figures = report.digest(mode, 0)
        self.assertEqual({phase: used // GIB for phase, used in figures["peaks"].items()}, {"rollout": 50, "update": 70})
        self.assertEqual((figures["gpu_peak"], figures["host_peak"]), (79 * GIB, 2 * GIB))
        self.assertEqual([used // GIB for used in figures["residue"]], [2, 3])
        later = report.digest(mode, 1)
        self.assertEqual([used // GIB for used in later["residue"]], [3], "the first step is warm-up")
        loads = later["transitions"]["trainer: parameters in"]
        self.assertEqual((loads["times"], loads["seconds"], loads["bytes"]), (1, 0.5, 8 * GIB))
        self.assertEqual(later["transitions"]["vLLM: sleep level 2"]["bytes"], 57 * GIB)
        self.assertNotIn("to cuda: model", later["transitions"], "it is the sum of others")

    def test_tables_and_joined_runs(self):
        def mode(gen, loss):
            steps = {number: {"timing_s/gen": gen, "actor/pg_loss": loss} for number in (1, 2)}
            return {"ended": "complete", "events": self.found(), "samples": [], "steps": steps, "tokens": {1: "abc"}}

        result = {"about": "a GPU", "warm": 1, "modes": {"a": mode(6.0, 0.5), "c": mode(4.0, 0.5)}}
        earlier = json.loads(json.dumps({"modes": {"b": mode(5.0, 0.5), "a": mode(7.0, 0.25)}}))
        joined = report.join(result, [earlier])
        self.assertEqual(list(joined["modes"]), ["a", "a2", "b", "c"])
        text = report.markdown(joined)
        self.assertIn("| gen | 6.00 | 7.00 | 5.00 | 4.00 | 1.50 |", text)
        self.assertIn("| step 1: actor/pg_loss | 0.5 | 0.25 | 0.5 | 0.5 | no |", text)
        self.assertIn("| step 1: answers | abc | abc | abc | abc | yes |", text)
        self.assertIn("0.500 s; 8.59 GB need 0.156, 3.20 times", text)


class Timers(test_verl.Verl):
    """verl_timers.py beside the adapter, in the stand-in for verl."""

    def setUp(self):
        self.events = tempfile.TemporaryDirectory()
        self.addCleanup(self.events.cleanup)
        variables = {"BENCH_VERL_EVENTS": self.events.name, "BENCH_VERL_PACKAGE": str(ROOT / "python" / "vramctl")}
        mock.patch.dict(os.environ, variables).start()
        self.addCleanup(sys.modules.pop, "verl_timers", None)
        finders = list(sys.meta_path)
        self.addCleanup(lambda: sys.meta_path.__setitem__(slice(None), finders))
        super().setUp()
        self.gpu.torch.cuda.is_initialized = lambda: True
        self.gpu.torch.cuda.mem_get_info = lambda: (1, 3)
        self.gpu.torch.cuda.memory_reserved = lambda: 5

    def sources(self):
        # verl imports it at the end of its own import.
        return {**test_verl.VERL, "verl/__init__.py": "__version__ = '0.9.1'\nimport verl_timers"}

    def test_each_call_is_timed_as_verl_sees_it_and_the_adapter_still_works(self):
        engine = self.settled()
        self.step(engine, 3)
        self.assertEqual(self.moves.calls, [], "the adapter is behind the timers")
        found = report.events(self.events.name)[-6:]
        self.assertEqual({one["what"] for one in found}, {*report.MOVES, "to cuda: model+optimizer", "to cpu: model+optimizer"})
        self.assertEqual({one["used_after"] for one in found}, {2})
        self.assertFalse(any(one["failed"] or "error" in one for one in found))
        sizes = {one["what"]: one["bytes"] for one in found}
        self.assertEqual(sizes["offload_fsdp_model_to_cpu"], 3 * GIB)
        self.assertEqual(sizes["load_fsdp_optimizer"], 3 * GIB + 3 * 4)

    def test_vllm_s_worker_and_the_sender(self):
        timers = importlib.import_module("verl_timers")

        class Worker:
            def sleep(self, level=1):
                return "asleep"

            def wake_up(self, tags=None):
                raise KeyError("no memory")

        class ServerAdapter:
            async def update_weights(self, weights):
                return weights

        timers.time_vllm(types.SimpleNamespace(Worker=Worker))
        timers.time_sending(types.SimpleNamespace(ServerAdapter=ServerAdapter))
        self.assertEqual(Worker().sleep(level=2), "asleep")
        with self.assertRaises(KeyError):
            Worker().wake_up(tags=["kv_cache"])
        self.assertEqual(asyncio.run(ServerAdapter().update_weights(7)), 7)
        found = [(one["what"], one.get("failed")) for one in report.events(self.events.name)]
        self.assertEqual(found, [("sleep level 2", False), ("wake kv_cache", True), ("send weights", None)])

    def test_sizes(self):
        timers = importlib.import_module("verl_timers")

        def tensor(count):
            return types.SimpleNamespace(numel=lambda: count, element_size=lambda: 4)

        sharded = types.SimpleNamespace(_local_tensor=tensor(10))
        self.assertEqual(timers.bytes_of(types.SimpleNamespace(parameters=lambda: [sharded, tensor(2)])), 48)
        self.assertEqual(timers.bytes_of(types.SimpleNamespace(state={0: {"step": 3, "exp_avg": tensor(5)}})), 20)


#: A job that does what verl does: metrics, events, answers, and a process in a session of its own that outlives it.
JOB = """
    import json, os, pathlib, subprocess, sys, time
    def prepare():
        pathlib.Path(os.environ["JOB"]).mkdir(exist_ok=True)
    if __name__ == "__main__":
        settings = dict(one.split("=", 1) for one in sys.argv[1:])
        mode = "c" if "actor_rollout_ref.model.external_lib" in settings else "b" if os.environ.get("FAKE") else "a"
        import verl_timers
        answers = pathlib.Path(settings["trainer.rollout_data_dir"])
        fails = settings.get("fail") == mode
        behind = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
        (answers.parent / "behind").write_text(str(behind.pid))
        with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
            for step in range(1, int(settings["trainer.total_training_steps"]) + 1):
                if fails and step == 2:
                    print("torch.OutOfMemoryError: CUDA out of memory", flush=True)
                    sys.exit(3)
                verl_timers.note("send weights", began=time.time(), seconds=0.001)
                verl_timers.note("sleep level 2", began=time.time(), seconds=0.01, used_before=9, used_after=1)
                (answers / f"{step}.jsonl").write_text(json.dumps({"input": "q", "output": str(step)}))
                file.write(json.dumps({"step": step, "data": {"timing_s/step": 1.0, "actor/pg_loss": 0.5}}) + "\\n")
                file.flush()
        print("vramctl: something of the library" if mode != "a" else "", flush=True)
        time.sleep(600)
    """

VRAMCTL = """\
#!/bin/bash
if [ "$1" = status ]; then echo "actor_params paused of $2"; exit; fi
while [ "$1" != -- ]; do echo "$1" >> "$BENCH_VERL_EVENTS/../arguments"; shift; done
shift
FAKE=1 exec "$@"
"""


class Whole(unittest.TestCase):
    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.folder = pathlib.Path(place.name)
        (self.folder / "bin").mkdir()
        (self.folder / "bin" / "libvramctl.so").touch()
        (self.folder / "bin" / "vramctl").write_text(VRAMCTL)
        (self.folder / "bin" / "vramctl").chmod(0o755)
        (self.folder / "fake_job.py").write_text(textwrap.dedent(JOB))

    def bench(self, *more, env=None):
        command = [
            str(ROOT / "scripts" / "bench-verl"),
            "--job",
            "fake_job.py",
            "--bin",
            "bin",
            "--out",
            "out",
            "--work",
            "work",
        ]
        clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
        return subprocess.run(
            [*command, *more], cwd=self.folder, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=300
        )

    def result(self):
        return json.loads((self.folder / "out" / "bench-verl.json").read_text())

    def test_three_modes_from_start_to_end(self):
        done = self.bench("--steps", "3", "--warm", "1", "--set", "x=1", env={"VRAMCTL_TAG": "mine"})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("VRAMCTL_TAG is not passed on", done.stderr)
        result = self.result()
        self.assertEqual({label: mode["ended"] for label, mode in result["modes"].items()}, dict.fromkeys("abc", "complete"))
        for label, mode in result["modes"].items():
            self.assertEqual(sorted(mode["steps"]), ["1", "2", "3"])
            self.assertEqual(len(mode["events"]), 6)
            self.assertEqual(len(mode["library"]), 0 if label == "a" else 1)
            behind = int((self.folder / "out" / label / "behind").read_text())
            self.assertFalse(is_running(behind), "Ray's daemons end with the mode")
            arguments = self.folder / "out" / label / "arguments"
            self.assertEqual(
                arguments.exists() and arguments.read_text().split(), label != "a" and ["run", "--no-tag", "--name", "verl"]
            )
        self.assertIn("| step | 1.00 | 1.00 | 1.00 | 1.00 |", done.stdout)
        self.assertIn("| step 3: answers |", done.stdout)
        self.assertEqual(done.stdout.count("actor_params paused of verl"), 2)

    def test_a_mode_that_fails_is_explained_and_the_others_run(self):
        done = self.bench("--steps", "2", "--warm", "0", "--modes", "a,c", "--set", "fail=a")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("CUDA out of memory", done.stdout)
        ended = {label: mode["ended"] for label, mode in self.result()["modes"].items()}
        self.assertEqual(ended, {"a": "ended early (exit code 3)", "c": "complete"})

    def test_dry_run_and_what_is_missing(self):
        done = self.bench("--dry-run", "--modes", "c", "--gpus", "2", "--deterministic", "--quick", "--env", "A=b c")
        self.assertEqual(done.returncode, 0, done.stderr)
        for text in (
            "external_lib=vramctl.frameworks.verl",
            "tensor_model_parallel_size=2",
            "full_determinism=True",
            "A='b c'",
        ):
            self.assertIn(text, done.stdout)
        self.assertFalse((self.folder / "out").exists())
        (self.folder / "bin" / "libvramctl.so").unlink()
        done = self.bench()
        self.assertEqual(done.returncode, 1)
        self.assertIn("libvramctl.so is missing", done.stderr)
        self.assertEqual(self.bench("--modes", "x").returncode, 2)


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    unittest.main()
