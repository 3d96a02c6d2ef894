"""scripts/bench verl without a GPU: it reads verl's output, derives its figures, times calls, and runs a job from start to end."""

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
HERE = ROOT / "scripts" / "benchmarks" / "verl"
sys.path[:0] = [str(ROOT / "scripts"), str(HERE), str(ROOT / "python" / "tests")]

import support  # noqa: E402
import test_verl  # noqa: E402
from benchmarks.verl import fit, report, watch  # noqa: E402
from vramctl import errors  # noqa: E402

GIB = 1 << 30

def event(what, began, seconds=1.0, **more):
    return {
        "what": what,
        "pid": 2 if what.split()[0] in ("sleep", "wake") else 1,
        "began": began,
        "seconds": seconds,
        "used_before": 0,
        "used_after": 0,
        **more,
    }


class Reading(unittest.TestCase):
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
            answers = report.tokens(folder)
            self.assertEqual(answers[1], answers[2])
            self.assertEqual([len(answers[step]) for step in (1, 3)], [2, 1], "not split within an answer")
            self.assertEqual(report.common([answers[1], answers[3], None]), "1 of 2 answers, 1 of 2 prompts")
            changed = [[prompt, "other"] for prompt, _ in answers[1]]
            self.assertEqual(report.common([answers[1], changed]), "0 of 2 answers, 2 of 2 prompts")


