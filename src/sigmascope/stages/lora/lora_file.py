"""What the LoRA's file says of itself."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from sigmascope.lora.file import LoraFile
from sigmascope.lora.formats.header import family_in
from sigmascope.lora.formats.unread_kinds import open_any
from sigmascope.lora.inspection.training_metadata import read_training_facts
from sigmascope.records.arithmetic import mib
from sigmascope.stages.host_reading import read_host
from sigmascope.stages.lora.typed import LoraFileFacts

_INSIDE = ("format", "rank", "alpha", "modules", "base_hint")
NOT_GIVEN = "no file was given"


def lora_file_facts(path: object) -> LoraFileFacts:
    """Name, size, format, ranks, alphas and base model of a LoRA file. Never raises.

    Args:
        path: A file, a folder that holds one, or None.
    """
    facts = _nothing()
    if path is None:
        facts["unavailable"] = dict.fromkeys(("filename", "file_exists", "file_size", *_INSIDE), NOT_GIVEN)
        return facts
    place = read_host(lambda: Path(path))  # type: ignore[arg-type]
    if place.value is None:
        reason = f"{type(path).__name__} is no path"
        facts["unavailable"] = dict.fromkeys(("filename", "file_exists", "file_size", *_INSIDE), reason)
        return facts
    facts["filename"] = place.value.name
    exists = read_host(place.value.exists)
    facts["file_exists"] = bool(exists.value)
    if not exists.value:
        reason = exists.reason or f"{place.value} does not exist"
        facts["unavailable"] = dict.fromkeys(("file_size", *_INSIDE), reason)
        return facts
    found = place.value
    inside = read_host(lambda: _read(found, facts))
    facts["file_size"] = mib(read_host(lambda: _bytes_of(found)).value)
    if inside.reason is not None:
        facts["unavailable"] |= dict.fromkeys(_INSIDE, inside.reason)
    return facts


def _read(path: Path, facts: LoraFileFacts) -> None:
    with open_any(path, check_finite=False) as lora:
        ranks = Counter(rank for name in lora.names if (rank := lora.rank_of(name)) is not None)
        alphas = Counter(alpha for name in lora.modules if (alpha := _alpha(lora, name)) is not None)
        facts["format"] = lora.format
        facts["modules"] = len(lora.names)
        facts["ranks"], facts["alphas"] = dict(sorted(ranks.items())), dict(sorted(alphas.items()))
        facts["rank"] = next((rank for rank, _ in ranks.most_common(1)), None)
        facts["alpha"] = next((alpha for alpha, _ in alphas.most_common(1)), None)
        facts["base_hint"] = _base_hint(lora.metadata)
    reasons = {
        "rank": "none of its changes has one",
        "alpha": "none of its changes has one",
        "base_hint": "its header names no base model",
    }
    facts["unavailable"] |= {name: why for name, why in reasons.items() if facts[name] is None}  # type: ignore[literal-required]


def _alpha(lora: LoraFile, name: str) -> float | None:
    return read_host(lambda: lora.modules[name].alpha).value


def _base_hint(metadata: Mapping[str, str]) -> str | None:
    said = read_training_facts(metadata).training
    return family_in(metadata) or said.get("base model") or said.get("base version")


def _bytes_of(path: Path) -> int:
    files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
    return sum(file.stat().st_size for file in files)


def _nothing() -> LoraFileFacts:
    return {
        "filename": None,
        "file_exists": None,
        "file_size": None,
        "format": None,
        "rank": None,
        "ranks": {},
        "alpha": None,
        "alphas": {},
        "modules": None,
        "base_hint": None,
        "unavailable": {},
    }
