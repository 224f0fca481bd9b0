"""Names from the command line: those that are known, and one sentence for another."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=str)
Thing = TypeVar("Thing")


def choose(what: str, known: Collection[Name], names: Iterable[str]) -> tuple[Name, ...]:
    """The names, in the order of `known`.

    Parameters
    ----------
    what : one of them is, for the sentence.

    Raises
    ------
    ValueError
        For a name that is not one of `known`.
    """
    wanted = tuple(names)
    for name in wanted:
        if name not in known:
            raise ValueError(f"there is no {what} {name!r}; the {what}s are {', '.join(known)}")
    return tuple(name for name in known if name in wanted)


def choose_one(what: str, known: Mapping[str, Thing], name: str) -> Thing:
    """What has this name; errors as of `choose`."""
    choose(what, known, [name])
    return known[name]


def choose_listed(option: str, what: str, known: Collection[Name], text: str | None) -> tuple[Name, ...]:
    """The names of a comma-separated list; all of them for None.

    Parameters
    ----------
    option : whose list it is, for the sentence.

    Raises
    ------
    ValueError
        For a name that is not one of `known`, or none at all.
    """
    if text is None:
        return tuple(known)
    wanted = [name.strip() for name in text.split(",") if name.strip()]
    if not wanted:
        raise ValueError(f"{option} names no {what}; give one or more of {', '.join(known)}")
    return choose(what, known, wanted)
