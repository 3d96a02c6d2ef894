"""Each phase of examples/rl_step.py runs out of memory, as it happens in practice, and the report names the cause: who made the
request, for which tag, in which line of Python; what is in use; and what could be freed. Another program, without the library, has most
of the GPU, so that the rest is soon full.

usage: report.py VRAMCTL PACKAGE    prints a line `ok: …` or `FAILED: …` for each check, and the pages. PACKAGE: python/vramctl
"""

import contextlib
import json
import os
import pathlib
import subprocess
import sys
import tempfile

from common import check, filled, smi, used_mib

ROOT = pathlib.Path(__file__).resolve().parents[2]
#: GiB left for the example.
ROOM = 32
#: What requests memory: torch's allocator, or one of torch's pools that this project feeds.
TORCH = ("libc10_cuda", "a pool of torch's")
#: Phase → who refuses, for which tag, and what must be in a stack: of Python, or native where the thread runs no Python.
CULPRITS = {
    "rollout": ("resume", "kv_cache", "python_stack", "rl_step.py"),
    "logprobs": ("driver", "default", "python_stack", " in log_probabilities"),
    "forward": ("driver", "default", "python_stack", " in forward"),
    "backward": ("driver", "default", "native_stack", "torch::autograd::"),
    "optimizer": ("driver", "trainer", "python_stack", " in train"),
    "sync": ("driver", "default", "python_stack", " in sync"),
}


@contextlib.contextmanager
def ballast():
    """Another program takes all of the first GPU except ROOM."""
    gib = (int(smi("memory.total")[0]) - used_mib()[0]) // 1024 - ROOM
    if gib <= 0:
        yield
        return
    with filled(gib, 0):
        yield


def run_out(vramctl, package, phase, folder):
    """Runs the example so that this phase runs out of memory. Returns its reports and its stderr."""
    example = [sys.executable, str(ROOT / "examples" / "rl_step.py"), "--steps", "1", "--oom", phase]
    environment = {**os.environ, "VRAMCTL_REPORT_DIR": str(folder), "VRAMCTL_PYTHON": str(package)}
    done = subprocess.run(
        [vramctl, "run", "--name", "rl", "--", *example], capture_output=True, text=True, timeout=60, env=environment
    )
    reports = [json.loads(path.read_text()) for path in sorted(pathlib.Path(folder).glob("*.json"))]
    check(
        f"{phase}: the example fails",
        done.returncode == 1,
        f"exit code {done.returncode}: {(done.stdout + done.stderr)[-300:]}",
    )
    return reports, done.stderr


def judge(phase, reports, log):
    refused_by, tag, stack, line = CULPRITS[phase]
    check(f"{phase}: one report", len(reports) == 1, f"{len(reports)}: {[report['headline'] for report in reports]}")
    if not reports:
        print(log[-3000:])
        return
    report = reports[-1]
    request = report["request"]
    check(f"{phase}: refused by", request["refused_by"] == refused_by, json.dumps(request))
    check(f"{phase}: for the tag", request.get("tag") == tag, json.dumps(request))
    if refused_by == "driver":
        check(
            # For a pool of its own, torch tries only once.
            f"{phase}: torch asked, and tried again",
            request["library"].startswith(TORCH) and request["attempts"] >= (1 if tag == "trainer" else 2),
            json.dumps(request),
        )
    found = [frame for frame in report[stack] if line in frame]
    check(f"{phase}: the line", bool(found), found[:1] or report[stack][:12])
    in_use = sum(row["bytes"] for row in report["in_use"])
    device = report["device"]
    off = in_use - (device["total_bytes"] - device["free_bytes"])
    check(f"{phase}: what is in use adds up", abs(off) <= 64 << 20, f"{off:+} bytes; {report['headline']}")
    check(
        f"{phase}: the largest blocks have a place",
        any(block.get("at") for block in report["largest"]),
        json.dumps(report["largest"])[:300],
    )
    if phase == "rollout":
        ways = [way for way in report["could_be_freed"] if way["command"].endswith(" trainer")]
        check(
            "rollout: pausing the trainer would free it",
            bool(ways) and ways[0]["bytes"] >= 6 << 30,
            json.dumps(report["could_be_freed"]),
        )
    if phase in ("forward", "backward"):
        places = [block.get("at", "") for block in report["largest"]]
        check(
            f"{phase}: the blocks that fill the GPU are the example's", any("rl_step.py" in place for place in places), places
        )
    page = [part.partition("warn: ")[2] for part in log.splitlines() if part.startswith("vramctl[")]
    print("\n".join(page))


def main():
    vramctl, package = sys.argv[1:3]
    with ballast():
        for phase in CULPRITS:
            with tempfile.TemporaryDirectory() as folder:
                judge(phase, *run_out(vramctl, package, phase, folder))


if __name__ == "__main__":
    main()
