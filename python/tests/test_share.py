"""Engines that share a GPU by themselves, behind any router: fake_vllm, with HTTP, as those of examples/litellm.yaml."""

import concurrent.futures
import contextlib
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import unittest
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent))
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent / "fake_vllm"))

import server  # noqa: E402

import support  # noqa: E402

#: MiB of the weights and the KV cache of an engine.
WEIGHTS, CACHE = 16, 72


class Engines(unittest.TestCase):
    #: MiB of the GPU.
    GPU = 112
    #: Room on the host for the contents of a process: for weights, not for a layer of a KV cache.
    HOST_CAP = "64M"
    #: However busy the machine is.
    OPTIONS = ("--wait", "600")
    NAMES = ("one", "two", "three")
    #: Of each engine.
    WORKERS = 1
    #: MiB of a layer of the KV cache.
    LAYER = 72

    @classmethod
    def setUpClass(cls):
        folder = support.FolderOfPrograms()
        cls.addClassCleanup(folder.cleanup)
        without = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        more = {"PYTHONPATH": str(support.ROOT / "python"), "SIMGPU_DIR": folder.name, "SIMGPU_MEMORY": f"{cls.GPU}M"}
        more["FAKE_VLLM_LAYER_MIB"] = str(cls.LAYER)
        more["VRAMCTL_DIR"] = str(pathlib.Path(folder.name) / "sockets")
        cls.environment = {**without, **more}
        cls.ports = support.free_ports(len(cls.NAMES))
        for name, port in zip(cls.NAMES, cls.ports):
            command = [sys.executable, "-m", "vramctl", "run", "--share", *cls.OPTIONS, "--name", name, "--"]
            engine = [sys.executable, server.__file__, name, str(port), str(WEIGHTS), str(CACHE), str(cls.WORKERS)]
            environment = {**cls.environment, **({"VRAMCTL_HOST_CAP": cls.HOST_CAP} if cls.HOST_CAP else {})}
            process = subprocess.Popen([*command, *engine], env=environment)
            cls.addClassCleanup(process.wait)
            cls.addClassCleanup(process.kill)
            if cls.WORKERS > 1:
                # Jobs of several processes that begin at the same moment on one GPU may each have half of what they need.
                support.eventually("it serves", lambda port=port: cls.serves(port))
        for port in cls.ports:
            support.eventually("it serves", lambda port=port: cls.serves(port))

    @staticmethod
    def serves(port):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", port)) == 0

    def request(self, which, path, body=None):
        url = f"http://127.0.0.1:{self.ports[which]}{path}"
        data = None if body is None else json.dumps(body).encode()
        return urllib.request.urlopen(urllib.request.Request(url, data), timeout=1000)

    def ask(self, which, prompt="Hello", tokens=3):
        with self.request(which, "/v1/completions", {"prompt": prompt, "max_tokens": tokens}) as answer:
            return [int(token) for token in answer.read().split()]

    def check(self, which, prompt="Hello", tokens=3):
        """Its answer is that of an engine alone."""
        self.assertEqual(self.ask(which, prompt, tokens), server.tokens(self.NAMES[which], WEIGHTS, prompt, tokens))

    def check_turns(self):
        """Each has a turn three times, and answers as if alone. None but the one in place has anything in its cache."""
        for turn in range(3):
            for which in range(len(self.NAMES)):
                with self.subTest(turn=turn, which=which):
                    hits = self.counts(which)["hits"]
                    self.check(which)
                    self.assertEqual(self.counts(which)["hits"], hits, "its cache was reset when it left")
                    self.check(which)
                    self.assertEqual(self.counts(which)["hits"], hits + 1, "and serves as long as it is there")

    def counts(self, which):
        """How many requests hit its prefix cache, how often that was reset, and how many requests run."""
        with self.request(which, "/") as answer:
            return json.load(answer)

    def vramctl(self, *arguments):
        done = []

        def answers():
            # A process that moves on a busy machine may not answer in time.
            command = [sys.executable, "-m", "vramctl", *arguments, "--json"]
            done.append(subprocess.run(command, env=self.environment, stdout=subprocess.PIPE))
            return done[-1].returncode == 0

        support.eventually("they answer", answers)
        return json.loads(done[-1].stdout)

    def view(self):
        return self.vramctl("share")

    def pauses(self, which):
        """What its pauses were, in all."""
        (found,) = [one for one in self.vramctl("status")["processes"] if one["name"] == self.NAMES[which]]
        return found["totals"]["pause"]

    @contextlib.contextmanager
    def running(self, which, prompt, tokens):
        """A long request that has begun. Afterwards, its answer is right."""
        wanted = server.tokens(self.NAMES[which], WEIGHTS, prompt, tokens)
        with self.request(which, "/v1/completions", {"prompt": prompt, "max_tokens": tokens}) as answer:
            begin = answer.read(1)
            yield
            self.assertEqual([int(token) for token in (begin + answer.read()).split()], wanted)


