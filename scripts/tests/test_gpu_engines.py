"""scripts/gpu-engines without a GPU: it parses the engines' output, applies limits and writes reports.

The full script runs with a fake engine, a fake `vramctl` and a fake `nvidia-smi`.
"""

import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import textwrap
import types
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPTS = ROOT / "scripts"
sys.path[:0] = [str(SCRIPTS / "gpu-engines.d"), str(ROOT / "python" / "tests")]

import engines  # noqa: E402
import features  # noqa: E402
import program  # noqa: E402
import survey  # noqa: E402

import report  # noqa: E402
import support  # noqa: E402


def failed(checks):
    return [check.name for check in checks if not check.ok]


class Reading(unittest.TestCase):
    def test_time_per_token(self):
        self.assertEqual(failed(report.check_tpot({"without": [10.0, 10.2], "with": [10.1, 10.15]})), [])
        self.assertEqual(len(failed(report.check_tpot({"without": [10.0], "with": [10.11]}))), 1)
        (check,) = report.check_tpot({"without": [10.0, 10.2], "with": [10.1]})
        self.assertEqual(check.detail, "10.100 ms (2 runs) without, 10.100 ms (1 run) with: +0.00%")

    def test_how_often_a_job_was_asked_is_told(self):
        tried = ((1, 800.0), (3, 1900.0), (2, 1000.0), (1, 820.0), (7, 2500.0))
        times = {"pause_ms": 750.0, "resume_ms": 810.0, "used_mib": 900}
        pauses = [{**times, "attempts": attempts, "freed_ms": ms} for attempts, ms in tried]
        # The second is from before that was recorded.
        loads = [{"requests": 32, "same": True, "pauses": pauses}, {"requests": 1, "same": True, "pauses": [times]}]
        about = {"engine": "vLLM", "version": "1", "machine": {}, "started": "x", "checks": []}
        rows = report.markdown({"vllm/hold": {**about, "loads": loads}}).splitlines()
        self.assertIn("| vLLM 1 | 32 | 5 | 2 / 1 / 2 | 1000 ms | 2500 ms |", rows)
        self.assertEqual(len([row for row in rows if row.startswith("| vLLM 1 | 1 |")]), 1, rows)


class Long(unittest.TestCase):
    """Several runs of `long`."""

    def part(self, cycles):
        run = {
            "cycles": cycles,
            "pauses": 2 * cycles,
            "suspends": [],
            "tokens": 7,
            "wrong": [],
            "samples": [],
            "settle": 40,
            "grown": [],
        }
        about = {"engine": "vLLM", "version": "1", "machine": {}, "started": "x"}
        return {**about, "checks": [{"check": str(cycles), "ok": False, "detail": ""}], "runs": [run]}

    def test_runs_are_continued_and_other_parts_replaced(self):
        tpot = {"ms": {"without": [], "with": []}, "checks": []}
        first, second = ({"vllm/long": self.part(cycles), "vllm/tpot": {**tpot, "version": cycles}} for cycles in (300, 200))
        joined = report.join([{"parts": first}, {"parts": second}])
        self.assertEqual([run["cycles"] for run in joined["vllm/long"]["runs"]], [300, 200])
        self.assertEqual([check["check"] for check in joined["vllm/long"]["checks"]], ["300", "200"], "no failure is lost")
        self.assertEqual(joined["vllm/tpot"]["version"], 200)
        text = report.markdown({"vllm/long": joined["vllm/long"]})
        self.assertIn("500 times asleep and awake again by its own API, 1000 times paused", text)
        self.assertIn("in 2 runs. 14 tokens", text)

    def test_when_all_is_done_no_engine_starts(self):
        run = types.SimpleNamespace(
            options=types.SimpleNamespace(engine="vllm", cycles=300, pauses=600),
            parts={"vllm/long": self.part(300)},
            section="long",
            say=lambda text: None,
            started=lambda part: part,
        )
        self.assertEqual(engines.long.long(run)["runs"], [])


class Tokens(engines.Engines):
    """The part `tpot` with engines that each take as long as they are told."""

    def __init__(self, without, library, rounds):
        self.options = types.SimpleNamespace(rounds=rounds, env=[])
        self.times, self.asked, self.checks, self.section = [without, library], [], [], "tpot"

    def start_program(self, managed, part):
        def answer(*_):
            self.asked.append(managed)
            return {"ms": self.times[managed]}

        return types.SimpleNamespace(ask_json=answer)

    def say(self, text):
        pass

    log = say


