"""deploy/llm_d.py, called as the client of llm-d's snapshot agent calls a workload; the client is a stand-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path
from typing import Any

from support import PACKAGE, ROOT, VRAMCTL, Program, bare

#: Obeys commands on stdin, in a thread of its own, as theirs does those of the agent.
CLIENT = """
import json, sys, threading
class Handle:
    def close(self):
        print(json.dumps("closed"), flush=True)
def register_workload(agent, job_id, group="", workload=None, tags=None):
    def obey():
        for line in sys.stdin:
            command, *arguments = json.loads(line)
            try:
                getattr(workload, command)(*arguments)
                answer = {"ok": True}
            except Exception as error:
                answer = {"ok": False, "error": f"{type(error).__name__}: {error}"}
            print(json.dumps(answer), flush=True)
    assert set(workload.supported_modes) <= {"offload", "discard"} and workload.default_mode in workload.supported_modes
    print(json.dumps([agent, job_id, group, tags]), flush=True)
    threading.Thread(target=obey, daemon=True).start()
    return Handle()
"""


class Adapter:
    def __init__(self, folder: str, *arguments: str) -> None:
        place = Path(folder, "timeslice")
        place.mkdir()
        (place / "__init__.py").write_text("")
        (place / "snapshot_agent.py").write_text(CLIENT)
        environment = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        environment |= {"PYTHONPATH": f"{folder}:{PACKAGE.parent}"}
        command = [sys.executable, str(ROOT / "deploy/llm_d.py"), *arguments]
        self.child = subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> Any:
        assert self.child.stdout is not None
        return json.loads(self.child.stdout.readline())

    def ask(self, *command: Any) -> Any:
        assert self.child.stdin is not None
        print(json.dumps(command), file=self.child.stdin, flush=True)
        return self.answer()

    def __enter__(self) -> Adapter:
        return self

    def __exit__(self, *_: Any) -> None:
        self.child.kill()
        self.child.communicate()


class LlmD(unittest.TestCase):
    def test_the_agent_suspends_pauses_and_resumes_a_job(self) -> None:
        def states() -> dict[str, Any]:
            (process,) = json.loads(bare([VRAMCTL, "status", "trainer", "--json"]).stdout)["processes"]
            return {**{tag["tag"]: tag["state"] for tag in process["tags"]}, "suspended": "suspended" in process}

        with tempfile.TemporaryDirectory() as folder, Program("trainer") as trainer:
            with Adapter(folder, "--job-id", "mine", "--group", "trainers", "trainer") as adapter:
                self.assertEqual(adapter.answer(), ["127.0.0.1:9001", "mine", "trainers", ["kv_cache", "weights"]])
                self.assertIn("registered trainer as mine", adapter.child.stdout.readline())  # type: ignore[union-attr]
                self.assertEqual(adapter.ask("snapshot", "offload", ["weights"]), {"ok": True})
                self.assertEqual(states(), {"weights": "paused", "kv_cache": "active", "suspended": False})
                self.assertEqual(adapter.ask("restore", ["weights"]), {"ok": True})
                self.assertEqual(adapter.ask("snapshot", "offload", []), {"ok": True})
                self.assertEqual(states(), {"weights": "paused", "kv_cache": "paused", "suspended": True})
                self.assertEqual(adapter.ask("restore", []), {"ok": True})
                self.assertEqual(trainer.ask("check"), "weights ok, cache zero")
                self.assertEqual(adapter.ask("snapshot", "discard", ["kv_cache"]), {"ok": True})
                self.assertEqual(adapter.ask("restore", []), {"ok": True})
                self.assertEqual(states(), {"weights": "active", "kv_cache": "active", "suspended": False})
                refused = adapter.ask("snapshot", "offload", ["wieghts"])
                self.assertIn("UnknownTag: ", refused["error"])
                adapter.child.send_signal(signal.SIGTERM)
                self.assertEqual(adapter.answer(), "closed")
                self.assertEqual(adapter.child.wait(60), 0)

    def test_what_cannot_be_restored_is_paused(self) -> None:
        with tempfile.TemporaryDirectory() as folder, Program("trainer", SIMGPU_MPS="1"):
            with Adapter(folder, "--job-id", "mine", "trainer") as adapter:
                assert adapter.child.stdin is not None and adapter.child.stdout is not None
                adapter.answer()
                adapter.child.stdout.readline()
                print(json.dumps(["snapshot", "offload", []]), file=adapter.child.stdin, flush=True)
                self.assertIn("only paused: ", adapter.child.stdout.readline())
                self.assertEqual(adapter.answer(), {"ok": True})
                listed = bare([VRAMCTL, "ps"]).stdout
                self.assertTrue("paused" in listed and "suspended" not in listed, listed)
                self.assertEqual(adapter.ask("restore", []), {"ok": True})


if __name__ == "__main__":
    unittest.main()