class Deriving(unittest.TestCase):
    def test_the_gpus_of_the_job(self):
        for listed, gpus in (("", [0, 1]), ("3,1,2", [3, 1]), ("2", [2])):
            with mock.patch.dict(os.environ, {"CUDA_VISIBLE_DEVICES": listed}):
                self.assertEqual(watch.of_job(2), gpus, listed)

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
                ("log-probabilities", 13, 15),
                ("update", 18, 25),
                ("weight sync", 30, 32),
            ],
        )

    def test_the_phase_at_a_moment(self):
        found = self.found()
        moments = {4: "rollout", 10.5: "vLLM: sleep level 2", 14: "log-probabilities", 20: "update", 17: "between phases"}
        moments |= {2.2: "vLLM: wake kv_cache", 30.5: "send weights"}
        self.assertEqual({moment: report.phase_at(found, moment) for moment in moments}, moments)
        begun = [one for one in found if one["began"] < 20]
        self.assertEqual(report.phase_at(begun, 20), "update", "it has not ended yet")

    def test_pauses_from_outside_and_whether_they_changed_a_result(self):
        def mode(loss, outside=()):
            steps = {1: {"actor/pg_loss": loss}, 2: {"actor/pg_loss": 0.5, "actor/lr": 1}}
            found = {"events": self.found(), "samples": [], "outside": list(outside)}
            return {"ended": "complete", "steps": steps, "tokens": {1: [["q", "a"]]}, **found}

        done = {
            "what": "suspend",
            "began": 4,
            "ranks": 2,
            "before": GIB,
            "seconds": 1.5,
            "left": 0,
            "later": 1 << 20,
            "back": 2,
            "after": GIB,
        }
        refused = {"what": "pause", "began": 20, "before": GIB, "error": "busy: a kernel"}
        managed, paused = mode(0.5), mode(0.5, [refused, done])
        modes = {"a": mode(0.25), "c": managed, "e": paused}
        text = report.markdown({"about": "a GPU", "warm": 0, "modes": modes})
        self.assertIn("| suspend | rollout | 2 | 1.50 | 1024 | 0 | 1 | 2.00 | 1024 | |", text)
        self.assertIn("| pause | update | | | 1024 | | | | | busy: a kernel |", text)
        self.assertIn("**4 of 4 results equal those of c:", text)
        self.assertIn("**3 of 4 results equal those of a:", report.verdict("e", {"a": mode(0.25), "e": paused}))
        self.assertIn("add c to --modes", report.verdict("e", {"e": paused}))
        text = report.outside_text(done, self.found())
        self.assertEqual(
            text.strip(), "suspend from outside, rollout: free after 1.50 s, 0 of 1024 MiB left, back in 2.00 s with 1024 MiB"
        )
        self.assertIn("update: busy: a kernel", report.outside_text(refused, self.found()))

    def test_peaks_residue_and_transitions(self):
        found = self.found()
        samples = [(5, 50 * GIB), (20, 70 * GIB), (26.5, 79 * GIB), (55, None), (60, 40 * GIB)]
        mode = {"events": found, "samples": samples, "steps": {}}
        figures = report.digest(mode, 0)
        peaks = {phase: rows["GPU, peak"] // GIB for phase, rows in figures["by_phase"].items() if "GPU, peak" in rows}
        self.assertEqual(peaks, {"rollout": 50, "update": 70})
        self.assertEqual(figures["gpu_peak"], 79 * GIB)
        self.assertEqual([used // GIB for used in figures["residue"]], [2, 3])
        later = report.digest(mode, 1)
        self.assertEqual([used // GIB for used in later["residue"]], [3], "the first step is warm-up")
        ranks = sorted([*found, *({**one, "pid": one["pid"] + 10} for one in found)], key=lambda one: one["began"])
        later_of_two = report.digest({**mode, "events": ranks}, 1)
        self.assertEqual([used // GIB for used in later_of_two["residue"]], [3] * 2, "each rank sends the weights")
        loads = later["transitions"]["trainer: parameters in"]
        self.assertEqual((loads["times"], loads["seconds"], loads["bytes"]), (1, 0.5, 8 * GIB))
        self.assertEqual(later["transitions"]["vLLM: sleep level 2"]["bytes"], 57 * GIB)
        self.assertNotIn("to cuda: model", later["transitions"], "it is the sum of others")

    def test_the_ledger_and_host_memory_at_the_end_of_each_phase_and_transition(self):
        def look(began, ended, host, **bytes):
            shares = [
                [1, "tag", "actor_params", bytes.get("params", 0)],
                [1, "driver", "", GIB],
                [2, "tag", "kv_cache", bytes.get("cache", 0)],
                [2, "unmanaged", "libnccl.so.2", GIB],
                [77, "process", "", 2 * GIB],
                [None, "unexplained", "", 4 << 20],
            ]
            return {"began": began, "ended": ended, "host": host * GIB, "shares": [one for one in shares if one[3]]}

        found = self.found()
        for one in found:
            one["pinned"] = {1: 3 * GIB, 2: GIB}[one["pid"]] if one["began"] >= 10 else None
        looks = [
            look(4, 5, 1, cache=30 * GIB),
            look(8, 9, 12, cache=40 * GIB),
            look(9.5, 10.5, 99, cache=99 * GIB),  # as the rollout ends
            look(11.2, 11.8, 13),  # asleep, and nothing else has begun
            look(13, 14, 5, params=8 * GIB),
            look(53.5, 54.5, 9),  # in the second log-probabilities
            look(60, 67, 9),  # too long
        ]
        figures = report.by_phase(found, 0, [], looks)
        rollout = figures["rollout"]
        self.assertEqual(rollout["host, the job's processes"], 12 * GIB)
        wanted = {
            "rollout: kv_cache": 40 * GIB,
            "rollout: left to CUDA by libnccl.so.2": GIB,
            "rollout: all": 41 * GIB,
            "trainer: context, loaded code, small allocations": GIB,
            "trainer: all": GIB,
            "others: all of it, without the library": 2 * GIB,
            "others: all": 2 * GIB,
            "unexplained": 4 << 20,
        }
        prefix = "GPU at the end, "
        self.assertEqual({row[len(prefix) :]: bytes for row, bytes in rollout.items() if row.startswith(prefix)}, wanted)
        self.assertEqual(figures["vLLM: sleep level 2"]["host, the job's processes"], 13 * GIB)
        self.assertEqual(
            figures["log-probabilities"][f"{prefix}trainer: actor_params"], 4 * GIB, "the median of 8 GiB and nothing"
        )
        self.assertEqual(figures["log-probabilities"]["host, the job's processes"], 7 * GIB, "the median of two steps")
        self.assertNotIn(f"{prefix}unexplained", figures["update"])
        self.assertEqual(figures["update"]["host, pinned by torch, besides"], 4 * GIB, "of both processes")
        mode = {"ended": "complete", "events": found, "samples": [(5, 50 * GIB)], "steps": {}, "tokens": {}, "looks": looks}
        text = report.markdown({"about": "a GPU", "warm": 0, "modes": {"c": mode, "a": {**mode, "looks": []}}, "fits": []})
        self.assertIn("| rollout | c: `vramctl run`, trainer managed | a: plain verl |", text)
        self.assertIn("| GPU at the end, rollout: kv_cache | 40.00 | |", text)
        self.assertIn("| GPU, peak | 50.00 | 50.00 |", text)
        self.assertIn("| host, peak of the job's processes | 99.00 | |", text)

    def test_tables_and_joined_runs(self):
        def mode(gen, loss):
            steps = {number: {"timing_s/gen": gen, "actor/pg_loss": loss} for number in (1, 2)}
            return {"ended": "complete", "events": self.found(), "samples": [], "steps": steps, "tokens": {1: [["q", "a"]]}}

        result = {"about": "a GPU", "warm": 1, "modes": {"a": mode(6.0, 0.5), "c": mode(4.0, 0.5)}}
        earlier = json.loads(json.dumps({"modes": {"b": mode(5.0, 0.5), "a": mode(7.0, 0.25)}}))
        joined = report.join(result, [earlier])
        self.assertEqual(list(joined["modes"]), ["a", "a2", "b", "c"])
        text = report.markdown(joined)
        self.assertIn("| gen | 6.00 | 7.00 | 5.00 | 4.00 | 1.50 |", text)
        self.assertIn("| step 1: actor/pg_loss | 0.5 | 0.25 | 0.5 | 0.5 | no |", text)
        self.assertRegex(text, r"\| step 1: answers( \| \w{12}){4} \| yes \|")
        self.assertIn("0.500 s; 8.59 GB need 0.156, 3.20 times", text)


class Outside(unittest.TestCase):
    """What outside.py makes of refusals, without Ray."""

    def setUp(self):
        place = tempfile.TemporaryDirectory()
        self.addCleanup(place.cleanup)
        self.file = pathlib.Path(place.name) / "outside.jsonl"
        self.calls, self.fails, self.used = [], {}, 9

    def run_it(self, pauses, suspends):
        """`fails`: by the number of the call, what is raised."""

        def call(what):
            def called(*_, **__):
                self.calls.append(what)
                if error := self.fails.get(len(self.calls)):
                    raise error
                self.used = 9 if what == "resume" else 5
                return types.SimpleNamespace(processes={1: "", 2: ""}) if what == "pause" else {1: "", 2: ""}

            return called

        job = types.SimpleNamespace(**{what: call(what) for what in ("pause", "suspend", "resume")}, status=dict)
        machine = types.SimpleNamespace(gpu_used=lambda: self.used)
        with (
            mock.patch.dict(sys.modules, {"vramctl.ray": types.SimpleNamespace(Job=lambda name: job)}),
            mock.patch.object(sys, "argv", ["", str(self.file), "7", str(pauses), str(suspends), "10", "1", "3"]),
            mock.patch("time.sleep"),
            mock.patch.object(watch, "Watch", lambda gpus: machine),
        ):
            self.addCleanup(sys.modules.pop, "outside", None)
            importlib.import_module("outside").main()

    def failure(self, committed):
        error = errors.Busy("a kernel")
        error.committed = committed
        return error

    def rows(self):
        return report.lines(self.file)

    def test_what_is_refused_is_told_and_tried_again(self):
        self.fails = {1: self.failure(False)}
        self.run_it(1, 1)
        self.assertEqual(len(self.calls), 5)
        first, *others = self.rows()
        self.assertEqual((first["error"], "back" in first), ("busy: a kernel", False))
        figures = [(row["ranks"], row["before"], row["left"], row["after"], "error" in row) for row in others]
        self.assertEqual(figures, [(2, 6, 2, 6, False)] * 2)

    def test_it_gives_up_in_the_end(self):
        self.fails = {number: self.failure(False) for number in range(1, 100)}
        self.run_it(1, 0)
        self.assertEqual(["error" in row for row in self.rows()], [True] * 5)

    def test_a_job_that_may_be_paused_is_resumed(self):
        self.fails = {1: self.failure(None)}
        self.run_it(1, 0)
        self.assertEqual(self.calls, ["pause", "resume"] * 2)
        self.assertEqual(["error" in row for row in self.rows()], [True, False])

    def test_a_resume_that_fails_is_told_and_ends_it(self):
        self.fails = {2: self.failure(False)}
        with self.assertRaises(errors.Busy):
            self.run_it(2, 0)
        self.assertIn("the resume: busy", self.rows()[0]["error"])


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
        self.gpu.torch.cuda.host_memory_stats = lambda: {"allocated_bytes.current": 6}

    def sources(self):
        # verl imports it at the end of its own import.
        return {**test_verl.VERL, "verl/__init__.py": "__version__ = '0.9.1'\nimport verl_timers"}

    def test_each_call_is_timed_as_verl_sees_it_and_the_adapter_still_works(self):
        engine = self.settled()
        self.step(engine, 3)
        self.assertEqual(self.moves.calls, [], "the adapter is behind the timers")
        found = report.events(self.events.name)[-6:]
        self.assertEqual({one["what"] for one in found}, {*report.MOVES, "to cuda: model+optimizer", "to cpu: model+optimizer"})
        self.assertEqual({(one["used_after"], one["pinned"]) for one in found}, {(2, 6)})
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
        found = [(one["what"], one["failed"], one.get("error")) for one in report.events(self.events.name)]
        self.assertEqual(
            found,
            [("sleep level 2", False, None), ("wake kv_cache", True, "KeyError('no memory')"), ("send weights", False, None)],
        )

    def test_who_fails_says_in_which_phase(self):
        timers = importlib.import_module("verl_timers")

        class Fails:
            def initialize(self): ...

            def to(self, device, model=True, optimizer=True, grad=True): ...

            def forward_backward_batch(self, data, loss_function, forward_only=False):
                raise MemoryError("CUDA out of memory")

            def optimizer_step(self):
                return 7

            sleep = wake_up = to

            def execute_model(self, scheduled):
                raise MemoryError("too many")

        timers.time_trainer(types.SimpleNamespace(FSDPEngine=Fails))
        timers.time_vllm(types.SimpleNamespace(Worker=Fails))
        for work in (
            lambda: Fails().forward_backward_batch(1, None, forward_only=True),
            lambda: Fails().forward_backward_batch(1, None),
            lambda: Fails().execute_model(1),
        ):
            with self.assertRaises(MemoryError):
                work()
        self.assertEqual(Fails().optimizer_step(), 7)
        found = report.events(self.events.name)
        self.assertEqual([one["phase"] for one in found], ["log-probabilities", "update", "rollout"])
        self.assertEqual(report.transitions(found, 0), {}, "they are no transitions")
        self.assertEqual(
            fit.outcome(False, 1, found, "", False), ("out of memory in log-probabilities", "MemoryError('CUDA out of memory')")
        )

    def test_sizes(self):
        timers = importlib.import_module("verl_timers")

        def tensor(count):
            return types.SimpleNamespace(numel=lambda: count, element_size=lambda: 4)

        sharded = types.SimpleNamespace(_local_tensor=tensor(10))
        self.assertEqual(timers.bytes_of(types.SimpleNamespace(parameters=lambda: [sharded, tensor(2)])), 48)
        self.assertEqual(timers.bytes_of(types.SimpleNamespace(state={0: {"step": 3, "exp_avg": tensor(5)}})), 20)


class Fitting(unittest.TestCase):
    """What --fit makes of how runs end, without running any."""

    VALUES = [1, 2, 4, 8, 16]

    def ran(self, value, ended):
        return {"mode": "a", "setting": "micro_batch", "value": value, "values": self.VALUES, "ended": ended, "about": "a GPU"}

    def test_the_highest_that_fits_is_found_whichever_it_is(self):
        for most in (0, *self.VALUES):
            runs = []
            while (value := fit.next_value(self.VALUES, runs)) is not None:
                runs.append(self.ran(value, fit.FITS if value <= most else "out of memory in update"))
            self.assertLessEqual(len(runs), 3)
            wanted = {0: "none from 1 (1: out of memory in update)", 16: "16 (the highest tried)"}
            above = {1: 2, 2: 4, 4: 8, 8: 16}
            self.assertEqual(fit.verdict(runs), wanted.get(most) or f"{most} ({above[most]}: out of memory in update)")

    def test_other_failures_decide_nothing(self):
        runs = [
            self.ran(4, fit.FITS),
            self.ran(8, "too slow"),
            self.ran(8, "other failure (exit code 1)"),
            self.ran(8, "out of host memory"),
        ]
        self.assertEqual(fit.next_value(self.VALUES, runs), 8)
        self.assertEqual(fit.verdict(runs), "4 (not decided yet)")
        self.assertEqual(fit.verdict(runs[1:]), "? (not decided yet)")

    def test_how_a_run_ended(self):
        advice = "INFO: If you are running out of memory, consider decreasing `gpu_memory_utilization`"
        died = (
            "A worker died. Potential root causes: (1) The process is killed by SIGKILL by OOM killer due to high memory usage."
        )
        woken = event("wake kv_cache", 5, failed=True, error="DeviceMemory('too little')")
        lost = event("to cpu: model", 5, failed=True, error="HostMemory('too little')")
        for found, log, late, wanted in (
            (
                [],
                "ValueError: Free memory on device is less than desired GPU memory utilization",
                False,
                "out of memory in the start",
            ),
            (
                [woken, event("failed", 6, failed=True, phase="update", error="")],
                advice,
                False,
                "out of memory in rollout, at its wake kv_cache",
            ),
            (
                [event("send weights", 5)],
                "torch.OutOfMemoryError: CUDA out of memory.",
                False,
                "out of memory in an unknown place",
            ),
            ([lost], "", False, "out of host memory"),
            ([event("send weights", 5)], f"{advice}\n{died}", False, "other failure (exit code 3)"),
            ([event("send weights", 5)], advice, True, "too slow"),
        ):
            with self.subTest(wanted):
                self.assertEqual(fit.outcome(False, 3, found, log, late)[0], wanted)
        self.assertEqual(fit.outcome(True, -15, [], "CUDA out of memory, in an attempt", False), ("fits", ""))


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
                micro, mode_s = int(settings.get("actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu", 1)), {"a": 4, "c": 16}.get(mode)
                if micro > (mode_s or 4):
                    verl_timers.note("failed", phase="update", began=time.time(), seconds=0, failed=True, error="OutOfMemoryError('CUDA')")
                    sys.exit(1)
                if int(settings.get("data.max_response_length", 1)) > 1000:
                    sys.exit("something else")
                if settings.get("hang") == mode and step == 2:
                    time.sleep(600)
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
if [ "$1" = gpus ]; then echo '{"gpus": [{"index": 0, "used_bytes": 9, "shares": [{"what": "unexplained", "bytes": 9}]}, {"index": 1, "used_bytes": 99, "shares": []}]}'; exit; fi
if [ "$1" = status ]; then echo "actor_params paused of $2"; exit; fi
while [ "$1" != -- ]; do echo "$1" >> "$BENCH_VERL_EVENTS/../arguments"; shift; done
shift
FAKE=1 exec "$@"
"""


class Script(unittest.TestCase):
    """The script, in a folder with what it needs."""

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
        command = [str(ROOT / "scripts" / "bench"), "verl", "--job", "fake_job.py", "--bin", "bin", "--out", "out", "--work", "work"]
        clean = {name: value for name, value in os.environ.items() if name not in ("LD_PRELOAD", "PYTHONPATH")}
        return subprocess.run(
            [*command, *more], cwd=self.folder, env={**clean, **(env or {})}, capture_output=True, text=True, timeout=300
        )

    def result(self):
        return json.loads((self.folder / "out" / "verl.json").read_text())


class Whole(Script):
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
            self.assertTrue(
                all(look["shares"] == [[None, "unexplained", "", 9]] and look["host"] > 1 << 20 for look in mode["looks"]), mode
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

    def test_what_a_mode_has_done_counts_where_the_time_was_up(self):
        done = self.bench("--steps", "2", "--warm", "0", "--modes", "a", "--set", "hang=a", "--limit", "25")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        mode = self.result()["modes"]["a"]
        self.assertEqual((mode["ended"], sorted(mode["steps"])), ("the time was up", ["1"]))

    def test_a_job_that_could_not_be_paused_from_outside(self):
        done = self.bench("--steps", "3", "--modes", "e")
        self.assertEqual(done.returncode, 1, done.stdout + done.stderr)
        self.assertIn("paused 0 of 5 times", done.stdout)
        self.assertIn("No module named 'ray'", done.stdout)

    def test_what_fits_is_found_over_several_calls(self):
        values = ("--values", "micro_batch=2,4,8,16", "--values", "response_length=500,2000")
        done = self.bench("--fit", "micro_batch", *values, "--modes", "a,c", "--join", "before.json")
        self.assertIn("before.json does not exist", done.stdout)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("| micro_batch | 4 (8: out of memory in update) | 16 (the highest tried) |", done.stdout)
        runs = self.result()["fits"]
        self.assertEqual([(run["mode"], run["value"], run["steps"]) for run in runs[:2]], [("a", 4, 2), ("a", 8, 0)])
        before = self.folder / "before.json"
        (self.folder / "out" / "verl.json").rename(before)
        done = self.bench("--fit", *values, "--values", "gpu_memory_utilization=0.5", "--modes", "a", "--join", "before.json")
        self.assertEqual(done.returncode, 1, "a response of 2000 fails otherwise, so the highest is not known")
        self.assertIn("| response_length | 500 (not decided yet) |", done.stdout)
        self.assertIn("| gpu_memory_utilization | 0.5 (the highest tried) |", done.stdout)
        self.assertIn("other failure (exit code 1)", done.stdout)
        added = self.result()["fits"][len(runs) :]
        self.assertEqual([run["setting"] for run in added].count("micro_batch"), 0, "that was known")
        # Another job's runs tell nothing about this one.
        done = self.bench("--fit", "micro_batch", *values, "--modes", "a", "--set", "x=1", "--join", "before.json")
        self.assertEqual(len(self.result()["fits"]), len(runs) + 2, done.stdout)

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
        self.assertEqual(
            self.bench("--modes", "e", "--warm", "1").returncode, 2, "the first step does not tell how long a step takes"
        )


#: A job with memory on the simulated GPU: a trainer and a rollout, each in its process, take turns. In mode c, the trainer's is paused.
LIVE_JOB = """
    import json, os, pathlib, subprocess, sys, time
    MIB = 1 << 20
    def prepare():
        pathlib.Path(os.environ["JOB"]).mkdir(exist_ok=True)
    def play(role, managed):
        sys.path[:0] = [{tests!r}, {package!r}]
        from support import Cuda, pattern
        import vramctl, verl_timers
        cuda, held, kept = Cuda(), dict(), dict()
        sizes = dict(actor_params=64 * MIB, kv_cache=128 * MIB)
        def come(tag):
            if managed and tag in held:
                return vramctl.resume(tag)
            if managed:
                with vramctl.region(tag):
                    held[tag] = cuda.malloc(sizes[tag])
            else:
                held[tag] = cuda.malloc(sizes[tag])
            cuda.write(held[tag], kept.pop(tag, None) or pattern(1, sizes[tag]))
        def go(tag):
            if managed:
                return vramctl.pause(tag)
            kept[tag] = cuda.read(held[tag], sizes[tag])
            cuda.free(held.pop(tag))
        cuda.memory_info()  # makes its context
        print("done", flush=True)
        for line in sys.stdin:
            what, tag, name = json.loads(line)
            began = time.time()
            dict(come=come, go=go, stay=lambda tag: None)[what](tag)
            verl_timers.note(name, began=began, seconds=time.time() - began, used_before=0, used_after=0, pinned=None)
            print("done", flush=True)
    class Role:
        def __init__(self, *words):
            self.child = subprocess.Popen([sys.executable, __file__, *words], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            assert self.child.stdout.readline() == "done\\n"
        def does(self, *what):
            print(json.dumps(what), file=self.child.stdin, flush=True)
            assert self.child.stdout.readline() == "done\\n"
            looks()
    def looks():
        # Of two that end from now on, the second has also begun.
        path = pathlib.Path(os.environ["BENCH_VERL_EVENTS"]).parent / "looks.jsonl"
        count = lambda: path.read_text().count("\\n") if path.exists() else 0
        enough = count() + 2
        while count() < enough:
            time.sleep(0.02)
    def step():
        external = any(one.startswith("actor_rollout_ref.model.external_lib") for one in sys.argv)
        library = "libvramctl" in os.environ.get("LD_PRELOAD", "")
        rollout, trainer = Role("rollout", str(int(library))), Role("trainer", str(int(external)))
        rollout.does("come", "kv_cache", "wake kv_cache")
        rollout.does("go", "kv_cache", "sleep level 2")
        trainer.does("come", "actor_params", "to cuda: model+optimizer")
        trainer.does("go", "actor_params", "to cpu: model+optimizer")
        trainer.does("stay", "", "send weights")
        rollout.does("come", "kv_cache", "wake kv_cache")
        rollout.does("go", "kv_cache", "sleep level 2")
        with open(os.environ["VERL_FILE_LOGGER_PATH"], "w") as file:
            file.write(json.dumps(dict(step=1, data={{"timing_s/step": 1.0}})) + "\\n")
    if __name__ == "__main__":
        step() if "=" in sys.argv[1] else play(sys.argv[1], sys.argv[2] == "1")
    """


class WholeOnTheLibrary(Script):
    """With the library and the command line themselves, on the simulated GPU."""

    def setUp(self):
        super().setUp()
        here = ROOT / "python" / "tests"
        (self.folder / "fake_job.py").write_text(textwrap.dedent(LIVE_JOB.format(tests=str(here), package=str(here.parent))))

    def test_three_modes_from_start_to_end(self):
        built = str(pathlib.Path(support.VRAMCTL).resolve().parent)
        done = self.bench("--steps", "1", "--warm", "0", "--bin", built, env={"SIMGPU_CONTEXT_BYTES": str(100 << 20)})
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        mib = {}
        for label, mode in self.result()["modes"].items():
            phases = report.digest(report.whole(mode), 0)["by_phase"]
            self.assertLessEqual({"rollout", "update", "vLLM: sleep level 2"}, set(phases))
            for phase, rows in phases.items():
                mib[label, phase] = {
                    row.removeprefix("GPU at the end, "): round(bytes / (1 << 20)) for row, bytes in rows.items()
                }
        plain, under, managed = ([mib[label, phase] for phase in ("rollout", "update")] for label in "abc")
        self.assertEqual(managed[0]["rollout: kv_cache"], 128)
        self.assertEqual(managed[1]["trainer: actor_params"], 64)
        for rollout, update in (under, managed):
            self.assertEqual(rollout["rollout: kv_cache"], 128)
            self.assertEqual(update.get("rollout: kv_cache", 0), 0, "asleep")
            self.assertEqual(rollout["trainer: all"], 100, "its context")
        # Of whom the library knows, but cannot pause it.
        self.assertEqual([bytes for row, bytes in under[1].items() if row.startswith("trainer: left to CUDA by")], [64])
        self.assertGreaterEqual(plain[0]["rollout: all of it, without the library"], 128)
        self.assertLess(plain[1]["rollout: all of it, without the library"], 128)
        self.assertEqual(plain[0]["trainer: all"] + 64, plain[1]["trainer: all"])
        for label in "abc":
            self.assertGreaterEqual(
                mib[label, "rollout"]["host, the job's processes"], 64, "the trainer's parameters are there"
            )
            self.assertGreaterEqual(mib[label, "rollout"]["GPU, peak"], 128)


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


if __name__ == "__main__":
    unittest.main()