class TimePerToken(unittest.TestCase):
    def test_both_are_measured_in_turns_and_each_is_first_as_often(self):
        part = Tokens(4.0, 4.01, 4)
        self.assertEqual(part.tpot()["ms"], {"without": [4.0] * 4, "with": [4.01] * 4})
        self.assertEqual(part.asked, [True, False, False, True] * 2)
        self.assertEqual([check["ok"] for check in part.checks], [True])

    def test_more_than_a_percent_fails(self):
        part = Tokens(4.0, 4.1, 1)
        part.tpot()
        self.assertEqual([check["ok"] for check in part.checks], [False])


class Interrupted(engines.Engines):
    """The parts that interrupt an engine in the middle of requests, with an engine and a `vramctl` that do as they are told.

    `faults` name what goes wrong: "differ" (an answer), "refused" (a pause, suspend or move), "lost" (a resume), "late" (every
    answer comes before the pause), "stays" (memory on the GPU that should be left), "disturbed" (the other process), "short" (the time).
    """

    def __init__(self, *faults):
        self.options = types.SimpleNamespace(pauses=3, gpus=1, gpu=0, to=1, other_gib=100, env=[], engine="vllm")
        self.faults, self.checks, self.section, self.tags = faults, [], "", []
        self.place, self.plain_env, self.done, self.deadline = 0, {}, 0, self

    # ---- the engine ----

    def start_program(self, managed, part):
        return self

    def ask_json(self, command, seconds):
        return {"s": 0.02, "complete": True, "differ": [], "same": "differ" not in self.faults}

    def tell(self, burst):
        self.looks = 0

    def has_answered(self):
        # Hold looks before and after each pause: the answer comes during the second one.
        self.looks += 1
        return "late" in self.faults or self.looks > 3

    def hear_json(self, burst, seconds):
        return {"s": 0.02, "complete": True, "differ": [2] if "differ" in self.faults and self.done > 1 else []}

    # ---- the machine ----

    def rest(self):
        return 0 if "short" in self.faults and self.done > 2 else 100

    def vramctl(self, verb, *arguments):
        failed = "lost" if verb == "resume" else "refused"
        if failed in self.faults:
            return 1, None, f"vramctl: {verb} failed", 0.0
        self.done += 1
        if verb == "move":
            self.place = int(arguments[-1])
        answer = {"processes": [{"report": {"ms": 12.0}}], "jobs": [{"ms": 13.0, "attempts": 1}], "stages": {"checkpoint": 5}}
        return 0, answer, "", 0.0

    def used_mib(self, below=None):
        return 900 if "stays" in self.faults else 0

    def smi(self, *asked):
        if "--query-gpu=memory.total" in asked:
            return "143771"
        used = [20000 if gpu == self.place or "stays" in self.faults else 4 for gpu in (0, 1)]
        return "\n".join(map(str, used))

    def command(self, *_, **__):
        return ("disturbed" in self.faults, "no memory", 0.0)

    def ask(self, what, seconds):
        return "no memory" if "disturbed" in self.faults else "verified 100 GiB"

    def say(self, text):
        pass

    log = say

    def hold_once(self):
        return self.hold_in_flight(self, self, "burst 1 600", random.Random(1))


class InTheMiddle(unittest.TestCase):
    PARTS = {"hold": Interrupted.hold_once, "suspend": Interrupted.suspend, "move": Interrupted.move}

    def failed(self, part, *faults):
        machine = Interrupted(*faults)
        measured = self.PARTS[part](machine)
        return [check["check"] for check in machine.checks if not check["ok"]], measured

    def test_each_part_pauses_as_often_as_told(self):
        for part, rounds, count in (("hold", "pauses", 3), ("suspend", "rounds", 6), ("move", "moves", 6)):
            with self.subTest(part):
                failed, measured = self.failed(part)
                self.assertEqual(failed, [])
                self.assertEqual(len(measured[rounds]), count)

    def test_an_answer_that_differs_fails_every_part(self):
        for part, checks in (("hold", 1), ("suspend", 2), ("move", 1)):
            with self.subTest(part):
                self.assertEqual(len(self.failed(part, "differ")[0]), checks)

    def test_a_transition_that_fails_is_a_failure_and_ends_the_part(self):
        for part in self.PARTS:
            with self.subTest(part):
                failed, measured = self.failed(part, "refused")
                self.assertIn("0 times", " ".join(failed))
        self.assertIn("0 times", " ".join(self.failed("suspend", "lost")[0]))
        with self.assertRaises(engines.Failed):
            self.failed("hold", "lost")

    def test_interruptions_after_the_answer_do_not_count(self):
        self.assertEqual(self.failed("hold")[1]["runs"], 3)  # of two pauses in each, one comes too late
        for part, checks in (("suspend", 2), ("move", 1)):
            with self.subTest(part):
                self.assertEqual(len(self.failed(part, "late")[0]), checks)

    def test_memory_that_stays_fails(self):
        self.assertEqual(self.failed("suspend", "stays")[0], ["nothing of it stays on the GPU"])
        self.assertEqual(len(self.failed("move", "stays")[0]), 1)

    def test_what_was_done_counts_if_the_time_is_too_short(self):
        failed, measured = self.failed("suspend", "short")
        self.assertEqual((len(measured["rounds"]), len(failed)), (2, 2), failed)

    def test_the_other_process_must_get_its_memory(self):
        self.assertEqual(len(self.failed("hold", "disturbed")[0]), 1)
        self.assertIn("another process uses 130 GiB of each GPU", self.failed("suspend", "disturbed")[0])


