"""Every pipeline of the process: of the classes that are loaded, and of those that come."""

from collections.abc import Iterator
from typing import ClassVar, Final

from sigmascope.integrations.watching.imports import when_loaded
from sigmascope.integrations.watching.instrument import Instrument
from sigmascope.integrations.watching.listeners import After, Arguments, Keywords

_BASES: Final = (
    ("diffusers.pipelines.pipeline_utils", "DiffusionPipeline", "register_modules"),
    ("diffusers.modular_pipelines.modular_pipeline", "ModularPipeline", "register_components"),
)
"""The bases of all pipelines, and what each calls when a pipeline is made."""


class Everywhere(Instrument):
    """Lets the other instruments know the classes of pipelines, where no pipeline was named."""

    name: ClassVar[str] = "everywhere"

    def start(self) -> None:
        """Know all classes that there are, and hear when a pipeline of another is made."""
        if not self.session.is_everywhere:
            return
        for module, base, made in _BASES:
            self.keep_undo(base, when_loaded(module, base, lambda kind, made=made: self._know(kind, made)))  # type: ignore[misc]

    def _know(self, base: type, made: str) -> None:
        try:
            for kind in (base, *_subclasses(base)):
                if "__call__" in vars(kind):
                    self.session.watch_class(kind)
            self.tap_class(base, made, self._before)
        except Exception as failure:  # noqa: BLE001 - this runs in the host's import
            self.failed(failure)

    def _before(self, pipeline: object, args: Arguments, kwargs: Keywords) -> After | None:
        self.session.watch_class(type(pipeline))
        return None


def _subclasses(kind: type) -> Iterator[type]:
    below: list[type] = kind.__subclasses__()
    for one in below:
        yield one
        yield from _subclasses(one)
