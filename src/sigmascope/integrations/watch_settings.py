"""How to watch a whole process, as the environment says it. Python's own startup runs this code."""

from collections.abc import Mapping, MutableMapping
from typing import Final, NamedTuple

USER_PREFIX: Final = "SIGMASCOPE_"
"""Begins the variables that users set, beside `SIGMASCOPE=1`; child processes have them too."""
LAUNCH_PREFIX: Final = "SIGMASCOPE_WATCH_"
"""Begins the variables of one launch, which the launched process takes out of its environment."""


class Settings(NamedTuple):
    """How to watch, and where the result goes. None: the default.

    Attributes:
        output: The file or folder for the record.
        trace: The file for a trace of it.
        prompts: What is kept of prompts: full, hash or none.
        name: What the run is called.
        sample_hz: How often memory is looked at, as text.
        step_memory: "0": do not look at it at the end of each step.
        quiet: "1": print no summary; "0" is no.
        full: "1": print the summary in full.
        launched: "1": somebody asked for this one process, and is told when there was nothing to see.
        keep_generations: How many generations, the last ones, the record holds in full, as text.
        thumbnails: "1": each generation keeps its first picture, small.
        stacks: "1": a thread looks where the program's own code is while no step runs.
        keep: "0": the run does not go to the store of runs.
    """

    output: str | None = None
    trace: str | None = None
    prompts: str | None = None
    name: str | None = None
    sample_hz: str | None = None
    step_memory: str | None = None
    quiet: str | None = None
    full: str | None = None
    launched: str | None = None
    keep_generations: str | None = None
    thumbnails: str | None = None
    stacks: str | None = None
    keep: str | None = None

    def is_on(self, name: str) -> bool:
        """Whether one of those that are yes or no is yes."""
        return getattr(self, name) not in (None, "0")

    def as_environment(self, prefix: str) -> dict[str, str]:
        """The variables that say this."""
        settings = self._asdict()
        return {f"{prefix}{name.upper()}": value for name, value in settings.items() if value is not None}


def settings_from(environment: Mapping[str, str], prefix: str) -> Settings:
    """What the variables that begin so say. An empty one says nothing."""
    return Settings(**{name: environment.get(f"{prefix}{name.upper()}") or None for name in Settings._fields})


def take_settings(environment: MutableMapping[str, str], prefix: str) -> Settings:
    """The same, and the variables are gone from the environment."""
    settings = settings_from(environment, prefix)
    for name in Settings._fields:
        environment.pop(f"{prefix}{name.upper()}", None)
    return settings