class Surveyed(Interrupted):
    """The part `features`, with an engine and a `vramctl` that do as they are told."""

    NAME = "gpu-engines"
    bin = pathlib.Path("/bin")
    version = "9"
    env = {}

    def __init__(self, folder, *faults, feature="lora"):
        super().__init__(*faults)
        vars(self.options).update(feature=feature, models=str(folder), cycles=2, fraction=0.6, model="")
        self.out, self.log_file, self.commands, self.variables = pathlib.Path(folder), None, [], []

    def launch(self, managed, part, name, *arguments, **variables):
        self.variables.append((arguments, variables))
        return self

    def hear_start(self, program):
        if "dies" in self.faults:
            raise engines.Failed("program.py has ended, with 1")

    def end_children(self):
        pass

    def ask_json(self, command, seconds):
        return {
            "s": 0.02,
            "complete": True,
            "differ": [1] if "unsteady" in self.faults or ("differ" in self.faults and self.done) else [],
        }

    def command(self, *words, **_):
        self.commands.append([str(word) for word in words])
        return ("disturbed" in self.faults and "other.py" in str(words), "no memory", 0.0)

    def smi(self, *asked):
        return "0" if "alone" in self.faults else "0\n1"


class Features(unittest.TestCase):
    def rows(self, *faults, **options):
        with tempfile.TemporaryDirectory() as folder:
            run = Surveyed(folder, *faults, **options)
            rows = survey.survey(run)["rows"]
            lines = (run.out / "features.jsonl").read_text().splitlines()
        self.assertEqual([json.loads(line) for line in lines], rows)
        return run, rows

    def results(self, *faults, **options):
        _, (row,) = self.rows(*faults, **options)
        return [row[step]["result"] for step in survey.STEPS]

    def test_every_feature_is_a_row_with_its_models_and_arguments(self):
        run, rows = self.rows(feature="all")
        self.assertEqual([row["feature"] for row in rows], list(features.FEATURES))
        self.assertEqual({row[step]["result"] for row in rows for step in survey.STEPS}, {"equal"})
        self.assertEqual({row["cycles"]["times"] for row in rows}, {2})
        self.assertEqual({row["suspend"]["times"] for row in rows}, {3})
        made = [command[-2] for command in run.commands if "models.py" in command[1]]
        self.assertEqual(set(made), set(models_needed()))
        self.assertEqual(run.variables[0], (("--feature", "lora", "--models", run.options.models), {}))
        self.assertIn({"CUDA_VISIBLE_DEVICES": "0,1"}, [variables for _, variables in run.variables])
        self.assertEqual([check["check"] for check in run.checks if not check["ok"]], [])

    def test_every_model_has_the_tokens_of_the_prompts(self):
        # The GPU faults at a token that a model does not have.
        tokens = {token for number in range(32) for token in program.prompt(number, 200)}
        self.assertLess(max(tokens), features.VOCABULARY)
        self.assertFalse(tokens & set(features.SPECIAL.values()))

    def test_what_went_wrong_is_told_apart(self):
        for faults, results in (
            (("differ",), ["unequal"] * 3),
            (("refused",), ["refused"] * 3),
            (("lost",), ["failed"] * 3),
            (("late",), ["equal", "failed", "failed"]),
            (("disturbed",), ["failed", "equal", "equal"]),
            (("dies",), ["failed"] * 3),
            (("unsteady",), ["failed"] * 3),
        ):
            with self.subTest(faults):
                self.assertEqual(self.results(*faults), results)
        self.assertEqual(self.results("alone", feature="data-parallel"), ["failed"] * 3)

    def test_an_engine_that_is_disturbed_by_a_refusal_is_unequal(self):
        run, (row,) = self.rows("refused", "differ")
        self.assertEqual(row["hold"]["result"], "refused")
        run.done = 2
        self.assertEqual(survey.outcome(lambda: survey.hold(run, run, "burst 8 300", 0.02))["result"], "unequal")

    def test_only_a_refusal_is_no_failed_check(self):
        for fault, failed in (("refused", 0), ("differ", 3), ("lost", 3)):
            run, _ = self.rows(fault)
            self.assertEqual(len([check for check in run.checks if not check["ok"]]), failed, fault)

    def test_the_table_has_each_row_with_its_reason(self):
        _, rows = self.rows("refused")
        about = {"engine": "vLLM", "version": "9", "machine": {}, "started": "x", "checks": []}
        text = report.markdown({"vllm/features": {**about, "rows": rows}})
        self.assertIn(
            "| vLLM 9 | lora | refused | refused | refused | vramctl pause: exit code 1: vramctl: pause failed; vramctl suspend:",
            text,
        )


