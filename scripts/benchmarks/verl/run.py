"""verl's training step: plain, under `vramctl run`, and with the trainer's memory managed, too.

Runs verl's GRPO training of a small model on one GPU, the same job in each mode, one after the other:

  a  plain verl
  b  the same under `vramctl run`: vLLM's sleep mode runs on the library; verl's trainer offloads by
     itself
  c  the same, and the trainer's offload is a pause
     (actor_rollout_ref.model.external_lib=vramctl.frameworks.verl)
  d  as b, on a Ray cluster that was started under `vramctl run`; after the warm-up, the job is paused
     as a whole and from outside, through vramctl.ray, at random moments
  e  the same for c

and writes what verl's own metrics say by phase; of each phase and transition, as timed inside verl's
processes, its seconds, the peak of the GPU's memory, the ledger and the job's host memory at its end;
and whether rewards, losses and answers are equal. Of d and e also each pause: the job's phase, the
seconds, what was left on the GPU.

With --fit, it looks for the highest gpu_memory_utilization, micro batch and response length that fit in
each mode: by bisection over runs of two steps, of which each fits, runs out of memory (where is told),
or fails otherwise.

The first import of verl, vLLM and Ray takes minutes; a shared bytecode cache (in /tmp) and the model are
made before the first mode, in parallel. After that, a mode starts in three to four minutes, because nine
processes import one after another. A mode that would not end within the limit is not started; --join puts
it into the same table later, and continues --fit. Exits with 0 if all modes have run all steps, and d and
e have been paused as often as they should, or if all that --fit looks for is found. To see whether a
pause changes something: --deterministic --modes c,c,e.
"""

import collections
import contextlib
import json
import os
import pathlib
import random
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid

from benchmarks.verl import fit, report, watch
from measure.setup import ROOT

HERE = pathlib.Path(__file__).resolve().parent

#: vLLM's compilation settings.
QUICK = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 8, 32, 64, 128]}

#: The modes under `vramctl run`, those whose trainer is managed, too, and those that are paused from outside.
MANAGED, TRAINER, OUTSIDE = "bcde", "ce", "de"

#: The part of the remaining steps in which pauses from outside come.
MOMENTS = 0.8

#: Seconds that a job gets to end, with --fit, after one of its processes has failed.
AFTER_A_FAILURE = 30

#: Seconds before the limit at which a run is ended.
TO_END = 10

def options(add):
    add("--verl-dir", default="", metavar="DIR", help="verl's unpacked packages, put on PYTHONPATH (not needed if verl is installed)")
    add("--vllm-dir", default="", metavar="DIR", help="vLLM's, put behind verl's")
    add("--job", required=True, metavar="FILE", help="the script that makes model and data and starts verl with the overrides it is given")
    add("--modes", default="a,b,c", metavar="LIST", help="in this order; one may be repeated, as in a,b,c,a (a,b,c)")
    add("--pauses", type=int, default=5, metavar="N", help="in modes d and e: how often to pause the job from outside (5)")
    add("--suspends", type=int, default=0, metavar="N", help="and how often to suspend it (0)")
    add("--seed", type=int, default=random.randrange(1 << 16), metavar="N", help="of the moments at which that comes (random, and printed)")
    add("--steps", type=int, metavar="N", help="training steps of each mode (5; with --fit 2)")
    warm = "first steps that the medians leave out: in mode c, they fill the regions; in d and e, the last tells how long a step takes (2)"
    add("--warm", type=int, default=2, metavar="N", help=warm)
    add("--layers", type=int, default=16, metavar="N", help="of the model (16; with --hidden 2048 it has 0.8 billion parameters)")
    add("--hidden", type=int, default=2048, metavar="N", help="its width (2048; 24 layers of 2560 have 1.9 billion parameters)")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="a further override of verl's configuration; may be repeated")
    add("--env", action="append", default=[], metavar="NAME=VALUE", help="an environment variable of all modes; may be repeated")
    add("--quick", action="store_true", help="let vLLM start sooner: without torch.compile and with few CUDA graphs, in all modes")
    add("--deterministic", action="store_true", help="verl's and vLLM's deterministic settings, so that answers can be compared")
    add("--gpus", type=int, default=1, metavar="N", help="FSDP over N GPUs and vLLM with tensor parallelism N (1)")
    add("--python", default=str(ROOT / "python" / "vramctl"), metavar="DIR", help="the Python package (python/vramctl of this checkout)")
    add("--join", action="append", default=[], metavar="FILE", help="include an earlier run's verl.json, if there is one")
    add("--work", default="/tmp/vramctl-bench-verl", metavar="DIR", help="for the model, the data and the bytecode cache, kept")
    what = ", ".join(fit.VALUES)
    add("--fit", nargs="?", const=",".join(fit.VALUES), default="", metavar="LIST", help=f"look for what fits of LIST ({what})")
    add("--values", action="append", default=[], metavar="SETTING=V,V,…", help="the values that --fit tries of a setting, lowest first")
    add("--run-limit", type=float, default=300, metavar="S", help="with --fit: end a run after S seconds (300)")
    add("--dry-run", action="store_true", help="print the commands and do nothing")