class Sharing(Engines):
    """Three engines of 88 MiB on a GPU of 112 MiB. Their weights are kept, and their KV caches have no place anywhere else."""

    def test_each_answers_as_if_alone_whoever_has_the_gpu(self):
        self.check_turns()
        for which in (0, 1, 2):
            pauses = self.pauses(which)
            self.assertGreaterEqual(pauses["discarded_bytes"], 2 * CACHE * support.MIB)
            # The weights were copied once. What else the process has is small.
            self.assertLess(pauses["kept_bytes"] - pauses["unchanged_bytes"], 2 * WEIGHTS * support.MIB)
        self.assertTrue(any(change["outcome"] == "changed" and change["came"] for change in self.view()["changes"]))

    def test_requests_at_once_are_all_answered(self):
        with concurrent.futures.ThreadPoolExecutor() as threads:
            asked = [threads.submit(self.check, which, prompt, 50) for prompt in "abc" for which in (0, 1, 2)]
            for answer in asked:
                answer.result()

    def test_who_ends_leaves_its_room_to_the_others(self):
        self.check(0)
        with self.request(0, "/stall", {}):
            pass
        # Its loop does not answer, so it keeps its place as long as it lives.
        with concurrent.futures.ThreadPoolExecutor() as threads:
            asked = [threads.submit(self.check, which) for which in (1, 2)]
            support.eventually("somebody waits", lambda: any(one.get("waits_ms") for one in self.view()["members"]))
            (dead,) = [member["pid"] for member in self.view()["members"] if member["name"] == "one"]
            os.kill(dead, signal.SIGKILL)
            for answer in asked:
                answer.result()

    def test_an_engine_whose_loop_does_not_answer_keeps_its_cache(self):
        def in_vain():
            outcomes = self.view()["totals"]["changes"]
            return sum(count for outcome, count in outcomes.items() if outcome != "changed")

        self.check(0)
        hits, before = self.counts(0)["hits"], in_vain()
        with self.request(0, "/stall", {}):
            pass
        with concurrent.futures.ThreadPoolExecutor() as threads:
            asked = threads.submit(self.check, 1)
            support.eventually("it was to leave", lambda: in_vain() > before)
            with self.request(0, "/v1/completions", {"prompt": "Hello", "max_tokens": 3}) as answer:
                with self.request(0, "/go-on", {}):
                    pass
                self.assertEqual(
                    [int(token) for token in answer.read().split()], server.tokens(self.NAMES[0], WEIGHTS, "Hello", 3)
                )
            self.assertEqual(self.counts(0)["hits"], hits + 1, "nothing has reset it")
            asked.result()


class Starting(Engines):
    """The host has room for an engine's weights and one layer, and each engine begins with its cache while others are in the middle of theirs."""

    LAYER = 24

    def test_all_serve(self):
        self.assertEqual([self.serves(port) for port in self.ports], [True] * 3)


class Busy(Engines):
    """With room on the host for a KV cache, and on the GPU for a job of two engines."""

    GPU = 200
    HOST_CAP = None
    NAMES = ("pair", "pair", "other")

    def test_of_two_ranks_the_one_with_a_request_keeps_its_cache(self):
        # The slower the machine, the longer are the turns, and the more tokens it takes.
        for tokens in (1500, 6000, 24000):
            for which in (0, 1):
                self.check(which)
            resets = self.counts(1)["resets"]
            # Both leave while it runs.
            with self.running(1, "long", tokens):
                self.check(2)
                counts = self.counts(1)
            if was_in_the_middle := counts["running"] > 0:
                self.assertEqual(counts["resets"], resets)
                break
        self.assertTrue(was_in_the_middle, "it has never been in the middle")
        for which in (0, 1):
            self.check(which)


class Parallel(Engines):
    """Two engines of two workers each, whose loops are in processes without a GPU. One fits."""

    #: For a layer, too: an engine that starts may ask for room for one worker first, and then the other engine is held when its second worker gives way,
    #: is not asked again, and keeps that worker's cache.
    HOST_CAP = "128M"
    GPU = 220
    NAMES = ("one", "two")
    WORKERS = 2

    def test_all_workers_give_up_the_cache(self):
        # Whoever was served last by the other test is in place.
        self.check(1)
        self.check_turns()
        found = [one for one in self.vramctl("status")["processes"] if one["name"] == self.NAMES[0]]
        discarded = [one["totals"]["pause"]["discarded_bytes"] for one in found if "pause" in one["totals"]]
        self.assertEqual(len([bytes for bytes in discarded if bytes >= 2 * CACHE * support.MIB]), 2, discarded)

    def test_a_loop_that_does_not_answer_keeps_the_cache_of_all(self):
        self.check(0)
        hits = self.counts(0)["hits"]
        with self.request(0, "/stall", {}):
            pass
        with concurrent.futures.ThreadPoolExecutor() as threads:
            asked = threads.submit(self.check, 1)
            support.eventually("somebody waits", lambda: any(one.get("waits_ms") for one in self.view()["members"]))
            with self.request(0, "/v1/completions", {"prompt": "Hello", "max_tokens": 3}) as answer:
                with self.request(0, "/go-on", {}):
                    pass
                self.assertEqual(
                    [int(token) for token in answer.read().split()], server.tokens(self.NAMES[0], WEIGHTS, "Hello", 3)
                )
            asked.result()
        self.assertIn(self.counts(0)["hits"], (hits, hits + 1))


class Keeping(Engines):
    HOST_CAP = None
    OPTIONS = ("--wait", "600", "--keep-cache")
    NAMES = ("one", "two")

    def test_a_cache_is_kept_where_somebody_wants_that(self):
        for turn in range(3):
            for which in (0, 1):
                self.check(which)
                self.assertEqual(self.counts(which), {"hits": turn, "resets": 0, "running": 0})


class Example(unittest.TestCase):
    def test_the_example_sends_nothing_twice_and_gives_up_late(self):
        text = (support.ROOT / "examples/litellm.yaml").read_text()
        lines = [line.partition(" #")[0].strip() for line in text.splitlines()]
        for line in ("num_retries: 0", "disable_cooldowns: true", "request_timeout: 900"):
            self.assertIn(line, lines)
        started = re.findall(r"--port (\d+) --served-model-name (\w+)", text)
        served = re.findall(r"hosted_vllm/(\w+).*\n +api_base: http://127.0.0.1:(\d+)/v1", text)
        self.assertEqual([(port, name) for name, port in served], started)
        self.assertEqual(len(started), 2)


if __name__ == "__main__":
    unittest.main()
