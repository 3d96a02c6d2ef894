"""Inference engines of which each takes nearly all of a GPU share it by themselves (`vramctl run --share`), and are asked over HTTP.

First, one engine alone and without the library answers all prompts. Then several start under it at the same moment. `turns`: a request at a
time, each to another engine than the last, so that each has to come back; every token must be that of the engine alone. `traffic`: requests at
random moments (Poisson), at random engines. With --sleep, the engine alone, which sleeps meanwhile, and others with vLLM's own sleep mode then do the
same turns behind a router of three lines (put to sleep, wake up, ask).

usage: engine_turns.py VRAMCTL [--engines 3] [--turns 30] [--rate 0.5] [--seconds 60] [--sleep] [--command COMMAND]

COMMAND starts an engine that answers OpenAI's /v1/completions; {port} is where. Without one: vLLM with the model of --model.
"""

import argparse
import http.client
import json
import os
import random
import shlex
import statistics
import subprocess
import sys
import threading
import time

from common import check, free_port
from turns import HostPeak, share

VOCABULARY = 120000
PROMPTS = [[(number * 7919 + place * 104729) % VOCABULARY + 10 for place in range(64)] for number in range(6)]
TOKENS = 32
#: Seconds in which an engine starts, also where the others start beside it and nothing is in the page cache.
START = 400

VLLM = """
python3 -m vllm.entrypoints.cli.main serve {model} --port {port} --skip-tokenizer-init --generation-config vllm --max-model-len 4096 --max-num-seqs 16
--gpu-memory-utilization {fraction} --served-model-name model -cc.mode=0 -cc.cudagraph_mode=FULL_DECODE_ONLY -cc.cudagraph_capture_sizes=[1,2,4,8]
"""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_LOGGING_LEVEL": "WARNING"}