def models_needed():
    return [model for name in features.FEATURES for model in survey.models_for(name)]


class Script(unittest.TestCase):
    """The full script, in a folder with what it needs."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.write(
            "bin/nvidia-smi",
            """\
            #!/bin/sh
            case $* in
            -L) echo 'GPU 0: pretended' ;;
            --id=0*memory*) echo 900 ;;
            *memory*) echo 700; echo 2048 ;;
            *) echo pretended ;;
            esac
            """,
        )
        self.write("bin/libvramctl.so", "")
        self.write(
            "bin/vramctl",
            f"""\
            #!{sys.executable}
            import json, os, sys
            with open({str(self.folder / "asked")!r}, "a") as log: print(*sys.argv[1:], file=log)
            what = sys.argv[1]
            if what == "run":
                os.environ["LD_PRELOAD"] = ""
                command = sys.argv[sys.argv.index("--") + 1:]
                os.execvp(command[0], command)
            if what == "--version": print("vramctl 9.9.9")
            if "gpus" in sys.argv:
                shares = lambda mib: [dict(what="tag", of="weights", bytes=mib - 50 << 20), dict(what="unexplained", bytes=50 << 20)]
                print(json.dumps({{"gpus": [{{"index": n, "shares": shares(mib)}} for n, mib in enumerate((700, 2048))]}}))
            elif what == "status":
                tags = [{{"tag": tag, "bytes": 1 << 30}} for tag in ("cuda_graph", "default", "kv_cache", "weights")]
                print(json.dumps({{"processes": [{{"tags": tags}}]}}))
            if what in ("pause", "resume"): print(json.dumps({{"processes": [{{"report": {{"ms": 123.4}}}}]}}))
            """,
        )
        self.write(
            "engine/vllm/__init__.py",
            """\
            import json, os, sys
            from types import SimpleNamespace as S
            __version__ = "0.26.0"
            SamplingParams = S
            print("a line of the engine's own")
            os.chdir("/")
            class LLM:
                def __init__(self, model, **settings):
                    assert model == "/model" and "enable_sleep_mode" not in settings
                    with open(os.environ["SETTINGS"], "a") as file:
                        print(json.dumps({name: value for name, value in os.environ.items() if name.startswith("VRAMCTL_")}), file=file)
                    # The part `hold`.
                    if os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] == "0":
                        sys.exit("".join(f"vramctl[7]: info: line {number}\\n" for number in range(20)))
                    assert settings["tensor_parallel_size"] == int(os.environ.get("GPUS", 1))
                def reset_prefix_cache(self): pass
                def generate(self, prompts, parameters, use_tqdm):
                    chosen = [{7: S(logprob=-1.5)}] * parameters.max_tokens
                    return [S(outputs=[S(token_ids=[7] * parameters.max_tokens, logprobs=chosen)]) for _ in prompts]
            """,
        )
        self.write("engine/vllm-0.26.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: vllm\nVersion: 0.26.0\n")
        self.write("engine/torch.py", "__version__ = '2.11.0'")
        # The other process must not see the engine's packages; it gets its own torch here.
        self.write("other/torch.py", PRETENDED_TORCH)

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(textwrap.dedent(text))
        path.chmod(0o755)

    def command(self, *arguments, **variables):
        env = {name: value for name, value in os.environ.items() if not name.startswith(("LD_PRELOAD", "VRAMCTL_"))}
        env.update(
            PATH=f"{self.folder}/bin:{env['PATH']}",
            PYTHONPATH=f"{self.folder}/other",
            OTHERS=str(self.folder / "others"),
            SETTINGS=str(self.folder / "settings"),
            TMPDIR=str(self.folder),
            **variables,
        )
        command = [SCRIPTS / "gpu-engines", "--engine", "vllm", "--out", self.folder / "out", *arguments]
        return [str(part) for part in command], env

    def gpu_engines(self, *arguments, cwd=None, **variables):
        command, env = self.command(*arguments, **variables)
        return subprocess.run(command, env=env, cwd=cwd, capture_output=True, text=True, timeout=600)

    def places(self, folder=None):
        folder = self.folder if folder is None else folder
        (self.folder / "package").mkdir(exist_ok=True)
        (self.folder / "package/__init__.py").touch()
        places = {"--engine-dir": "engine", "--bin": "bin", "--python": "package"}
        return ["--model", "/model", *(part for option, place in places.items() for part in (option, folder / place))]


class Running(Script):
    """With fakes."""

    def test_all_parts(self):
        done = self.gpu_engines(*self.places(), "--cycles", 2, "--other-gib", 3, "--part", "outside,tpot")
        result = json.loads((self.folder / "out/gpu-engines.json").read_text())["parts"]
        self.assertEqual(sorted(result), ["vllm/outside", "vllm/tpot"], done.stdout + done.stderr)
        self.assertEqual([check for check in result["vllm/outside"]["checks"] if not check["ok"]], [], done.stdout)
        outside = result["vllm/outside"]
        self.assertEqual(outside["version"], "0.26.0")
        self.assertEqual(
            [(cycle["pause_ms"], cycle["same"], cycle["other_gib"]) for cycle in outside["cycles"]], [(123.4, True, 3)] * 2
        )
        self.assertEqual(len(result["vllm/tpot"]["ms"]["with"]), 4)
        asked = (self.folder / "asked").read_text()
        self.assertIn("pause cuda_graph kv_cache weights --name gpu-engines --json", asked)
        text = (self.folder / "out/gpu-engines.md").read_text()
        self.assertRegex(text, r"\| vllm/tpot \| time per output token within 1% \| .* \| (holds|\*\*missed\*\*) \|")
        self.assertIn("| 1 | 0.12 s | 0.12 s | 0.88 GiB | 3 GiB | yes |", text)
        self.assertIn("pretended", text)

        # Parts of several runs merge into one report.
        first = self.folder / "out/gpu-engines.json"
        again = self.gpu_engines(*self.places(), "--part", "hold", "--join", first, "--out", self.folder / "second")
        joined = json.loads((self.folder / "second/gpu-engines.json").read_text())["parts"]
        self.assertEqual(sorted(joined), ["vllm/hold", "vllm/outside", "vllm/tpot"], again.stdout + again.stderr)

    def test_several_gpus(self):
        """The script checks all of them, and the other process uses all of them."""
        arguments = ("--cycles", 1, "--other-gib", 3, "--part", "outside", "--gpus", 2)
        done = self.gpu_engines(*self.places(), *arguments, GPUS="2")
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertEqual((self.folder / "others").read_text().split(), ["cuda:0"] * 3 + ["cuda:1"] * 3)
        self.assertIn("| 1 | 0.12 s | 0.12 s | 2.00 GiB | 3 GiB | yes |", done.stdout)
        self.assertIn("2 x pretended", done.stdout)

    def test_what_the_engines_are_started_with(self):
        options = ("--cycles", 1, "--other-gib", 1, "--part", "outside", "--env", "VRAMCTL_HOST_CAP=20G")
        done = self.gpu_engines(*self.places(), *options, VRAMCTL_HOST_KEEP="always")
        self.assertEqual(done.stderr.count("VRAMCTL_HOST_KEEP is not passed on to the engines"), 1, done.stderr)
        (settings,) = [json.loads(line) for line in (self.folder / "settings").read_text().splitlines()]
        self.assertEqual([settings.get(f"VRAMCTL_{name}") for name in ("HOST_CAP", "LOG", "HOST_KEEP")], ["20G", "info", None])
        self.assertIn("`VRAMCTL_HOST_CAP=20G vramctl run -- …`", (self.folder / "out/gpu-engines.md").read_text())

    def test_places_may_be_relative(self):
        """Relative to the caller's directory, not the engine's."""
        options = ("--cycles", 1, "--other-gib", 1, "--part", "outside")
        done = self.gpu_engines(*self.places(pathlib.Path()), *options, cwd=self.folder)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_an_engine_ends_with_the_measurement(self):
        """Whether by its own limit, an outer one or Ctrl-C: an engine left behind would hold the GPU's memory."""
        pid = self.folder / "pid"
        self.write(
            "engine/vllm/__init__.py",
            "import os, subprocess, time\nchild = subprocess.Popen(['sleep', '600'])\n"
            f"open({str(pid)!r} + '.new', 'w').write(str(child.pid))\nos.rename({str(pid)!r} + '.new', {str(pid)!r})\n"
            "time.sleep(600)",
        )
        # A busy machine may take longer than the first limits until the engine has started.
        for limit in ("20", "60", "180"):
            done = self.gpu_engines(*self.places(), "--part", "outside", "--limit", limit)
            self.assertNotEqual(done.returncode, 0)
            if pid.exists():
                break
        self.assertFalse(alive(int(pid.read_text())))
        for number in (signal.SIGTERM, signal.SIGINT):
            pid.unlink()
            command, env = self.command(*self.places(), "--part", "outside")
            # A background job that runs these tests has SIGINT ignored, and a child inherits that.
            command = [
                sys.executable,
                "-c",
                "import os, signal, sys; signal.signal(signal.SIGINT, signal.SIG_DFL); os.execv(sys.argv[1], sys.argv[1:])",
                *command,
            ]
            # Signal the whole group, as `timeout` and a terminal do.
            with subprocess.Popen(
                command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
            ) as run:
                support.eventually("it writes its pid", pid.exists)
                os.killpg(run.pid, number)
            support.eventually("it has ended", lambda: not alive(int(pid.read_text())))

    def test_discarding_tells_the_engine_first(self):
        done = self.gpu_engines(
            *self.places(), "--cycles", 1, "--other-gib", 1, "--part", "outside", "--discard"
        )
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("pause kv_cache --discard --force", (self.folder / "asked").read_text())

    def test_a_failed_part_is_told_with_the_library_s_last_lines_and_the_others_run(self):
        done = self.gpu_engines(*self.places(), "--cycles", 1, "--other-gib", 1, "--part", "hold,outside")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertIn("gpu-engines FAILED", done.stdout)
        text = (self.folder / "out/gpu-engines.md").read_text()
        self.assertIn("- vllm/hold: runs to its end: ", text)
        self.assertIn("vLLM 0.26.0 from outside", text)
        self.assertIn("  vramctl[7]: info: line 19\n", done.stdout)
        self.assertNotIn("info: line 1\n", done.stdout, "only the last ones")
        self.assertIn("info: line 1\n", (self.folder / "out/gpu-engines.log").read_text())

    def test_help_and_a_dry_run_need_nothing(self):
        self.assertIn("--dry-run", self.gpu_engines("--help").stdout)
        done = self.gpu_engines("--dry-run", "--part", "outside,many,tpot")
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (
            "run --name gpu-engines -- ",
            "pause cuda_graph kv_cache weights",
            "env VRAMCTL_RETAIN=weights",
            "models.py llama ",
        ):
            self.assertIn(line, done.stdout)

    def test_requests_in_flight_keep_a_kv_cache_that_sglang_would_drop(self):
        planned = {
            engine: self.gpu_engines("--dry-run", "--part", "long", "--engine", engine).stdout for engine in ("vllm", "sglang")
        }
        self.assertIn("suspend gpu-engines --json", planned["vllm"])
        for line in ("pause --force --backup host --name gpu-engines", "suspend gpu-engines --backup host --json"):
            self.assertIn(line, planned["sglang"])

    def test_a_dry_run_of_a_feature_says_how_its_models_are_made(self):
        done = self.gpu_engines("--dry-run", "--part", "features", "--feature", "speculative,data-parallel", "--models", "/m")
        self.assertEqual(done.returncode, 0, done.stderr)
        for line in (
            "models.py draft /m\n",
            "--feature speculative --models /m\n",
            "env CUDA_VISIBLE_DEVICES=0,1 ",
            "pause gpu-engines --force --registered keep\n",
            "suspend gpu-engines\n",
        ):
            self.assertIn(line, done.stdout)
        self.assertNotIn("models.py llama", done.stdout.partition("# features")[0])

    def test_what_is_missing_is_said(self):
        for arguments, text in [
            (["--part", "all"], "unknown part all"),
            (["--part", "features", "--feature", "lora,magic", "--dry-run"], "magic is none of lora, speculative"),
            (["--fraction", "2"], "not a share of the GPU"),
            (["--cycles"], "argument --cycles: expected one argument"),
            (["--env", "VRAMCTL_LOG"], "not NAME=VALUE: VRAMCTL_LOG"),
        ]:
            done = self.gpu_engines(*arguments)
            self.assertNotEqual(done.returncode, 0)
            self.assertIn(text, done.stderr)


