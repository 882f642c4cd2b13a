"""Which of the package's optional dependencies are installed, by its own metadata."""

from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

from sigmascope.probes.reading import attempt

_FOR_DEVELOPERS = frozenset({"test", "dev", "docs", "bench", "all"})


@dataclass(frozen=True, slots=True)
class ExtraFacts:
    """One extra.

    Attributes:
        name: As in `pip install 'sigmascope[name]'`.
        versions: Of its packages; None: not installed. Those of the extras that it contains are among them.
    """

    name: str
    versions: dict[str, str | None]

    @property
    def missing(self) -> list[str]:
        """Packages that are not installed."""
        return [package for package, version in self.versions.items() if version is None]


def extras_facts(distribution: str = "sigmascope") -> list[ExtraFacts]:
    """The extras that users install, in the order of the metadata. Never raises; empty without metadata.

    Args:
        distribution: Whose extras.
    """
    return attempt(lambda: _extras(distribution), metadata.PackageNotFoundError).value or []


def _extras(distribution: str) -> list[ExtraFacts]:
    requirements = [Requirement(text) for text in metadata.requires(distribution) or []]
    names = [
        name
        for name in metadata.metadata(distribution).get_all("Provides-Extra") or []
        if name not in _FOR_DEVELOPERS
    ]
    return [
        ExtraFacts(
            name,
            {
                package: _version(package)
                for package in _packages(name, requirements, distribution, frozenset())
            },
        )
        for name in names
    ]


def _packages(
    extra: str, requirements: list[Requirement], distribution: str, seen: frozenset[str]
) -> dict[str, None]:
    """What an extra brings, in order, with what the extras that it contains bring."""
    found: dict[str, None] = {}
    for requirement in requirements:
        if not _belongs_to(requirement, extra):
            continue
        if requirement.name != distribution:
            found[requirement.name] = None
        for contained in (
            sorted(requirement.extras - seen - {extra}) if requirement.name == distribution else ()
        ):
            found |= _packages(contained, requirements, distribution, seen | {extra})
    return found


def _belongs_to(requirement: Requirement, extra: str) -> bool:
    """Whether it is the extra that asks for it, and this machine is one that it is meant for."""
    marker = requirement.marker
    return marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""})


def _version(package: str) -> str | None:
    return attempt(lambda: metadata.version(package), metadata.PackageNotFoundError).value