class Engine:
    """A server of its own."""

    def __init__(self, options, name, before=(), more=(), **environment):
        self.name, self.port = name, free_port()
        words = [word.format(port=self.port, model=options.model, fraction=options.fraction) for word in options.command]
        self.log = open(f"{name}.log", "w")  # noqa: SIM115 # as long as the engine
        settings = {**os.environ, **OFFLINE, **environment}
        self.process = subprocess.Popen([*before, *words, *more], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log, env=settings)
        self.began = time.monotonic()

    def connect(self, method, path, body=None, patience=120):
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=patience)
        connection.request(method, path, body and json.dumps(body), {"Content-Type": "application/json"})
        return connection.getresponse()

    def wait(self):
        """Waits until it serves. The seconds that it took, None if it has ended."""
        while time.monotonic() - self.began < START and self.process.poll() is None:
            try:
                if self.connect("GET", "/health").status == 200:
                    return time.monotonic() - self.began
            except OSError:
                time.sleep(0.2)
        return None

    def post(self, path):
        return self.connect("POST", path).read()

    def answer(self, number):
        """The tokens of a prompt, and the seconds to the first and the last."""
        body = {"model": "model", "prompt": PROMPTS[number], "max_tokens": TOKENS, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
        asked, first, tokens = time.monotonic(), None, []
        response = self.connect("POST", "/v1/completions", body)
        for line in response:
            text = line.decode().removeprefix("data:").strip()
            if not text.startswith("{"):
                continue
            found = json.loads(text)["choices"][0].get("token_ids") or []
            first = first or (time.monotonic() - asked if found else None)
            tokens += found
        return tokens, first, time.monotonic() - asked

    def end(self):
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


def table(title, firsts, more=""):
    ordered = sorted(firsts)
    print(f"| {title} | {len(ordered)} | {statistics.median(ordered):.2f} s | {ordered[int(0.99 * (len(ordered) - 1))]:.2f} s | {ordered[-1]:.2f} s | {more} |", flush=True)


def take_turns(engines, expected, turns, before=lambda _: None):
    """Each request goes to another engine than the last. The seconds to each first token, from when the engine was chosen."""
    chance, last, firsts, differ = random.Random(7), None, [], []
    for turn in range(turns):
        one = chance.choice([engine for engine in engines if engine is not last])
        number, chosen = chance.randrange(len(PROMPTS)), time.monotonic()
        before(one)
        waited = time.monotonic() - chosen
        tokens, first, _ = one.answer(number)
        if tokens not in expected[number]:
            differ.append((turn, one.name, tokens[:8]))
        # In the first turns, an engine's first change copies what later ones find unchanged.
        if turn >= 2 * len(engines) and first is not None:
            firsts.append(waited + first)
        last = one
    check("every token of the turns is that of an engine alone", not differ, f"{turns} turns; {differ}")
    return firsts


def receive_traffic(engines, expected, rate, seconds):
    """The tokens of requests that an engine computes at once are rounded as those of a batch: only those alone at their engine are compared."""
    chance, threads, done, guard = random.Random(11), [], [], threading.Lock()
    there = {one.name: [] for one in engines}

    def ask(one, number):
        mine = {"alone": True}
        with guard:
            there[one.name].append(mine)
            if len(there[one.name]) > 1:
                for other in there[one.name]:
                    other["alone"] = False
        answer = one.answer(number)
        with guard:
            there[one.name].remove(mine)
        done.append((one.name, number, *answer, mine["alone"]))

    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(chance.expovariate(rate))
        threads.append(threading.Thread(target=ask, args=(chance.choice(engines), chance.randrange(len(PROMPTS)))))
        threads[-1].start()
    for thread in threads:
        thread.join(180)
    answered = sum(len(tokens) == TOKENS for _, _, tokens, *_ in done)
    check("every request of random traffic is answered", answered == len(threads), f"{answered} of {len(threads)}")
    alone = [(name, number, tokens) for name, number, tokens, *_, is_alone in done if is_alone]
    differ = [(name, number, tokens[:8]) for name, number, tokens in alone if tokens not in expected[number]]
    check("every token of those alone at their engine is that of an engine alone", not differ, f"{len(alone)} of {len(done)}; {differ}")
    return [first for *_, first, _, _ in done if first is not None]


def start(engines):
    took = [engine.wait() for engine in engines]
    return check("the engines start at the same moment", all(took), ", ".join(f"{engine.name} {one and round(one, 1)} s" for engine, one in zip(engines, took)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("vramctl")
    parser.add_argument("--model", default="/tmp/model8b")
    parser.add_argument("--fraction", default="0.85")
    parser.add_argument("--engines", type=int, default=3)
    parser.add_argument("--turns", type=int, default=30)
    parser.add_argument("--rate", type=float, default=0.5, help="requests per second")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--sleep", action="store_true")
    parser.add_argument("--command", type=shlex.split, default=VLLM.split())
    options = parser.parse_args()

    sleeps = {"more": ["--enable-sleep-mode"], "VLLM_SERVER_DEV_MODE": "1"} if options.sleep else {}
    alone = Engine(options, "alone", **sleeps)
    check("an engine alone starts", alone.wait() is not None)
    # First with an empty prefix cache, then from it. The sums of a prompt that is computed as a whole may be rounded otherwise than those of its end.
    cold = [alone.answer(number)[0] for number in range(len(PROMPTS))]
    answers = [alone.answer(number) for number in range(len(PROMPTS))]
    expected = [(cold[number], tokens) for number, (tokens, *_) in enumerate(answers)]
    check("an engine alone answers", all(len(tokens) == TOKENS for both in expected for tokens in both))
    print(f"note: {sum(first != second for first, second in expected)} of {len(expected)} answers differ from the prefix cache", flush=True)
    print("| what | requests | first token, median | 99% | longest | |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    table("an engine alone", [first for _, first, _ in answers if first is not None])
    if options.sleep:
        alone.post("/sleep?level=1")
    else:
        alone.end()

    with HostPeak() as host:
        names = [f"engine{number}" for number in range(options.engines)]
        engines = [Engine(options, name, before=[options.vramctl, "run", "--share", "--name", name, "--"]) for name in names]
        if start(engines):
            table(f"{options.engines} engines, turns", take_turns(engines, expected, options.turns))
            table("random traffic", receive_traffic(engines, expected, options.rate, options.seconds), f"{options.rate} per second")
        for change in share(options.vramctl).get("changes", [])[-6:]:
            print(f"note: {json.dumps(change)}", flush=True)
        for engine in engines:
            engine.end()
    print(f"note: host memory {host.gib():.0f} GiB", flush=True)
    if options.sleep:
        take_turns_asleep(options, alone, expected, sleeps)


def take_turns_asleep(options, first, expected, sleeps):
    """The same turns of engines of which at most one is awake. The first one sleeps."""
    engines, awake = [first], None

    def wake(one):
        nonlocal awake
        if awake is not one:
            awake.post("/sleep?level=1")
            one.post("/wake_up")
            awake = one

    for number in range(1, options.engines):
        # Each finds an empty GPU, since all others sleep.
        if awake:
            awake.post("/sleep?level=1")
        awake = Engine(options, f"sleep{number}", **sleeps)
        engines.append(awake)
        check(f"{awake.name} starts", awake.wait() is not None)
    table("vLLM's sleep mode, turns", take_turns(engines, expected, options.turns, wake))
    for engine in engines:
        engine.end()


if __name__ == "__main__":
    main()
    # What has failed is printed above.
    from common import failures

    sys.exit(bool(failures))