#: An engine with contents: what it answers depends on every page of its weights, and on the KV cache that a request has written.
STAND_IN = """
    import contextlib, sys, time, zlib
    from types import SimpleNamespace as S
    sys.path[:0] = [{tests!r}, {package!r}]
    import vramctl
    from support import Cuda, MIB, pattern
    from vramctl import engines
    __version__ = "0.26.0"
    SamplingParams = S
    WEIGHTS = 8 * MIB
    def region(tag):
        return vramctl.region(tag) if vramctl.is_preloaded() else contextlib.nullcontext()
    class LLM:
        def __init__(self, model, kv_cache_memory_bytes=64 * MIB, enable_sleep_mode=False, **settings):
            self.cuda, self.bytes = Cuda(), {{"weights": WEIGHTS, "kv_cache": kv_cache_memory_bytes >> 6}}
            self.at = {{}}
            self.wake_up(self.bytes)
            self.load()
            engines.announce("vllm", tags_cache=True)
        def load(self):
            self.cuda.write(self.at["weights"], pattern(3, WEIGHTS))
        def wake_up(self, tags):
            for tag in tags:
                with region(tag):
                    self.at[tag] = self.cuda.malloc(self.bytes[tag])
            if getattr(self, "kept", None) and "weights" in tags:
                self.cuda.write(self.at["weights"], self.kept)
        def sleep(self, level):
            self.kept = self.cuda.read(self.at["weights"], WEIGHTS) if level == 1 else None
            for address in self.at.values():
                self.cuda.free(address)
        def collective_rpc(self, what):
            assert what == "reload_weights"
            self.load()
        def reset_prefix_cache(self): pass
        def generate(self, prompts, parameters, use_tqdm):
            model = zlib.crc32(self.cuda.read(self.at["weights"], WEIGHTS))
            done = [([], []) for _ in prompts]
            for number, prompt in enumerate(prompts):
                start = zlib.crc32(bytes(str(prompt), "ascii"), model).to_bytes(4, "little")
                self.cuda.write(self.at["kv_cache"] + 64 * number, start)
            for _ in range(parameters.max_tokens):
                time.sleep(0.001)
                for number, (tokens, chosen) in enumerate(done):
                    seen = self.cuda.read(self.at["kv_cache"] + 64 * number, 4)
                    page = self.cuda.read(self.at["weights"] + len(tokens) % 2048 * 4096, 16)
                    token = zlib.crc32(page, zlib.crc32(seen))
                    self.cuda.write(self.at["kv_cache"] + 64 * number, token.to_bytes(4, "little"))
                    tokens.append(token)
                    chosen.append({{token: S(logprob=token / -1e9)}})
            return [S(outputs=[S(token_ids=tokens, logprobs=chosen)]) for tokens, chosen in done]
"""


