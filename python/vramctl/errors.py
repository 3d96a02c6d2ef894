"""What can go wrong, as exceptions that carry the numbers.

Every exception of this package is an `Error`. `Error.code` is the control protocol's name of the error and
`Error.number` the C ABI's; neither ever changes its meaning. `Error.message` is for people and may.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

__all__ = [
    "Busy",
    "BufferTooSmall",
    "Capturing",
    "Disconnected",
    "Disk",
    "DeviceMemory",
    "Driver",
    "Error",
    "HostMemory",
    "Internal",
    "Invalid",
    "NoProcess",
    "NotPaused",
    "NotPreloaded",
    "PrefixCache",
    "SeveralProcesses",
    "UnknownTag",
    "Unsupported",
    "Work",
]


class Error(RuntimeError):
    """Base of everything that this package raises about vramctl.

    After an error of a pause or resume, everything is as it was before the call.
    """

    #: The protocol's name of the error, such as ``device_memory``.
    code: str = "internal"
    #: The C ABI's number of it; 0 where it is an error of the Python side alone.
    number: ClassVar[int] = 0

    def __init__(self, message: str, numbers: Mapping[str, Any] | None = None) -> None:
        super().__init__(message)
        #: What happened and what to do next, for people.
        self.message = message
        #: What the message says in numbers, in bytes where they are sizes; which ones depends on the class.
        self.numbers: dict[str, Any] = dict(numbers or {})

    def __str__(self) -> str:
        return self.message  # and not what OSError makes of its arguments

    def __reduce__(self) -> tuple[Any, ...]:
        # The numbers must survive the way from a worker process, which pickles its exceptions.
        return (type(self), (self.message, self.numbers), {"code": self.code})


class Invalid(Error, ValueError):
    """An argument or request makes no sense, or the process does not take requests from this user."""

    code = "invalid"
    number = 1


class UnknownTag(Error, LookupError):
    """No allocation has one of the tags; nothing was done."""

    code = "unknown_tag"
    number = 2

    @property
    def known_tags(self) -> list[str]:
        """The tags that there are."""
        return list(self.numbers.get("known_tags", ()))


class DeviceMemory(Error, MemoryError):
    """Too little device memory for a resume; everything stays paused."""

    code = "device_memory"
    number = 3

    @property
    def device(self) -> int | None:
        """The device's ordinal in the process; None where it was not said."""
        return self.numbers.get("device")

    @property
    def needed(self) -> int:
        """Bytes that are needed."""
        return int(self.numbers.get("needed", 0))

    @property
    def free(self) -> int:
        """Bytes that are free."""
        return int(self.numbers.get("free", 0))

    @property
    def holders(self) -> list[dict[str, Any]]:
        """Who has the rest, as far as the driver tells: each with ``pid``, and ``bytes`` and ``program`` where known."""
        return list(self.numbers.get("holders", ()))


class HostMemory(Error, MemoryError):
    """Too little host memory to keep the contents; everything stays active."""

    code = "host_memory"
    number = 4

    @property
    def needed(self) -> int:
        """Bytes that the contents need."""
        return int(self.numbers.get("needed", 0))

    @property
    def available(self) -> int:
        """Bytes that the host could give."""
        return int(self.numbers.get("available", 0))


class Driver(Error):
    """The CUDA driver refused a call."""

    code = "driver"
    number = 5

    @property
    def cuda_code(self) -> int | None:
        """The driver's own number of the error; None where it was not said."""
        return self.numbers.get("cuda_code")


class Work(Driver):
    """The program's own GPU work has failed; its context is lost."""

    code = "work"
    number = 6


class Capturing(Error):
    """A stream is being captured into a graph; try again when that is over."""

    code = "capturing"
    number = 7


class Busy(Error, TimeoutError):
    """Not in time: the device's work went on, or a process did not answer."""

    code = "busy"
    number = 8


class Unsupported(Error):
    """The device, the driver, torch or the preloaded library lacks what is needed."""

    code = "unsupported"
    number = 9


class Internal(Error):
    """A defect of the library; please report it."""

    code = "internal"
    number = 10


class NotPaused(Error, LookupError):
    """The address is not in a paused allocation whose contents were kept in host memory."""

    code = "not_paused"
    number = 11


class BufferTooSmall(Error):
    """Of the C ABI; never raised by this package's functions."""

    code = "buffer_too_small"
    number = 12


class Disk(Error, OSError):
    """A file for contents could not be made, written or read."""

    code = "disk"
    number = 13


class PrefixCache(Error):
    """A pause would drop a KV cache that the prefix cache of an inference engine in the process still describes. Have the
    engine reset its prefix cache, then pass ``force=True``.
    """

    code = "prefix_cache"
    number = 14


class NotPreloaded(Error):
    """The library is not preloaded in this process, so none of its memory is managed."""

    code = "not_preloaded"


class NoProcess(Error, LookupError):
    """No such process is managed."""

    code = "no_process"


class SeveralProcesses(Error, LookupError):
    """Several processes are meant where one must be."""

    code = "several_processes"

    @property
    def pids(self) -> list[int]:
        """Their ids."""
        return list(self.numbers.get("pids", ()))


class Disconnected(Error, ConnectionError):
    """The process went away, or hung up, before it answered; ask for its status to learn what came of the request."""

    code = "disconnected"


_CLASSES: tuple[type[Error], ...] = (
    Invalid,
    UnknownTag,
    DeviceMemory,
    HostMemory,
    Driver,
    Work,
    Capturing,
    Busy,
    Unsupported,
    Internal,
    NotPaused,
    BufferTooSmall,
    Disk,
    PrefixCache,
)
_BY_NUMBER = {kind.number: kind for kind in _CLASSES}
_BY_CODE = {kind.code: kind for kind in _CLASSES}


def _from_number(number: int, message: str, reply: Mapping[str, Any] | None = None) -> Error:
    """The exception for a `VramctlResult`. One that this package does not know yet is a plain `Error`."""
    return _BY_NUMBER.get(number, Error)(message, _numbers(reply or {}))


def _from_reply(reply: Mapping[str, Any]) -> Error:
    """The exception for the protocol's `error` reply."""
    code = str(reply.get("code", ""))
    kind = _BY_CODE.get(code)
    error = (kind or Error)(str(reply.get("message", "no message")), _numbers(reply))
    if kind is None:
        error.code = code
    return error


def _numbers(reply: Mapping[str, Any]) -> dict[str, Any]:
    """The further fields of an `error` reply; those of a shortage beside the others."""
    shortages = ("shortage", "host_shortage")
    numbers = {name: value for name, value in reply.items() if name not in ("reply", "code", "message", *shortages)}
    for shortage in shortages:
        numbers.update(reply.get(shortage) or {})
    return numbers
