"""Validates arguments, the same for this process and for others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Literal, Optional, Union, get_args

from . import errors

#: What a pause does with the contents: `host` keeps them in host memory, `disk` in a file, `discard` drops them (the memory
#: reads as zero after the resume); `default` follows ``VRAMCTL_BACKUP``, else `host`.
Backup = Literal["default", "discard", "host", "disk"]

#: Tags to pause: one, several, None for all, or a policy for each, where the key None means all others.
Tags = Union[str, Iterable[str], Mapping[Optional[str], Backup], Mapping[str, Backup], None]


def checked(backup: str) -> str:
    """Returns a valid backup policy unchanged."""
    if backup not in get_args(Backup):
        raise errors.Invalid(f"{backup!r} is not a backup policy; use one of {', '.join(map(repr, get_args(Backup)))}")
    return backup


def registered(how: str) -> str:
    """Returns unchanged what to do with registered memory, if that is one of the choices."""
    if how not in ("refuse", "keep", "take"):
        raise errors.Invalid(f"registered={how!r} is not one of 'refuse', 'keep', 'take'")
    return how


def names(tags: str | Iterable[str] | None) -> list[str | None]:
    """The tags without duplicates; None means all."""
    if not (tags is None or isinstance(tags, (str, Iterable))):
        raise TypeError(f"tags must be a tag, several of them, or None for all, not {tags!r}")
    chosen: list[str | None] = [tags] if tags is None or isinstance(tags, str) else list(dict.fromkeys(tags))
    for tag in chosen:
        _check_tag(tag)
    if not chosen:
        raise errors.Invalid("no tags: None means all of them")
    return chosen


def _check_tag(tag: object) -> None:
    if not (tag is None or isinstance(tag, str)):
        raise TypeError(f"a tag must be a str or None, not {tag!r}")


def policies(tags: Tags, backup: str) -> dict[str | None, str]:
    """The policy for each tag; None means all others."""
    if not isinstance(tags, Mapping):
        return dict.fromkeys(names(tags), checked(backup))
    if backup != "default":
        raise errors.Invalid("tags is a mapping that gives each tag its policy; do not pass backup as well")
    if not tags:
        raise errors.Invalid("no tags: None means all of them")
    for tag in tags:
        _check_tag(tag)
    return {tag: checked(policy) for tag, policy in tags.items()}


def held(hold: object) -> bool:
    """Returns unchanged whether a pause holds the process."""
    if not isinstance(hold, bool):
        raise errors.Invalid(f"hold is True or False, not {hold!r}; hold_timeout is a number of seconds")
    return hold


def milliseconds(timeout: float | None) -> int | None:
    """Converts seconds to milliseconds, rounded up so that a short timeout does not become 0. None: no limit."""
    if timeout is None:
        return None
    if not isinstance(timeout, (int, float)):
        raise TypeError(f"a timeout must be a number of seconds or None, not {timeout!r}")
    if not timeout >= 0:
        raise errors.Invalid(f"a timeout must be a non-negative number of seconds or None, not {timeout!r}")
    return None if timeout > 1e9 else -int(-timeout * 1000 // 1)