class TakingTurns(Script):
    """The parts `many` and `alternatives` with the real library and driver calls, on the simulated GPU. Only the engine is a stand-in."""

    def setUp(self):
        super().setUp()
        here = ROOT / "python" / "tests"
        self.write("engine/vllm/__init__.py", STAND_IN.format(tests=str(here), package=str(here.parent)))
        self.write(
            "bin/nvidia-smi",
            f"""\
            #!{sys.executable}
            import json, subprocess, sys
            what = " ".join(sys.argv)
            device = json.loads(subprocess.check_output(["simgpu-smi", "--json"]))["devices"][0]
            memory = [device[name] >> 20 for name in ("used", "total") if "memory." + name in what]
            print(memory[0] if memory else "GPU 0: simulated")
            """,
        )
        self.built = pathlib.Path(support.VRAMCTL).resolve().parent

    def measure(self, part, *more):
        places = [*self.places(), "--bin", self.built, "--python", ROOT / "python/vramctl"]
        settings = {"SIMGPU_CONTEXT_BYTES": str(100 << 20)}
        done = self.gpu_engines(*places, "--part", part, "--fraction", "0.25", "--model", "/model", *more, **settings)
        text = (self.folder / "out/gpu-engines.json").read_text()
        return done, json.loads(text)["parts"][f"vllm/{part}"]

    def test_engines_take_turns_and_alternatives_are_measured(self):
        done, alternatives = self.measure("alternatives")
        self.assertEqual([one for one in alternatives["checks"] if not one["ok"]], [], done.stdout + done.stderr)
        ways = {one["way"]: one for one in alternatives["ways"]}
        self.assertEqual(len(ways), 4, ways)
        self.assertTrue(all(one["same"] for one in ways.values()), ways)
        self.assertEqual(ways["the driver's checkpoint, without the library"]["left_mib"], 0)
        self.assertEqual(ways["cold start"]["left_mib"], 0)
        self.assertGreater(ways["vLLM's sleep mode, level 1"]["left_mib"], 0, "its context")

        first = self.folder / "out/gpu-engines.json"
        first.rename(self.folder / "first.json")
        done, many = self.measure("many", "--engines", "3", "--switches", "8", "--join", self.folder / "first.json")
        # Its speed means nothing here.
        timed = ("times as fast", "within 3 s")
        missed = [one["check"] for one in many["checks"] if not one["ok"] and not any(text in one["check"] for text in timed)]
        self.assertEqual(missed, [], done.stdout + done.stderr)
        self.assertEqual((len(many["turns"]), len(many["starts"]), len(many["paused"])), (10, 3, 3))
        self.assertEqual([one["from"] for one in many["turns"]].count(None), 2)
        self.assertEqual(max(many["left_mib"]), 0, "nothing of six engines is on the GPU")
        checked = " ".join(one["check"] for one in many["checks"])
        for text in ("in the middle of requests", "times as fast as cold start", "times as fast as the driver's checkpoint"):
            self.assertIn(text, checked)
        self.assertNotIn("times as fast as vLLM", checked, "which does not free as much")
        files = [self.folder / "out/gpu-engines.json", self.folder / "first.json"]
        joined = subprocess.run([sys.executable, SCRIPTS / "gpu-engines.d/report.py", *files], capture_output=True, text=True)
        self.assertIn(": first token of a suspended engine within 3 s", joined.stdout, joined.stderr)
        table = [line for line in joined.stdout.splitlines() if line.startswith("| ")]
        for way in ("vramctl suspend", "vramctl pause", *ways):
            self.assertTrue([line for line in table if line.startswith(f"| {way}")], f"{way}: {table}")

    def test_a_long_run_is_continued_and_a_wrong_token_is_noticed(self):
        first = self.folder / "first.json"
        done, long = self.measure("long", "--cycles", "3", "--pauses", "4", "--other-gib", "1", "--join", first)
        self.assertIn("first.json, which does not exist", done.stdout)
        self.assertEqual([one for one in long["checks"] if not one["ok"]], [], done.stdout + done.stderr)
        (run,) = long["runs"]
        self.assertEqual((run["cycles"] >= 3, run["pauses"] >= 4, run["wrong"]), (True, True, []), run)
        self.assertEqual(len(run["samples"]), run["cycles"])
        for name in (
            "device while asleep, bytes",
            "gpu-engines: pinned by the library, bytes",
            "gpu-engines: descriptors",
            "sleep, seconds",
        ):
            self.assertIn(name, run["samples"][0])
        self.assertLess(run["samples"][0]["device while asleep, bytes"], run["samples"][0]["device bytes"])

        self.assertIn(" tokens and their log-probabilities were compared: none differs.", done.stdout)
        self.assertIn("| gpu-engines: threads |", done.stdout)

        # The rest, in another run, of an engine whose weights each pause drops.
        (self.folder / "out/gpu-engines.json").rename(first)
        goal = ("--cycles", "900", "--pauses", "1", "--other-gib", "1", "--join", first)
        done, long = self.measure("long", *goal, "--env", "VRAMCTL_BACKUP=weights=discard")
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertEqual(long["runs"][0], run)
        self.assertTrue(long["runs"][1]["wrong"], done.stdout)
        self.assertLess(long["runs"][1]["cycles"], 9, "it ends with the first wrong token")
        self.assertRegex(done.stdout, r"in 2 runs\. \d+ tokens and their log-probabilities were compared: \*\*WRONG\*\*: cycle")

    def test_the_same_cycles_without_the_library(self):
        done, alone = self.measure("long-alone", "--cycles", "3")
        self.assertEqual([one for one in alone["checks"] if not one["ok"]], [], done.stdout + done.stderr)
        (run,) = alone["runs"]
        self.assertEqual((run["cycles"], run["pauses"], run["suspends"], run["wrong"]), (3, 0, [], []), run)
        self.assertIn("gpu-engines: Anonymous bytes", run["samples"][0])
        self.assertIn("3 times asleep and awake again by its own API, 0 times paused", done.stdout)

    def test_a_feature_is_paused_and_suspended(self):
        (self.folder / "models/llama").mkdir(parents=True)
        places = ["--feature", "fp8", "--models", self.folder / "models", "--cycles", "1", "--pauses", "2", "--other-gib", "1"]
        for settings, results in (
            ((), {"equal"}),
            # A pause then drops the weights, so the answers differ.
            (("--env", "VRAMCTL_BACKUP=weights=discard,kv_cache=discard"), {"unequal"}),
        ):
            done, measured = self.measure("features", *places, *settings)
            (row,) = measured["rows"]
            self.assertEqual({row[step]["result"] for step in survey.STEPS}, results, done.stdout + done.stderr)
            self.assertIn(json.dumps(row), done.stdout)
        self.assertEqual(len((self.folder / "out/features.jsonl").read_text().splitlines()), 2)

    def test_contents_that_are_lost_are_noticed(self):
        """If a pause drops the weights, the engines' answers differ."""
        done, many = self.measure(
            "many", "--engines", "2", "--switches", "4", "--env", "VRAMCTL_BACKUP=weights=discard,kv_cache=discard"
        )
        self.assertEqual(done.returncode, 1, done.stdout)
        self.assertTrue([one for one in many["checks"] if "same tokens" in one["check"] and not one["ok"]], done.stdout)


def alive(pid):
    """Whether a process is running; a zombie is not."""
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


PRETENDED_TORCH = """\
    import os
    int64 = None
    class Tensor:
        def add_(self, _): return self
        sub_ = add_
    def arange(*_, device, **__):
        with open(os.environ["OTHERS"], "a") as log: print(device, file=log)
        return Tensor()
    def equal(*_): return True
    def zeros(*_, device): pass
    def device(*words): return "%s:%d" % words
    OutOfMemoryError = MemoryError
    class cuda:
        synchronize = empty_cache = staticmethod(lambda *_: None)
"""


if __name__ == "__main__":
    unittest.main()
