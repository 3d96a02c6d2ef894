"""Finds the GPU, the CUDA runtime and the built programs, or says how to get them: with the functions of tests/apps/environment.sh."""

import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]
SMI = "nvidia-smi"
SIMULATED_SMI = "simgpu-smi"


def shell(script, *words):
    """Runs a line of bash that knows the functions of environment.sh. What is missing, that file says, and this program ends."""
    script = f'set -euo pipefail; . "{ROOT}/tests/apps/environment.sh"; {script}'
    done = subprocess.run(["bash", "-c", script, sys.argv[0], *map(str, words)], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise SystemExit(done.returncode)
    return done.stdout.strip()


def on_simulated_gpu():
    return "SIMGPU_DIR" in os.environ


def real_gpu():
    return shell("real_gpu && echo yes || true") == "yes"


def gpu_name():
    return shell("gpu_name")


def libcudart():
    """The folder of a CUDA runtime with which programs can be linked and run. It is on LD_LIBRARY_PATH from now on."""
    folder = shell("use_libcudart; echo $libcudart")
    paths = os.environ.get("LD_LIBRARY_PATH", "")
    if folder not in paths.split(":"):
        os.environ["LD_LIBRARY_PATH"] = folder + (f":{paths}" if paths else "")
    return folder


def enter_simulated_gpu(*machine, **variables):
    """Runs this program again on a simulated machine, which ends with it, unless it runs on one."""
    if not on_simulated_gpu():
        os.environ.update(variables)
        simgpu = str(ROOT / "scripts" / "simgpu")
        os.execv(simgpu, [simgpu, *map(str, machine), sys.executable, *sys.argv])


def need_gpu(otherwise):
    if not on_simulated_gpu() and not real_gpu():
        shell('missing "an NVIDIA GPU that answers nvidia-smi" "$1"', otherwise)


def built(given, simulated=False, files=("libvramctl.so", "vramctl")):
    """The folder with these files: the given one, or that of a build, which is made now. A simulated run takes the profile of scripts/simgpu, which
    developers have built already."""
    if given:
        folder = pathlib.Path(given).resolve()
    else:
        profile = os.environ.get("PROFILE", "debug") if simulated else "release"
        shell('build_vramctl "$@"', ROOT, "--workspace", *(["--release"] if profile == "release" else []))
        folder = pathlib.Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target")) / profile
    for file in files:
        if not (folder / file).exists():
            shell('missing "$1" "Build it with \\`cargo build --release\\`, or give the right --bin."', folder / file)
    return folder


def copy(folder, files, to):
    """Measures a copy, which a build meanwhile does not change."""
    pathlib.Path(to).mkdir(exist_ok=True)
    for file in files:
        if (folder / file).exists():
            shutil.copy(folder / file, to)
    return pathlib.Path(to)


def apps(to, runtime):
    """Builds the sample programs of tests/apps."""
    subprocess.run([ROOT / "tests" / "apps" / "build.sh", to, runtime], check=True)
    return pathlib.Path(to)


def compile(to, source, *options):
    compiler = os.environ.get("CC", "cc")
    shell('need_command "$1" "Install gcc (Debian, Ubuntu: apt-get install gcc libc6-dev), or set CC."', compiler)
    command = [compiler, "-std=c11", "-O2", "-g", "-Wall", "-Wextra", "-o", to, source, *options, "-ldl", "-lpthread"]
    subprocess.run(list(map(str, command)), check=True)


def work():
    """A folder that is removed when this program ends."""
    folder = tempfile.TemporaryDirectory(prefix="vramctl-measure.")
    _kept.append(folder)
    return pathlib.Path(folder.name)


_kept = []


def commit():
    done = subprocess.run(["git", "-C", ROOT, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return done.stdout.strip()


def count(text):
    """A number above 0, for argparse."""
    if not text.isdecimal() or not 0 < int(text) < 10**6:
        raise ValueError(text)
    return int(text)


def machine(options, *simulated, **variables):
    """Goes on on the simulated machine if it was asked for, and else needs a GPU."""
    if options.simulated:
        enter_simulated_gpu(*simulated, **variables)
    else:
        need_gpu("Without one: --simulated.")


def prepare(options):
    """Completes the options of a `Run`."""
    options.libcudart = libcudart()
    options.work = work()
    options.bin = copy(built(options.bin, on_simulated_gpu()), ("libvramctl.so", "vramctl"), options.work / "bin")
    options.smi = SIMULATED_SMI if on_simulated_gpu() else SMI
    options.gpu, options.commit = gpu_name(), commit()
