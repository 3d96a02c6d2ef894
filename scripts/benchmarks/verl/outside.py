"""Pauses verl's job as a whole and from outside, through vramctl.ray, at random moments: modes d and e of scripts/bench verl.

usage: outside.py FILE SEED PAUSES SUSPENDS SECONDS GPUS IDLE
FILE gets a line of JSON for each pause, and for each that is refused. SECONDS: of the job, in which they come; IDLE: the bytes of the fullest
GPU that are in use without the job. The cluster is that of $RAY_ADDRESS.
"""

import json
import pathlib
import random
import sys
import time

sys.path.insert(1, str(pathlib.Path(__file__).resolve().parents[2]))

from benchmarks.verl import watch  # noqa: E402
from vramctl import errors  # noqa: E402
from vramctl.ray import Job  # noqa: E402

#: How often a pause is tried that was refused, and how many seconds later.
TRIES, AGAIN_AFTER = 5, 1
#: Seconds that the job has to finish its work in flight, that it stays paused, and that its resume waits for memory of others.
HOLD, STAY, WAIT = 30, 1, 60


class Outside:
    def __init__(self, file, machine, idle):
        self.file, self.machine, self.idle, self.job = file, machine, idle, Job("verl")

    def tell(self, row):
        with open(self.file, "a") as file:
            file.write(json.dumps(row) + "\n")

    def in_use(self):
        """Bytes on the fullest GPU that are not there without the job."""
        used = self.machine.gpu_used()
        return None if used is None else used - self.idle

    def disturb(self, what):
        """A pause or a suspend, and the way back. Whether it was done."""
        row, clock = {"what": what, "began": time.time(), "before": self.in_use()}, time.monotonic()
        try:
            done = getattr(self.job, what)(hold_timeout=HOLD)
            row["ranks"] = len(done.processes if what == "pause" else done)
        except errors.Error as error:
            row["error"] = in_a_line(error)
            if error.committed is False:
                self.tell(row)
                return False
        row.update(seconds=time.monotonic() - clock, left=self.in_use())
        time.sleep(STAY)
        row["later"], clock = self.in_use(), time.monotonic()
        try:
            self.job.resume(timeout=WAIT)
        except errors.Error as error:
            # All of it stays paused, so the job cannot end.
            self.tell({**row, "error": f"the resume: {in_a_line(error)}"})
            raise
        row.update(back=time.monotonic() - clock, after=self.in_use())
        self.tell(row)
        return "error" not in row


def in_a_line(error):
    return " ".join(f"{error.code}: {error}".split())[:300]


def main():
    file, seed, pauses, suspends, seconds, gpus, idle = sys.argv[1:]
    chance = random.Random(int(seed))
    outside = Outside(file, watch.Watch(int(gpus)), int(idle))
    # Starts the agent of each node.
    outside.job.status()
    plan = ["pause"] * int(pauses) + ["suspend"] * int(suspends)
    chance.shuffle(plan)
    moments = sorted(chance.uniform(0, float(seconds)) for _ in plan)
    for what, wait in zip(plan, (moment - before for before, moment in zip([0, *moments], moments))):
        time.sleep(wait)
        for _ in range(TRIES):
            if outside.disturb(what):
                break
            time.sleep(AGAIN_AFTER)


if __name__ == "__main__":
    main()
