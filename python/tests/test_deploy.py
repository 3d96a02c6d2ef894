"""What lies in deploy/, as far as it can be tried without the systems that it is for."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

import vramctl
from support import HOLDER, ROOT, VRAMCTL, Program, bare, wheel

DEPLOY = ROOT / "deploy"


class Deploy(unittest.TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_the_page_names_each_file(self) -> None:
        page = (ROOT / "docs/deploy.md").read_text()
        files = [file.relative_to(ROOT) for file in DEPLOY.rglob("*") if file.is_file() and "__pycache__" not in file.parts]
        self.assertGreater(len(files), 5)
        for file in files:
            self.assertIn(f"(../{file})", page + (ROOT / "docs/integrations.md").read_text())

    def test_the_image_is_built_and_starts_programs(self) -> None:
        """Runs the instructions of the Dockerfile in a new virtual environment, with a directory in place of the image's root."""
        lines = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ").splitlines()
        told = [line.partition(" ")[::2] for line in lines if line and not line.startswith("#")]
        self.assertEqual(
            [word for word, _ in told],
            ["ARG", "FROM", "COPY", "RUN", "RUN", "RUN", "ENV", "ENTRYPOINT"],
            "a new instruction: try it here",
        )
        root = self.folder / "root"
        (root / "opt/vramctl").mkdir(parents=True)
        wheel(root / "opt/vramctl", vramctl.__version__)
        subprocess.run([sys.executable, "-m", "venv", str(self.folder / "venv")], check=True)

        def inside(text: str) -> str:
            return re.sub(r"(?<=[ =])/(opt|run)/vramctl", rf"{root}/\1/vramctl", text)

        environment = {"PATH": f"{self.folder}/venv/bin:{os.environ['PATH']}", "VRAMCTL_LIB": "", "VRAMCTL_PYTHON": ""}
        for word, rest in told:
            if word == "RUN":
                done = bare(["sh", "-ec", inside(rest)], **environment)
                self.assertEqual(done.returncode, 0, f"{rest}\n{done.stdout}{done.stderr}")
            elif word == "ENV":
                environment.update(setting.split("=", 1) for setting in shlex.split(inside(f" {rest}")))
            elif word == "ENTRYPOINT":
                script = "import vramctl; print(vramctl.library_path())"
                done = bare([*map(str, eval(rest)), "python3", "-c", script], **environment)
                self.assertTrue(done.stdout.startswith(str(self.folder / "venv/lib")), done)
        self.assertEqual(environment["VRAMCTL_DIR"], f"{root}/run/vramctl/sockets")
        self.assertFalse((root / "opt/vramctl").exists())

    def test_the_units_commands_are_such_that_there_are(self) -> None:
        text = (DEPLOY / "vramctl-metrics.service").read_text()
        options = re.search(r"^ExecStart=vramctl (.*)", text, re.MULTILINE)
        assert options is not None
        done = bare([VRAMCTL, *options[1].split(), "--textfile", "/nowhere"])
        self.assertIn("cannot be used with", done.stderr)
        # That of one user: found where pip puts it, too.
        command = re.search(r"^ExecStart=/bin/sh -c '(.*)'", (DEPLOY / "vramctl-metrics@.service").read_text(), re.MULTILINE)
        assert command is not None
        place = self.folder / ".local/bin"
        place.mkdir(parents=True)
        (place / "vramctl").write_text('#!/bin/sh\necho "$*"')
        (place / "vramctl").chmod(0o755)
        done = bare(["sh", "-c", command[1].replace("$$", "$")], HOME=str(self.folder), PORT="1")
        self.assertEqual(done.stdout, "metrics --listen 127.0.0.1:1\n", done.stderr)

    def test_systemd_accepts_the_units(self) -> None:
        if shutil.which("systemd-analyze") is None:
            self.skipTest("not run: there is no systemd-analyze here")
        for name in ("vramctl-metrics.service", "vramctl-metrics@.service"):
            unit = self.folder / name
            unit.write_text((DEPLOY / name).read_text().replace("ExecStart=vramctl ", f"ExecStart={VRAMCTL} "))
            done = bare(["systemd-analyze", "verify", "--man=no", str(unit)])
            complaints = [line for line in done.stderr.splitlines() if "vramctl-metrics" in line]
            self.assertEqual((done.returncode, complaints), (0, []), done.stderr)

    def test_the_pods_containers_share_one_directory(self) -> None:
        try:
            import yaml
        except ImportError:
            self.skipTest("not run: PyYAML is missing here")
        (pod,) = yaml.safe_load_all((DEPLOY / "kubernetes/pod.yaml").read_text())
        spec: dict[str, Any] = pod["spec"]
        self.assertTrue(spec["shareProcessNamespace"])
        volumes = {volume["name"] for volume in spec["volumes"]}
        places = set()
        for container in spec["containers"]:
            (mount,) = container["volumeMounts"]
            self.assertIn(mount["name"], volumes)
            variables = {variable["name"]: variable["value"] for variable in container["env"]}
            # The library creates the last part, which nobody else may read: the mount is not its own.
            self.assertEqual(str(Path(variables["VRAMCTL_DIR"]).parent), mount["mountPath"])
            places.add((variables["VRAMCTL_DIR"], mount["name"], container["image"]))
        self.assertEqual(len(places), 1)

    def test_the_exporter_of_a_node_is_one_that_its_monitor_finds(self) -> None:
        try:
            import yaml
        except ImportError:
            self.skipTest("not run: PyYAML is missing here")
        exporter, service, monitor = yaml.safe_load_all((DEPLOY / "kubernetes/metrics.yaml").read_text())
        pod = exporter["spec"]["template"]
        (container,) = pod["spec"]["containers"]
        done = bare([VRAMCTL, *container["command"][1:], "--textfile", "/nowhere"])
        self.assertIn("cannot be used with", done.stderr)
        labels = pod["metadata"]["labels"]
        self.assertEqual(exporter["spec"]["selector"]["matchLabels"], labels)
        self.assertEqual(service["spec"]["selector"], labels)
        self.assertEqual(monitor["spec"]["selector"]["matchLabels"], service["metadata"]["labels"])
        self.assertEqual(monitor["spec"]["endpoints"][0]["port"], service["spec"]["ports"][0]["name"])
        self.assertIn(service["spec"]["ports"][0]["name"], [port["name"] for port in container["ports"]])

    def test_prometheus_accepts_the_alerts_and_their_metrics_exist(self) -> None:
        rules = DEPLOY / "prometheus/vramctl.rules.yml"
        known = (ROOT / "docs/monitoring.md").read_text()
        names = set(re.findall(r"\bvramctl_[a-z_]+", rules.read_text()))
        self.assertGreater(len(names), 4)
        self.assertEqual([name for name in names if f"| `{name}` |" not in known], [])
        promtool = os.environ.get("PROMTOOL") or shutil.which("promtool")
        if promtool is None:
            self.skipTest("not run: there is no promtool here")
        done = bare([promtool, "check", "rules", str(rules)])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_sudo_accepts_the_rules(self) -> None:
        if shutil.which("visudo") is None:
            self.skipTest("not run: there is no visudo here")
        done = bare(["visudo", "-c", "-f", str(DEPLOY / "vramctl.sudoers")])
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)

    def test_a_slurm_job_gets_the_gpus_of_resident_programs(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("not run: a prolog runs as root")
        resident = self.folder / "resident"
        resident.mkdir(mode=0o700)
        job = {"SLURM_JOB_ID": "7", "SLURM_JOB_UID": "65534", "SLURM_STEP_ID": "0", "VRAMCTL_SLURM_DIR": str(self.folder)}
        job["PATH"] = f"{Path(VRAMCTL).parent}:{os.environ['PATH']}"

        def script(name: str, **environment: str) -> str:
            done = bare([str(DEPLOY / "slurm" / name)], **job, **environment)
            self.assertEqual((done.returncode, done.stderr), (0, ""), name)
            return done.stdout

        def state() -> str:
            return bare([VRAMCTL, "ps"], VRAMCTL_DIR=str(resident)).stdout

        with Program("engine", VRAMCTL_DIR=str(resident)) as engine:
            script("prolog.sh", SLURM_JOB_GPUS="1")
            self.assertIn("active", state(), "the job does not get its GPU")
            script("epilog.sh")
            script("prolog.sh", SLURM_JOB_GPUS="0,1")
            self.assertIn("suspended", state())
            place = self.folder / "job-7"
            self.assertEqual((place.stat().st_uid, stat.S_IMODE(place.stat().st_mode)), (65534, 0o700))
            exports = dict(re.findall(r"^export (\w+)=(.*)$", script("task_prolog.sh"), re.MULTILINE))
            self.assertEqual(exports, {"VRAMCTL_DIR": str(place), "VRAMCTL_JOB": "slurm-7.0"})
            script("epilog.sh")
            self.assertIn("active", state())
            self.assertEqual(engine.ask("check"), "weights ok, cache zero")
        self.assertEqual(list(self.folder.glob("job-7*")), [])

    def test_a_resident_comes_back_after_the_last_job_on_its_gpus(self) -> None:
        if os.geteuid() != 0:
            self.skipTest("not run: a prolog runs as root")
        resident = self.folder / "resident"
        resident.mkdir(mode=0o700)

        def script(name: str, job: int, gpu: int) -> str:
            environment = {"SLURM_JOB_ID": str(job), "SLURM_JOB_UID": "65534", "SLURM_JOB_GPUS": str(gpu)}
            environment |= {"VRAMCTL_SLURM_DIR": str(self.folder), "PATH": f"{Path(VRAMCTL).parent}:{os.environ['PATH']}"}
            done = bare([str(DEPLOY / "slurm" / name)], **environment)
            self.assertEqual(done.returncode, 0, name)
            return done.stderr

        def states() -> list[str]:
            return [
                line.split()[2] for line in bare([VRAMCTL, "ps", "engine"], VRAMCTL_DIR=str(resident)).stdout.splitlines()[1:]
            ]

        on_second = HOLDER.replace("cuda = Cuda()", "cuda = Cuda()\ncuda.call('cudaSetDevice', 1)")
        place = {"VRAMCTL_DIR": str(resident), "VRAMCTL_JOB": "engine"}
        with Program("engine", **place) as one, Program("engine", on_second, **place) as other:
            # One that does not answer keeps no other from leaving.
            with Program(None, VRAMCTL_DIR=str(resident)) as silent, silent.stopped():
                self.assertIn("stays on its GPUs", script("prolog.sh", 1, 0))
                self.assertEqual(states(), ["suspended"] * 2)
            for name, job, gpu, wanted in (
                ("prolog", 2, 1, "suspended"),
                ("epilog", 1, 0, "suspended"),
                ("epilog", 2, 1, "active"),
            ):
                self.assertEqual((script(f"{name}.sh", job, gpu), states()), ("", [wanted] * 2), (name, job))
            self.assertEqual({each.ask("check") for each in (one, other)}, {"weights ok, cache zero"})
        self.assertEqual(list(self.folder.glob("job-*")), [])


if __name__ == "__main__":
    unittest.main()
