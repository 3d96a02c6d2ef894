"""A measurement that checks: what has passed, and what has failed, in sections of which one that fails does not stop the others."""

import contextlib
import time

from measure.child import Deadline, Failed
from measure.run import Run

#: What the other process uses of a GPU that has more.
MOST_OTHER_GIB = 100
#: The share of a GPU's free memory that another program takes. What is left is too little for a program that has left it, and enough for
#: a context.
FILL = 0.93
#: How much of its log is shown of a section that did not end.
LAST_LINES = 20


def most_gib_of(mib):
    """How many GiB of this much memory another program takes, at least one."""
    return max(1, int(FILL * mib / 1024))


def dig(value, key):
    """The first value of `key` anywhere in a JSON value, or None."""
    if isinstance(value, dict):
        if key in value:
            return value[key]
        value = list(value.values())
    if isinstance(value, list):
        for item in value:
            found = dig(item, key)
            if found is not None:
                return found
    return None


class Check(Run):
    def __init__(self, options, name):
        super().__init__(options, name)
        self.checks, self.notes = [], []

    @contextlib.contextmanager
    def within(self, section, seconds):
        """A section that ends after so many seconds; without its programs, and with whatever went wrong recorded."""
        self.section = section
        self.say(f"== {section}")
        start, logged = time.monotonic(), self.log_file.tell()
        # The remaining time, less a little to write the report.
        rest = self.options.limit - 15 - (start - self.began)
        self.deadline = Deadline(min(seconds, max(rest, 0.1)))
        try:
            yield
        except Exception as error:
            self.expect("runs to its end", False, f"{type(error).__name__}: {error}")
            print(f"  the end of its log, all of which is in {self.log_file.name}:")
            print(*(f"    {line}" for line in self.last_lines(logged)), sep="\n", flush=True)
        finally:
            self.end_children()
        self.notes.append(f"{section} took {time.monotonic() - start:.0f} s")

    def last_lines(self, since):
        """The end of the log from this byte on: what was done last, and what the programs wrote."""
        with open(self.log_file.name, "rb") as log:
            log.seek(since)
            return log.read().decode(errors="replace").rstrip().splitlines()[-LAST_LINES:]

    def expect(self, name, ok, detail=""):
        """Records a check; a failure does not end the section."""
        self.checks.append({"section": self.section, "check": name, "ok": bool(ok), "detail": str(detail)[:2000]})
        if not ok:
            self.say(f"  FAILED {self.section}: {name}: {detail}")
        else:
            self.log(f"ok: {name} {str(detail)[:500]}")
        return bool(ok)

    def other_gib(self):
        """What the other process uses if nobody says."""
        return min(MOST_OTHER_GIB, most_gib_of(int(self.gpu("memory.total"))))

    def states(self, name):
        """The tags of a program in `vramctl status`."""
        code, answer, text, _ = self.vramctl("status", name)
        tags = dig(answer, "tags")
        if code != 0 or not isinstance(tags, list):
            raise Failed(f"vramctl status {name}: exit code {code}: {text}")
        return {tag["tag"]: tag for tag in tags}
