"""Which of the package's optional dependencies are installed, by its own metadata."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from sigmascope.probes.reading import attempt

_REQUIREMENT = re.compile(r"^([A-Za-z0-9._-]+)\s*(?:\[([^\]]+)\])?.*?;.*extra\s*==\s*['\"]([^'\"]+)['\"]")
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
    requirements = list(_requirements(metadata.requires(distribution) or [], distribution))
    names = [
        name
        for name in metadata.metadata(distribution).get_all("Provides-Extra") or []
        if name not in _FOR_DEVELOPERS
    ]
    return [
        ExtraFacts(name, {package: _version(package) for package in _packages(name, requirements, set())})
        for name in names
    ]


def _requirements(texts: list[str], distribution: str) -> Iterator[tuple[str, str | None, tuple[str, ...]]]:
    """(extra, package, extras of this distribution that it contains)."""
    for text in texts:
        found = _REQUIREMENT.match(text)
        if found is None:
            continue
        package, contained, extra = found[1], found[2], found[3]
        if package.lower() == distribution:
            yield extra, None, tuple(part.strip() for part in (contained or "").split(","))
        else:
            yield extra, package, ()


def _packages(
    name: str, requirements: list[tuple[str, str | None, tuple[str, ...]]], seen: set[str]
) -> list[str]:
    seen.add(name)
    found: list[str] = []
    for extra, package, contained in requirements:
        if extra != name:
            continue
        if package is not None:
            found.append(package)
        for inner in contained:
            if inner not in seen:
                found += _packages(inner, requirements, seen)
    return list(dict.fromkeys(found))


def _version(package: str) -> str | None:
    return attempt(lambda: metadata.version(package), metadata.PackageNotFoundError).value