def complete(chosen):
    """The options that depend on others."""

    def refuse(why):
        print(f"bench: {why}", file=sys.stderr)
        raise SystemExit(2)

    chosen.modes = chosen.modes.split(",")
    if not set(chosen.modes) <= set(report.TITLES):
        refuse(f"--modes: {', '.join(report.TITLES)}")
    chosen.fit = list(filter(None, chosen.fit.split(",")))
    if unknown := set(chosen.fit) - set(fit.VALUES):
        refuse(f"--fit: {', '.join(fit.VALUES)}, not {', '.join(unknown)}")
    chosen.steps = chosen.steps or (2 if chosen.fit else 5)
    if chosen.fit:
        chosen.warm = 0
    if chosen.steps <= chosen.warm or chosen.warm < 0:
        refuse("--steps must be more than --warm")
    if set(chosen.modes) & set(OUTSIDE) and (chosen.fit or chosen.warm < 2):
        # The first step takes four times as long as the later ones: the job would end before most of the moments.
        refuse("modes d and e need a --warm of 2 or more, and are not for --fit")
    try:
        given = {name: list(map(json.loads, values.split(","))) for name, _, values in (one.partition("=") for one in chosen.values)}
        chosen.values = {**fit.VALUES, **given}
    except ValueError:
        refuse("--values: numbers are needed, as in micro_batch=4,8,16")
    for one in (*chosen.set, *chosen.env):
        if "=" not in one:
            refuse(f"not NAME=VALUE: {one}")
    for name in os.environ:
        if name.startswith("VRAMCTL_") and name != "VRAMCTL_DIR":
            print(f"bench: {name} is not passed on; use --env", file=sys.stderr)
    chosen.bin = chosen.bin or str(pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / "release")
    # The job changes its directory.
    for name in ("verl_dir", "vllm_dir", "job", "bin", "python", "out", "work"):
        given = getattr(chosen, name)
        setattr(chosen, name, os.path.abspath(given) if given else "")


class Missing(Exception):
    pass


def machine(gpus):
    try:
        names = subprocess.run(
            ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"], capture_output=True, text=True, check=True
        ).stdout.splitlines()
    except (OSError, subprocess.CalledProcessError):
        names = []
    gpu = f"{gpus} of {len(names)}: {names[0]}" if names else "no GPU"
    return f"{gpu}; {os.cpu_count()} cores"


# ---- the runs ----


