"""Where hosts make different things of a LoRA file, or none reads its alpha, and the command that mends it.

`readings_and_findings` compares the readings of `hosts`. The words of each finding are those of `sigmascope.lora.verdict`.
"""

import shlex
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Final

from sigmascope.checkpoints import Checkpoint
from sigmascope.lora.file import LoraFile
from sigmascope.lora.hosts import (
    HOSTS,
    IN_NO_HOST,
    HostReading,
    SeenFile,
    SeenModule,
    before_hosts,
    configs_of,
    namings_of,
    paths_in,
    reading_of,
    strengths_in_words,
)
from sigmascope.lora.reader import read_configs
from sigmascope.lora.verdict import verdict_finding
from sigmascope.records.run import Finding, JsonScalar
from sigmascope.units import counted

__all__ = ["kind_unread", "loading_nothing", "readings_and_findings"]

_TO_FACTORS: Final = frozenset({"lora", "tucker", "loha", "lokr", "diff"})
"""Kinds of change that become plain factors without the model."""
_HELD_BY_PEFT: Final = frozenset({"lora", "tucker", "dora"})
"""Kinds of change that PEFT's format holds without loss of any of their rank."""
_WHOLE_RANK: Final = 9999
"""Keeps all of a change; see `convert_lora`."""


def readings_and_findings(
    lora: LoraFile, checkpoint: Checkpoint, family: str | None = None
) -> tuple[tuple[HostReading, ...], tuple[Finding, ...]]:
    """`host_readings` of an open file, `lora_hosts_differ` if the newest hosts do not apply it alike, and alphas that none reads.

    Args:
        lora: In the file, with what is broken of it.
        checkpoint: The file.
        family: Of the model that it is for; not heeded where the file tells it.
    """
    files = before_hosts(lora, checkpoint, family)
    readings = tuple(reading_of(file) for file in files)
    # No conversion mends a file of which a part cannot be read.
    differ = () if lora.broken or lora.broken_config else _host_findings(readings, files, checkpoint.path)
    return readings, (*differ, *_unread_alpha(lora, checkpoint), *_unread_lokr_alpha(checkpoint))


def _host_findings(
    readings: Sequence[HostReading], files: "Sequence[SeenFile]", path: Path
) -> Iterator[Finding]:
    first, second = _newest(readings)
    endings = {module.ending for module in (*files[0].modules, *files[0].encoders)}
    if endings and endings <= IN_NO_HOST.keys():
        yield kind_unread(endings)
    elif any(_differ(*pair) for pair in zip(first.parts, second.parts, strict=True)):
        yield verdict_finding(
            "lora_hosts_differ",
            {"diffusers": first.taken, "comfyui": second.taken, "modules": first.modules},
            first=_in_words(first),
            second=_in_words(second),
            how=_conversion(files, path),
        )
    elif refusing := loading_nothing(readings):
        refused = {one.host: _refused(one) for one in (first, second) if one.host in refusing}
        said = [host if why is None else f"{host} ({why})" for host, why in refused.items()]
        yield verdict_finding(
            "lora_no_host",
            {"hosts": ", ".join(refusing), "modules": first.modules},
            hosts=" and ".join(said),
            load="loads" if len(refusing) == 1 else "load",
            names=" by the names that it has" if None in refused.values() else "",
            how=_conversion(files, path),
        )


def kind_unread(endings: Collection[str]) -> Finding:
    """That a file holds only kinds of change that no host applies.

    Args:
        endings: Of its modules, all of them among `IN_NO_HOST`.
    """
    kinds = [IN_NO_HOST[ending] for ending in sorted(endings)]
    drop = " --drop_unsupported (which leaves out changes of biases)" if "ia3" in endings else ""
    return verdict_finding(
        "lora_kind_unread", {"kinds": ", ".join(kinds)}, kinds=" and ".join(kinds), drop=drop
    )


_HEADER_ALPHAS: Final = ("alpha", "lora_alpha", "network_alpha", "ss_network_alpha")
_WHOLE_LOKR: Final = ".lokr_w1"
_HEADER_RANKS: Final = ("rank", "lora_rank", "network_dim", "ss_network_dim")
"""Fields of headers in which trainers note how a LoRA was trained. Loaders take alphas from tensors, or from PEFT's configuration."""


