"""The runs that a command's words mean: `latest`, `latest~1`, `@tag`, or the beginning of an id.

Whatever takes a run goes through `runs_of`. A file of that name comes first: who typed a path gets the file. `filters_of` checks
what narrows a list down.
"""

import re
from collections.abc import Callable, Mapping
from contextlib import suppress
from datetime import UTC, datetime, time, timedelta
from typing import TYPE_CHECKING, Final

from sigmascope.errors import ConfigError, NoSuchRunError

if TYPE_CHECKING:
    from sigmascope.history.store import Filters, KeptRun, Store

_LATEST: Final = re.compile(r"latest(?:~([0-9]{1,9}))?")
TAG: Final = re.compile(r"[^\s@~,/\\]{1,100}")
"""What a tag may be."""
_ID: Final = re.compile(r"[^\s@~/\\]{4,}")
_MOST_LISTED: Final = 5
_AGO: Final = re.compile(r"([0-9]{1,6})([mhdw])")
_DAYS: Final = {"today": 0, "yesterday": 1}
_AGO_UNITS: Final = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def is_reference(text: str) -> bool:
    """Whether a word can mean a run of the store: `latest`, a tag, or the beginning of an id."""
    if any("\ud800" <= letter <= "\udfff" for letter in text):  # no text of any store
        return False
    is_tag = text.startswith("@") and TAG.fullmatch(text.removeprefix("@")) is not None
    is_id = _ID.fullmatch(text) is not None and not text.endswith((".json", ".jsonl"))
    return _LATEST.fullmatch(text) is not None or is_tag or is_id


def runs_of(reference: str, store: "Store") -> "list[KeptRun]":
    """The runs that a word means, the oldest first.

    Args:
        reference: `latest` is the newest run, `latest~1` the one before it; `@tag` is every run with that tag; anything
            else is an id, or the first four letters of one or more, if no other begins so.
        store: Where to look.

    Raises:
        NoSuchRunError: There is none, or there are several of that beginning.
    """
    latest = _LATEST.fullmatch(reference)
    if latest is not None:
        return _latest(int(latest[1] or 0), store)
    if reference.startswith("@"):
        return _tagged(reference[1:], store)
    if _ID.fullmatch(reference) is None:
        raise NoSuchRunError(
            f"{reference!r} is no run.", hint="Give latest, latest~1, @tag, or four letters of an id or more."
        )
    found = store.runs_of_id(reference, limit=_MOST_LISTED + 1)
    if not found:
        raise NoSuchRunError(
            f"No run that is kept has the id {reference}.", hint="List them: sigmascope runs"
        )
    if len(found) > 1:
        shown = ", ".join(run.row.id for run in found[:_MOST_LISTED])
        more = ", …" if len(found) > _MOST_LISTED else ""
        raise NoSuchRunError(
            f"Several runs have an id that begins with {reference}: {shown}{more}.", hint="Give more of it."
        )
    return found


def _latest(back: int, store: "Store") -> "list[KeptRun]":
    found = store.runs(limit=1, offset=back)
    if not found:
        count = store.count()
        kept = (
            "No run is kept yet"
            if count == 0
            else f"Only {count} {'run is' if count == 1 else 'runs are'} kept"
        )
        raise NoSuchRunError(
            f"{kept}, so there is no latest{f'~{back}' if back else ''}.", hint="List them: sigmascope runs"
        )
    return found


def _tagged(tag: str, store: "Store") -> "list[KeptRun]":
    from sigmascope.history.store import Filters

    found = store.runs(Filters(tag=checked_tag(tag)))
    if not found:
        raise NoSuchRunError(f"No run has the tag {tag}.", hint=f"Give it: sigmascope runs tag {tag} latest")
    return found[::-1]


def checked_tag(tag: str) -> str:
    """A tag, without the @ before it.

    Raises:
        ConfigError: It is none.
    """
    name = tag.removeprefix("@")
    if TAG.fullmatch(name) is None or not name.isprintable():
        raise ConfigError(
            f"{tag!r} is no tag.",
            hint="A tag has 1 to 100 letters, without spaces, commas, slashes, @ and ~.",
        )
    return name


def filters_of(texts: Mapping[str, str | None], named: Callable[[str], str] = "--{}".format) -> "Filters":
    """Filters as people write them, by the names of `Filters`' fields; None: any.

    Args:
        texts: What was written.
        named: What a field is called where it was written, for a message.

    Raises:
        ConfigError: One of them is no outcome, tag or moment, or no moment is left between two of them.
    """
    from sigmascope.history.store import Filters
    from sigmascope.records.failures import OUTCOMES

    given = {name: text for name, text in texts.items() if text is not None}
    if "outcome" in given and given["outcome"] not in OUTCOMES:
        raise ConfigError(
            f"{named('outcome')} is {given['outcome']!r}.", hint=f"Give one of {', '.join(OUTCOMES)}."
        )
    if "tag" in given:
        given["tag"] = checked_tag(given["tag"])
    for name in ("since", "until"):
        if name in given:
            given[name] = moment_of(given[name], named(name))
    if "since" in given and "until" in given and given["since"] >= given["until"]:
        raise ConfigError(
            f"{named('since')} {texts['since']} is not before {named('until')} {texts['until']}, so no run can be meant.",
            hint=f"{named('until')} is the first moment that is too late: for a whole day, give the next one.",
        )
    return Filters(**given)


def moment_of(text: str, flag: str) -> str:
    """A moment as the store writes it: of a date, a date and time (in the local time zone), a day's name, or so long ago.

    Raises:
        ConfigError: It is none of these.
    """
    from sigmascope.history.row import moment_in_utc

    ago = _AGO.fullmatch(text)
    with suppress(ValueError):
        try:
            if ago is not None:
                return moment_in_utc(datetime.now(UTC) - timedelta(**{_AGO_UNITS[ago[2]]: int(ago[1])}))
            if text in _DAYS:
                today = datetime.now().astimezone().replace(tzinfo=None)
                return moment_in_utc(datetime.combine(today - timedelta(days=_DAYS[text]), time()))
            return moment_in_utc(datetime.fromisoformat(text))
        except OverflowError:  # before the first year
            return moment_in_utc(datetime.min.replace(tzinfo=UTC))
    raise ConfigError(
        f"{flag} is {text!r}.",
        hint="Give a date such as 2026-03-01, today or yesterday, or 12h, 7d or 2w for so long ago.",
    )