class Bench:
    def __init__(self, chosen):
        self.options, self.began, self.mark = chosen, time.monotonic(), uuid.uuid4().hex
        self.out, self.work = pathlib.Path(chosen.out), pathlib.Path(chosen.work)
        self.job = self.work / f"job-{chosen.layers}-{chosen.hidden}"
        self.took = []
        #: Of the Ray cluster, in modes d and e: each run takes a free port. And Ray's folder: elsewhere it would find who ran before, and join it.
        self.address, self.ray = "127.0.0.1:6379", ""

    def left(self):
        return self.options.limit - (time.monotonic() - self.began)

    def say(self, text):
        print(f"[{time.monotonic() - self.began:5.0f} s] {text}", flush=True)

    def env(self, label, place):
        chosen = self.options
        env = {
            name: value for name, value in os.environ.items() if name != "LD_PRELOAD" and (not name.startswith("VRAMCTL_") or name == "VRAMCTL_DIR")
        }
        # verl_timers.py is on the path, and this folder's other modules with it: their names must not be those of anybody's packages.
        paths = [chosen.verl_dir, chosen.vllm_dir, str(place / "modules"), env.get("PYTHONPATH", "")]
        env.update(
            JOB=str(self.job),
            LAYERS=str(chosen.layers),
            HIDDEN=str(chosen.hidden),
            PYTHONPATH=os.pathsep.join(path for path in paths if path),
            PYTHONPYCACHEPREFIX=str(self.work / "pycache"),
            PYTHONUNBUFFERED="1",
            RAY_DEDUP_LOGS="0",
            # Else Ray would leave a token in the home folder, which later clusters ask for.
            RAY_AUTH_MODE="token",
            RAY_AUTH_TOKEN=self.mark,
            VERL_FILE_LOGGER_PATH=str(place / "metrics.jsonl"),
            VERL_USE_EXTERNAL_MODULES="verl_timers",
            BENCH_VERL_EVENTS=str(place / "events"),
            BENCH_VERL_PACKAGE=chosen.python,
            BENCH_VERL_RUN=self.mark,
        )
        if self.ray:
            env["RAY_TMPDIR"] = self.ray
        if label[0] in MANAGED:
            env.update(VRAMCTL_LOG="info", VRAMCTL_LIB=str(pathlib.Path(chosen.bin) / "libvramctl.so"), VRAMCTL_PYTHON=chosen.python)
        if label[0] in OUTSIDE:
            # Of the cluster and its clients, which find the package here.
            env["RAY_ADDRESS"] = self.address
            env["PYTHONPATH"] += os.pathsep + str(pathlib.Path(chosen.python).parent)
            if chosen.deterministic:
                # What verl gives to a cluster that it starts itself.
                env.update(VERL_FULL_DETERMINISM="1", VLLM_BATCH_INVARIANT="1", PYTHONHASHSEED="42")
        env.update(one.split("=", 1) for one in chosen.env)
        return env

    def overrides(self, label, place, more=()):
        chosen, actor = self.options, "actor_rollout_ref"
        found = [
            f"trainer.total_training_steps={chosen.steps}",
            "trainer.logger=[console,file]",
            f"trainer.rollout_data_dir={place / 'answers'}",
        ]
        if chosen.gpus > 1:
            found += [f"trainer.n_gpus_per_node={chosen.gpus}", f"{actor}.rollout.tensor_model_parallel_size={chosen.gpus}"]
            found.append(f"ray_kwargs.ray_init.num_cpus={self.cpus()}")
        if chosen.quick:
            found.append(f"+{actor}.rollout.engine_kwargs.vllm.compilation_config='{json.dumps(QUICK)}'")
        if chosen.deterministic:
            found += [f"{actor}.rollout.full_determinism=True", f"{actor}.actor.fsdp_config.full_determinism=True"]
        if label[0] in TRAINER:
            found.append(f"{actor}.model.external_lib=vramctl.frameworks.verl")
        if label[0] in OUTSIDE:
            # A client of a cluster must not say how many there are.
            found.append("ray_kwargs.ray_init.num_cpus=null")
        return [*found, *chosen.set, *more]

    def command(self, label, place, more=()):
        under = self.under() if label[0] in MANAGED and label[0] not in OUTSIDE else []
        return [*under, sys.executable, self.options.job, *self.overrides(label, place, more)]

    def under(self):
        return [str(pathlib.Path(self.options.bin) / "vramctl"), "run", "--no-tag", "--name", "verl", "--"]

    def cluster(self):
        """Starts Ray as docs/many-nodes.md says, with the variables that the job sets: all that Ray starts has the library and the name."""
        gpus, port = self.options.gpus, self.address.rpartition(":")[2]
        ray = ["-m", "ray.scripts.scripts", "start", "--head", "--node-ip-address=127.0.0.1", f"--port={port}", "--disable-usage-stats"]
        more = ["--include-dashboard=false", f"--num-gpus={gpus}", f"--num-cpus={self.cpus()}"]
        return [*self.under(), *self.with_job("import os; os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"), *ray, *more]

    def cpus(self):
        """What Ray is told to have. With too few, verl's workers wait for them without end."""
        return 12 + 6 * self.options.gpus

    def with_job(self, text):
        job = pathlib.Path(self.options.job)
        return [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(job.parent)!r}); import {job.stem} as job; {text}"]

    def plan(self):
        lines = ["# first: " + ", ".join(" ".join(map(shlex.quote, command)) for command in self.preparations())]
        for label in self.labels():
            place = self.out / label
            env = self.env(label, place)
            names = [name for name in env if env[name] != os.environ.get(name)]
            lines.append(f"# {report.title(label)}")
            lines += [f"{name}={shlex.quote(env[name])} \\" for name in sorted(names)]
            lines += [shlex.join(self.cluster()), "# then, with the same variables:"] if label[0] in OUTSIDE else []
            lines.append(shlex.join(self.command(label, place)))
            for setting in self.options.fit:
                values = self.options.values[setting]
                lines.append(f"# … with {' '.join(fit.overrides(setting, fit.next_value(values, [])))} first, of {values}")
        return "\n".join(lines)

    def labels(self):
        taken = []
        for letter in self.options.modes:
            taken.append(report.free_label(letter, taken))
        return taken

    def check(self):
        for path, what in (
            (self.options.job, "the job (--job)"),
            (self.options.python + "/_imports.py", "the Python package (--python)"),
            *[(pathlib.Path(self.options.bin) / name, f"{name} (--bin)") for name in ("vramctl", "libvramctl.so")],
        ):
            if not pathlib.Path(path).exists():
                raise Missing(f"{path} is missing: {what}")

    def preparations(self):
        """Done side by side before the first mode: imports, for the bytecode cache, and the model."""
        modules = "torch, transformers, ray, verl.trainer.main_ppo, verl.workers.engine_workers, vllm.entrypoints.cli.serve, vllm.v1.worker.gpu_worker"
        return [[sys.executable, "-c", f"import {modules}"], self.with_job("job.prepare()")]

    def prepare(self):
        place = self.out / "first"
        self.make(place)
        env = {name: value for name, value in self.env("a", place).items() if name != "VERL_USE_EXTERNAL_MODULES"}
        with open(place / "log", "wb") as log:
            children = [
                subprocess.Popen(command, env=env, stdout=log, stderr=log, start_new_session=True) for command in self.preparations()
            ]
            try:
                for child in children:
                    child.wait(timeout=max(self.left(), 1))
            except subprocess.TimeoutExpired:
                pass
        self.clean()
        for child, what in zip(children, ("the imports", "the model")):
            if child.returncode != 0:
                self.say(f"{what}: failed or took too long; see {place / 'log'}\n{tail(place / 'log', 15)}")
        self.say("prepared")
        return children[1].returncode == 0

    def make(self, place):
        shutil.rmtree(place, ignore_errors=True)
        for name in ("events", "answers", "modules"):
            (place / name).mkdir(parents=True)
        # Ray's sockets need a short path.
        self.ray = tempfile.mkdtemp(prefix="ray-", dir="/tmp")
        shutil.copy(HERE / "verl_timers.py", place / "modules")

    def run(self):
        self.check()
        self.out.mkdir(parents=True, exist_ok=True)
        self.work.mkdir(parents=True, exist_ok=True)
        earlier = [json.loads(pathlib.Path(file).read_text()) for file in self.options.join if self.exists(file)]
        result = {"about": f"{machine(self.options.gpus)}; {self.about()}", "warm": self.options.warm, "modes": {}, "fits": []}
        if not self.prepare():
            failed = True
        elif self.options.fit:
            result = report.join(result, earlier)
            failed = not self.find(result)
        else:
            failed = not self.measure(result)
            result = report.join(result, earlier)
        self.write(result)
        print((self.out / "verl.md").read_text())
        return 1 if failed else 0

    def exists(self, file):
        """The first of several calls with the same command has nothing to join yet."""
        there = os.path.exists(file)
        if not there:
            self.say(f"{file} does not exist, so nothing of it is joined")
        return there

    def measure(self, result):
        """Whether all modes have run all steps."""
        complete = True
        for label in self.labels():
            if self.took and self.left() < 0.8 * min(self.took):
                self.say(f"{report.title(label)}: not run, {self.left():.0f} s are left")
                complete = False
                continue
            mode = self.mode(label)
            complete &= mode["ended"] == "complete"
            result["modes"][label] = mode
            self.write(result)
        return complete

    def find(self, result):
        """Looks for what fits; earlier runs of the same job count. Whether all of it is found."""
        found = True
        for label, setting in ((label, setting) for label in self.labels() for setting in self.options.fit):
            values, same = self.options.values[setting], {"mode": label, "setting": setting, "about": result["about"]}
            while True:
                runs = [run for run in result["fits"] if same.items() <= run.items()]
                value = fit.next_value(values, runs)
                if value is None:
                    break
                if self.left() < (0.8 * min(self.took) if self.took else 30):
                    self.say(f"{report.title(label)}, {setting}={value}: not run, {self.left():.0f} s are left")
                    found = False
                    break
                run = {**same, "values": values, "value": value, **self.try_out(label, setting, value)}
                result["fits"].append(run)
                self.write(result)
                if run["ended"] != fit.FITS and not fit.is_out_of_memory(run):
                    # Neither fits nor does not. Another call may try again.
                    found = False
                    break
        return found

    def try_out(self, label, setting, value):
        place = self.out / f"{label}-{setting}-{value}"
        self.say(f"{report.title(label)}, {setting}={value}: starts")
        limit = min(self.options.run_limit, self.left() - TO_END)
        mode, code, took = self.execute(label, place, fit.overrides(setting, value), limit)
        is_complete = len(mode["steps"]) >= self.options.steps
        log = (place / "log").read_text(errors="replace")
        ended, error = fit.outcome(is_complete, code, mode["events"], log, took >= limit)
        if is_complete or fit.is_out_of_memory({"ended": ended}):
            self.took.append(took)
        self.say(f"{report.title(label)}, {setting}={value}: {ended}, {len(mode['steps'])} steps, {took:.0f} s; {error[:200]}")
        peak = max((used for _, used in mode["samples"] if used is not None), default=None)
        return {"ended": ended, "error": error, "steps": len(mode["steps"]), "took": took, "gpu_peak": peak}

    def about(self):
        chosen = self.options
        settings = [*chosen.set, *chosen.env, *(name for name in ("quick", "deterministic") if getattr(chosen, name))]
        return f"{chosen.layers} layers of {chosen.hidden}" + (f"; {' '.join(settings)}" if settings else "")

    def write(self, result):
        (self.out / "verl.json").write_text(json.dumps(result))
        (self.out / "verl.md").write_text(report.markdown(result))

    def mode(self, label):
        place = self.out / label
        self.say(f"{report.title(label)}: starts")
        mode, code, took = self.execute(label, place)
        steps = len(mode["steps"])
        done, wanted = sum("error" not in row for row in mode["outside"]), self.options.pauses + self.options.suspends
        ended = "complete" if steps >= self.options.steps else "the time was up" if self.left() <= TO_END else f"ended early (exit code {code})"
        if label[0] in OUTSIDE and done < wanted:
            ended += f", paused {done} of {wanted} times"
        self.say(f"{report.title(label)}: {ended}, {steps} steps, {took:.0f} s")
        if ended == "complete":
            self.took.append(took)
        else:
            self.explain(place)
        return {"ended": ended, "took": took, **mode, "library": lines_with(place / "log", "vramctl")[-200:]}

    def execute(self, label, place, more=(), limit=float("inf")):
        """Runs the job: what it has written, its exit code, and the seconds."""
        self.make(place)
        machine, began = watch.Watch(self.options.gpus), time.monotonic()
        before = machine.gpu_used()
        vramctl = str(pathlib.Path(self.options.bin) / "vramctl")
        looks = watch.Looks(self.options.gpus, vramctl, self.env("b", place), self.mine, place / "looks.jsonl")
        machine.start()
        looks.start()
        with open(place / "log", "ab") as log:
            if label[0] in OUTSIDE:
                self.start_cluster(label, place, log)
            child = subprocess.Popen(
                self.command(label, place, more), env=self.env(label, place), stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
            code = self.follow(child, label, place, began + limit, before or 0)
        for thread in (machine, looks):
            thread.done.set()
            thread.join()
        self.clean()
        took = time.monotonic() - began
        self.wait_for_gpu(machine, before)
        return {
            "steps": report.from_file(place / "metrics.jsonl"),
            "events": report.events(place / "events"),
            "tokens": report.tokens(place / "answers"),
            "samples": machine.samples,
            "looks": report.lines(place / "looks.jsonl"),
            "outside": report.lines(place / "outside.jsonl"),
        }, code, took

    def start_cluster(self, label, place, log):
        """If it does not start, the job says so."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        with contextlib.suppress(subprocess.TimeoutExpired):
            subprocess.run(self.cluster(), env=self.env(label, place), stdout=log, stderr=log, timeout=min(120, max(self.left() - TO_END, 1)))

    def start_outside(self, label, place, step, idle):
        """What pauses the job from now on. `step`: the seconds of one."""
        chosen = self.options
        seconds = MOMENTS * step * (chosen.steps - chosen.warm)
        self.say(f"  {chosen.pauses} pauses and {chosen.suspends} suspends from outside, within {seconds:.0f} s of work, seed {chosen.seed}")
        given = (place / "outside.jsonl", chosen.seed, chosen.pauses, chosen.suspends, seconds, chosen.gpus, idle)
        with open(place / "log", "ab") as log:
            command = [sys.executable, str(HERE / "outside.py"), *map(str, given)]
            return subprocess.Popen(command, env=self.env(label, place), stdout=log, stderr=log, start_new_session=True)

    def follow(self, child, label, place, end, idle):
        """Waits for a run and tells its steps. Ends it when the time is up, or does not end after a failure: what it has written counts. In
        modes d and e, has it paused from outside."""
        told, failed, outside, paused = 0, None, None, 0
        while child.poll() is None and self.left() > TO_END and time.monotonic() < min(end, failed or end):
            time.sleep(0.2)
            steps = report.from_file(place / "metrics.jsonl")
            for step in sorted(steps)[told:]:
                shown = ("gen", "old_log_prob", "update_actor", "update_weights", "step")
                self.say(f"  step {step}: " + ", ".join(f"{name} {steps[step].get(f'timing_s/{name}', 0):.2f} s" for name in shown))
            if label[0] in MANAGED and not self.options.fit and told <= self.options.warm < len(steps):
                self.status(place)
            told = len(steps)
            if label[0] in OUTSIDE and outside is None and told >= self.options.warm:
                outside = self.start_outside(label, place, min(step.get("timing_s/step", 0) for step in steps.values()), idle)
            rows = report.lines(place / "outside.jsonl")
            for row in rows[paused:]:
                self.say("  " + report.outside_text(row, report.events(place / "events")))
            paused = len(rows)
            if outside is not None and outside.poll():
                self.say(f"  the program that pauses has failed:\n{tail(place / 'log', 5)}")
                break
            if failed is None and self.options.fit and any(one.get("failed") for one in report.events(place / "events")):
                failed = time.monotonic() + AFTER_A_FAILURE
            if told >= self.options.steps:
                # Ray takes long to end. This is for the last lines of the log.
                time.sleep(0.5)
                break
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGTERM)
            try:
                child.wait(timeout=5)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
        return child.returncode

    def status(self, place):
        """What the library says in the rollout that follows: the trainer is off then."""
        command = [str(pathlib.Path(self.options.bin) / "vramctl"), "status", "verl"]
        try:
            done = subprocess.run(command, env=self.env("b", place), capture_output=True, text=True, timeout=10)
            text = done.stdout + done.stderr
        except subprocess.TimeoutExpired:
            text = "no answer within 10 s"
        (place / "status").write_text(text)
        self.say("  `vramctl status verl` after this step:\n" + "\n".join(f"    {line[:200]}" for line in text.splitlines()[:40]))

    def explain(self, place):
        log = place / "log"
        counts = collections.Counter(line for line in lines_with(log, "Error", "rror:", "vramctl") if "INFO" not in line)
        self.say("what its log says:\n" + "\n".join(f"    {line[:300]}" for line in list(counts)[:40]) + f"\n  and ends with\n{tail(log, 40)}")

    def clean(self):
        """Ends all processes of this run: Ray's daemons and workers are in sessions of their own."""
        for _ in range(20):
            mine = self.mine()
            for pid in mine:
                try:
                    os.kill(pid, signal.SIGKILL)
                except OSError:
                    pass
            if not mine:
                break
            time.sleep(0.25)
        if self.ray:
            shutil.rmtree(self.ray, ignore_errors=True)

    def mine(self):
        return [pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if self.is_mine(pid)]

    def is_mine(self, pid):
        try:
            return f"BENCH_VERL_RUN={self.mark}".encode() in pathlib.Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False

    def wait_for_gpu(self, machine, before):
        end = time.monotonic() + 30
        while before is not None and (machine.gpu_used() or 0) > before + (256 << 20) and time.monotonic() < end:
            time.sleep(0.5)


def tail(path, count):
    return "\n".join(f"    {line[:300]}" for line in path.read_text(errors="replace").splitlines()[-count:])


def lines_with(path, *words):
    lines = re.sub(r"\x1b\[[0-9;]*m", "", path.read_text(errors="replace")).splitlines()
    return [line for line in lines if any(word in line for word in words)]


def main(chosen):
    complete(chosen)
    bench = Bench(chosen)
    if chosen.dry_run:
        print(bench.plan())
        return 0
    try:
        return bench.run()
    except Missing as problem:
        print(f"bench: {problem}", file=sys.stderr)
        return 1
    finally:
        bench.clean()