def _unread_alpha(lora: LoraFile, checkpoint: Checkpoint) -> Iterator[Finding]:
    """That the header alone has the alpha that the LoRA was trained with, as that of MiniMax H3 Turbo (sglang's pull request 35952),
    or PEFT's `adapter_config.json` beside the file (below ComfyUI's pull request 8094).
    """
    ranks = {name: own for name in lora.modules if (own := lora.rank_of(name)) is not None}
    if not ranks or configs_of(checkpoint) or any(key.endswith(".alpha") for key in checkpoint):
        return
    usual = Counter(ranks.values()).most_common(1)[0][0]
    beside = read_configs(checkpoint.path, checkpoint.metadata).get("")
    if beside is not None:
        scales = Counter((lora.alpha_of(name) / own, own) for name, own in ranks.items())
        (scale, own), _ = scales.most_common(1)[0]
        by_root = beside.values.get("use_rslora") is True
        whole = scale * (own**0.5 if by_root else own)
        stated = f"PEFT's adapter_config.json beside the file has alpha {whole:g} for rank {own}"
        if scale != 1.0:
            stated += " with rsLoRA" if by_root else ""
            yield _alpha_finding(whole, float(own), scale, stated, _BY_CONVERSION)
        return
    alpha = _first_number(checkpoint.metadata, _HEADER_ALPHAS)
    rank = _first_number(checkpoint.metadata, _HEADER_RANKS) or float(usual)
    if alpha is not None and alpha != rank and alpha not in ranks.values():
        stated = f"The header has alpha {alpha:g} for rank {rank:g}"
        yield _alpha_finding(alpha, rank, alpha / rank, stated, _BY_STRENGTH)


_BY_CONVERSION: Final = (
    "Convert the file, which puts it into the factors: sigmascope lora convert FILE NEW --format peft."
)
_BY_STRENGTH: Final = (
    "If it is too strong or too weak, load it at strength {strength}. Of the header, diffusers reads this for MiniMax H3 alone, "
    "ComfyUI never."
)


def _alpha_finding(alpha: float, rank: float, strength: float, stated: str, advice: str) -> Finding:
    evidence: dict[str, JsonScalar] = {"alpha": alpha, "rank": rank, "strength": strength}
    shown = f"{strength:.3g}"
    advice = advice.format(strength=shown)
    return verdict_finding("lora_alpha_unread", evidence, stated=stated, strength=shown, advice=advice)


def _unread_lokr_alpha(checkpoint: Checkpoint) -> Iterator[Finding]:
    """That LoKr with two whole factors has an alpha that is not the rank, which LyCORIS writes there (ComfyUI's issue 15114)."""
    rank = _first_number(checkpoint.metadata, _HEADER_RANKS)
    whole = [key.removesuffix(_WHOLE_LOKR) for key in checkpoint if key.endswith(_WHOLE_LOKR)]
    names = [name for name in whole if f"{name}.lokr_w2" in checkpoint and f"{name}.alpha" in checkpoint]
    if rank is None or not names:
        return
    alphas = Counter(float(checkpoint.tensor(f"{name}.alpha").float().mean()) for name in names)
    alpha, count = alphas.most_common(1)[0]
    if isfinite(alpha) and alpha > 0 and alpha != rank:
        evidence: dict[str, JsonScalar] = {
            "alpha": alpha,
            "rank": rank,
            "strength": alpha / rank,
            "modules": count,
        }
        yield verdict_finding(
            "lora_lokr_alpha_unread",
            evidence,
            modules=counted(count, "module"),
            have="has" if count == 1 else "have",
            alpha=f"{alpha:g}",
            rank=f"{rank:g}",
            strength=f"{alpha / rank:.3g}",
        )


def _first_number(header: Mapping[str, str], fields: Sequence[str]) -> float | None:
    """The first of the fields that is a number above 0."""
    for text in filter(None, map(header.get, fields)):
        with suppress(ValueError):
            number = float(text)
            if isfinite(number) and number > 0:
                return number
    return None


def loading_nothing(readings: Sequence[HostReading]) -> list[str]:
    """The newest hosts whose loaders take no module of the file."""
    return [
        reading.host
        for reading in _newest(readings)
        if any(part.modules for part in reading.parts)
        and not any(part.taken != 0 for part in reading.parts if part.modules)
    ]


def _newest(readings: Iterable[HostReading]) -> list[HostReading]:
    return [reading for reading, host in zip(readings, HOSTS, strict=True) if host.version != "0.3.64"]


def _differ(first: HostReading, second: HostReading) -> bool:
    if None in (first.taken, second.taken):
        return False
    known = None not in (first.strengths, second.strengths)
    return first.taken != second.taken or bool(first.taken and known and first.strengths != second.strengths)


def _in_words(reading: HostReading) -> str:
    parts = [part for part in reading.parts if part.modules]
    counts = [counted(part.modules, "module") for part in parts]
    if reading.encoders is not None:
        counts[-1] += " of text encoders"
    said = [
        f"{'an unknown number' if part.taken is None else part.taken} of {count}"
        + (f" with strength {strengths_in_words(part)}" if part.taken and part.strengths else "")
        for part, count in zip(parts, counts, strict=True)
    ]
    refused = _refused(reading)
    return f"{reading.host} takes {' and '.join(said)}" + ("" if refused is None else f" ({refused})")


def _refused(reading: HostReading) -> str | None:
    return next(
        (part.unavailable["refused"] for part in reading.parts if "refused" in part.unavailable), None
    )


def _conversion(files: "Sequence[SeenFile]", path: Path) -> str:
    modules = (*files[0].modules, *files[0].encoders)
    format = _read_by_both(files) if _TO_FACTORS.issuperset(module.kind for module in modules) else None
    if format is None:
        options = " and ".join(_options_of_factors(modules))
        with_ = f", with {options}" if options else ""
        return (
            f" for each host: to peft for diffusers{with_}, to comfyui for ComfyUI (sigmascope lora convert)"
        )
    options = "".join(f" {option}" for option in _options_of_factors(modules)) if format == "peft" else ""
    return f" to what both apply alike: sigmascope lora convert {shlex.quote(path.name)} NEW.safetensors --format {format}{options}"


def _options_of_factors(modules: Sequence[SeenModule]) -> list[str]:
    """The options without which PEFT's format cannot hold the modules; kohya's and ComfyUI's hold them as they are."""
    kinds = {module.kind for module in modules} - _HELD_BY_PEFT
    rank = [f"--rank {_WHOLE_RANK}"] if kinds else []
    return [*rank, *([] if kinds <= _TO_FACTORS else ["--model MODEL"])]


_WRITTEN: Final = (
    ("peft", None, "diffusers", "A"),
    ("kohya", "lora_unet_", None, "down+alpha"),
    ("comfyui", "diffusion_model.", "original", "down+alpha"),
)
"""How Sigmascope's formats begin names, with which naming and endings; None for the family's own."""


def _read_by_both(files: Sequence[SeenFile]) -> str | None:
    """The first format in which the newest hosts read the whole file, and alike."""
    for format, start, naming, ending in _WRITTEN:
        written = _as_written(files[0], format, start, naming, ending)  # files differ by their host alone
        first, second = (
            reading_of(written._replace(host=host)) for host in HOSTS if host.version != "0.3.64"
        )
        whole = all(part.taken == part.modules for reading in (first, second) for part in reading.parts)
        if whole and not any(_differ(*pair) for pair in zip(first.parts, second.parts, strict=True)):
            return format
    return None


def _as_written(file: SeenFile, format: str, start: str | None, naming: str | None, ending: str) -> SeenFile:
    """The file as `convert_lora` writes it, with alpha = rank."""
    family = file.family
    start, naming = start or f"{family.component}.", naming or family.kohya_naming
    paths = {path: module for module in file.modules for path in paths_in(naming, module, family)}
    modules = [
        replace(
            _in_format(module, format, ending),
            name=start + path,
            start=start,
            path=path,
            namings=namings_of(path, family, is_flat=False)[1],
        )
        for path, module in paths.items()
    ]
    starts = {"peft": {part: f"{part}." for part in family.encoders}, "kohya": family.kohya_encoders}
    parts = {frozenset({name}): part for part, names in family.encoders.items() for name in names}
    starts_of = {
        encoder: starts.get(format, {}).get(part, "text_encoders.{}.transformer.")
        for encoder, part in parts.items()
    }
    encoders = [
        replace(_in_format(module, format, ending), start=starts_of.get(module.namings, ""))
        for module in file.encoders
    ]
    return file._replace(modules=modules, encoders=encoders, configs=None, stored="plain", unused=())


def _in_format(module: SeenModule, format: str, ending: str) -> SeenModule:
    """As plain factors, which PEFT's format makes of all; the others hold other kinds of change as they are."""
    if format != "peft" and module.kind != "lora":
        return module
    alpha = None if ending == "A" or module.rank is None else float(module.rank)
    return replace(module, ending=ending, kind="lora", alpha=alpha)
