"""What each host makes of a LoRA file: how many modules its loader takes, and by which factor it multiplies up·down.

`host_readings` judges a file by its names, alphas and header, for the versions of `HOSTS`. What a host reads of a family
is in the family's record (`Family.reads`, `Family.lost`), as measured of its loader. What is not there is unknown, with
the reason, and never 0.

The factor differs where the hosts look for alpha in different places. ComfyUI reads `.alpha` tensors only (its issue
12191). diffusers reads PEFT's configuration in the header too (`lora_adapter_metadata`), and with `use_rslora` divides by
√r. Neither scales a whole difference.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import scale_of
from sigmascope.lora.families import family_named, row_of_diffusers, row_of_original, unflattened
from sigmascope.lora.families.family import Family, Reads, Row
from sigmascope.lora.file import PEFT_CONFIGS, LoraFile
from sigmascope.lora.formats import is_attention_projection
from sigmascope.lora.layer_names import block_of_module
from sigmascope.lora.module_names import FileFamily, file_family, flat, parse_name, unflattened_denoiser
from sigmascope.lora.reader import PeftConfig, open_any_kind, read_configs
from sigmascope.lora.verdict import verdict_finding
from sigmascope.records.run import Finding
from sigmascope.units import counted

__all__ = ["HOSTS", "HostReading", "host_findings", "host_readings"]


class Host(NamedTuple):
    """A host, and the version whose loader was measured."""

    name: Literal["diffusers", "comfyui"]
    version: str
    title: str


HOSTS: Final = (
    Host("diffusers", "0.42", "diffusers 0.42 with PEFT"),
    Host("comfyui", "0.33", "ComfyUI 0.33"),
    Host("comfyui", "0.3.64", "ComfyUI 0.3.64"),
)
_STARTS: Final = (
    "lora_unet_",
    "lora_transformer_",
    "lycoris_",
    "diffusion_model.",
    "transformer.",
    "unet.",
    "base_model.model.",
    "",
)
_PEFT_START: Final = "base_model.model."
_FACTORS: Final = frozenset({"A", "A+alpha", "A.default", "down", "down+alpha", "lokr", "lokr+alpha"})
_ENDS: Final[Mapping[str, Mapping[str, str]]] = {
    "lora": {"lora_A.weight": "A", "lora_A.default.weight": "A.default", "lora_down.weight": "down"},
    "tucker": {"lora_mid.weight": "tucker"},
    "loha": {"hada_w1_a": "loha"},
    "lokr": {"lokr_w1": "lokr", "lokr_w1_a": "lokr"},
    "dora": {"dora_scale": "dora"},
    "diff": dict.fromkeys(("diff", "diff_b", "w_norm", "b_norm"), "diff"),
    "set": {"set_weight": "set"},
    "oft": dict.fromkeys(("oft_blocks", "oft_diag"), "oft"),
    "boft": dict.fromkeys(("oft_blocks", "oft_diag", "boft_blocks"), "boft"),
    "glora": {"a1.weight": "glora"},
}
"""What a loader looks for, and what `Reads.endings` calls it, by the kind of change."""
_BIAS: Final = ".bias"
_TO_FACTORS: Final = frozenset({"lora", "tucker", "loha", "lokr", "diff"})
"""Kinds of change that become plain factors without the model."""
_WHOLE_RANK: Final = 9999
"""Keeps all of a change; see `convert_lora`."""
_NEVER_IN_DIFFUSERS: Final = frozenset({"diff", "loha", "oft", "boft", "glora"})
_SGM: Final = ("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "label_emb.", "out.")


@dataclass(frozen=True, slots=True)
class HostReading:
    """What one host makes of a file.

    Attributes:
        host: Its title, with the version.
        modules: How many modules the file has for the denoiser.
        taken: How many of them the host applies; None if that is not known.
        strengths: By which factor it multiplies up·down (or a whole change), and how many modules have it, the most
            frequent first; None if that is not known.
        unavailable: The reason for each field that is not known, and for what the figures leave out.
    """

    host: str
    modules: int
    taken: int | None
    strengths: Mapping[float, int] | None
    unavailable: Mapping[str, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """The reading as JSON values."""
        return asdict(self) | {"unavailable": dict(self.unavailable)}


@dataclass(frozen=True, slots=True)
class _Module:
    """A module of the denoiser, as loaders see it.

    Attributes:
        name: As in the file.
        start: How the name begins, one of `_STARTS`.
        path: The rest, dotted where it could be told.
        namings: Those of `Reads.naming` whose layers it names.
        ending: As `ending_of` gives it.
        kind: As in `ModuleFacts`.
        rank: Of its factors; None without any.
        alpha: Of its `.alpha` tensor; None without one.
        shape: Of its weight.
    """

    name: str
    start: str
    path: str
    namings: frozenset[str]
    ending: str
    kind: str
    rank: int | None
    alpha: float | None
    shape: tuple[int, ...]

    @property
    def by_alpha(self) -> float:
        """The factor alpha / rank; 1 without an alpha or without a rank."""
        return 1.0 if self.alpha is None or self.rank is None else self.alpha / self.rank


class _Unknown(Exception):
    """What a host does was not measured; the message says of what."""


def host_readings(path: str | PathLike[str]) -> tuple[HostReading, ...]:
    """Say what each of `HOSTS` makes of a file.

    Args:
        path: A LoRA of any format. Only names, shapes, alphas and the header are read.

    Raises:
        CheckpointError: The file is missing or damaged.
        LoraFormatError: Its keys follow no known format.
    """
    with open_any_kind(Path(path), check_finite=False) as lora, open_checkpoint(Path(path)) as checkpoint:
        told = file_family(lora)
        family = family_named("sd15" if told.family is None and told.is_unet else told.family)
        modules = tuple(_modules(lora, checkpoint, family))
        others = len(lora.names) - len(modules)
        configs = _configs(checkpoint)
    left_out = {"others": f"{counted(others, 'module')} of other parts of the model"} if others else {}
    return tuple(_reading(host, modules, family, told, configs, left_out) for host in HOSTS)


def _configs(checkpoint: Checkpoint) -> dict[str, PeftConfig] | str:
    """What diffusers reads of the header, by component; why it cannot be read, if so."""
    if PEFT_CONFIGS not in checkpoint.metadata:
        return {}
    try:
        return read_configs(checkpoint.path, checkpoint.metadata)
    except LoraFormatError as error:
        return error.message


def _reading(
    host: Host,
    modules: Sequence[_Module],
    family: Family,
    told: FileFamily,
    configs: Mapping[str, PeftConfig] | str,
    left_out: Mapping[str, str],
) -> HostReading:
    try:
        if not modules:
            raise _Unknown("the file changes no denoiser")
        if not any(row.host == host.name for row in family.reads):
            what = (
                "the model family is not known" if told.family is None else f"{family.title} was not measured"
            )
            raise _Unknown(what)
        read = _comfyui if host.name == "comfyui" else _diffusers
        taken = read(host, modules, family)
    except _Unknown as reason:
        return HostReading(host.title, len(modules), None, None, {"taken": str(reason), **left_out})
    try:
        if host.name == "comfyui":
            factors = [_comfyui_strength(module) for module in taken]
        else:
            factors = _diffusers_strengths(taken, modules, family, configs)
    except (_Unknown, LoraFormatError) as reason:
        return HostReading(host.title, len(modules), len(taken), None, {"strengths": str(reason), **left_out})
    strengths = dict(Counter(factors).most_common())
    return HostReading(host.title, len(modules), len(taken), strengths, left_out)


def _modules(lora: LoraFile, checkpoint: Checkpoint, family: Family) -> Iterator[_Module]:
    keys = frozenset(checkpoint.keys())
    for name in lora.names:
        parts = parse_name(name).parts
        if parts and not parts[0].startswith("denoiser"):
            continue
        own = _name_in_keys(name.removesuffix(_BIAS), keys)
        start = next(start for start in _STARTS if own.startswith(start))
        path, facts = own[len(start) :], lora.facts_of(name)
        dotted, namings = _namings(path, family, is_flat=start.endswith("_"))
        ending = ending_of(own, facts.kind, keys)
        alpha = None
        if f"{own}.alpha" in keys:
            stored = checkpoint.tensor(f"{own}.alpha")
            alpha, ending = (float(stored), ending) if stored.numel() == 1 else (None, "other")
        yield _Module(own, start, dotted, namings, ending, facts.kind, facts.rank, alpha, facts.weight_shape)


def _name_in_keys(name: str, keys: frozenset[str]) -> str:
    """A module's name as its keys have it: PEFT's own start is not part of it in a `LoraFile`."""
    wrapped = f"{_PEFT_START}{name}."
    return _PEFT_START + name if any(key.startswith(wrapped) for key in keys) else name


def ending_of(name: str, kind: str, keys: frozenset[str]) -> str:
    """How a module's keys end: `A` and `down` for factors, else the kind; `other` if no key is named so.

    `+alpha` follows where the file has an alpha for it.
    """
    ends = _ENDS.get(kind, {})
    ending = next((ending for end, ending in ends.items() if f"{name}.{end}" in keys), "other")
    scaled = f"{name}.alpha" in keys and ending not in _NEVER_IN_DIFFUSERS
    return f"{ending}+alpha" if scaled else ending


def _namings(path: str, family: Family, *, is_flat: bool) -> tuple[str, frozenset[str]]:
    """The path with its dots, and in which of `Reads.naming` it is a layer's name."""
    if family.is_unet:
        dotted = (unflattened_denoiser(path) if is_flat else path) or path
        return dotted, frozenset({"original" if dotted.startswith(_SGM) else "diffusers"})
    dotted = (unflattened(path) if is_flat else path) or path
    shown = flat if is_flat else str
    rows = (row_of_original(family.name, dotted), row_of_diffusers(family.name, dotted))
    names = {
        naming
        for row in rows
        if row is not None
        for naming in _names_of(row)
        if path in map(shown, naming[1])
    }
    return dotted, frozenset(naming for naming, _ in names)


def _names_of(row: Row) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "original", (row.original,)
    yield "diffusers", row.parts
    yield "also", (row.also or row.original,)


def _comfyui(host: Host, modules: Sequence[_Module], family: Family) -> tuple[_Module, ...]:
    """It looks up each name by itself."""
    if family.in_comfyui_since not in (None, host.version):
        raise _Unknown(f"this version has no {family.title}")
    return tuple(module for module in modules if _comfyui_takes(host, module, family))


def _comfyui_takes(host: Host, module: _Module, family: Family) -> bool:
    if module.ending.startswith("other"):
        raise _Unknown(f"tensors such as those of {module.name} were not measured")
    rows = [
        row
        for row in family.reads
        if (row.host, row.start) == (host.name, module.start)
        and row.naming in module.namings
        and row.since in (None, host.version)
    ]
    if rows and not any(row.known for row in rows):
        raise _Unknown(f"names such as {module.name} were not measured for {family.title}")
    if not rows and not module.namings:
        raise _Unknown(f"{module.name} is no known layer of {family.title}")
    dotted_unet = family.is_unet and module.start in ("unet.", "") and module.namings == {"diffusers"}
    return bool(rows) and not (dotted_unet and family.loses("comfyui", "peft", module.path))


def _comfyui_strength(module: _Module) -> float:
    if module.kind in ("oft", "boft", "glora"):
        raise _Unknown(f"{module.kind.upper()} has no such factor")
    return 1.0 if module.kind in ("diff", "set") else module.by_alpha


def _diffusers(host: Host, modules: Sequence[_Module], family: Family) -> tuple[_Module, ...]:
    """It converts a file as a whole, so what was measured holds for files of one kind of names."""
    endings, starts = {module.ending for module in modules}, {module.start for module in modules}
    if endings <= _NEVER_IN_DIFFUSERS:
        return ()
    if len(endings) > 1 or len(starts) > 1:
        raise _Unknown("its modules have different kinds of names or tensors")
    start, ending = starts.pop(), endings.pop()
    if ending not in _FACTORS:
        raise _Unknown(f"tensors such as those of {modules[0].name} were not measured")
    for module in modules:
        if not module.namings:
            raise _Unknown(f"{module.name} is no known layer of {family.title}")
    rows = _rows(host, start, ending, modules, family)
    if not rows:
        return ()
    row = next((row for row in rows if row.known), None)
    if row is None:
        raise _Unknown(f"names such as {modules[0].name} were not measured for {family.title}")
    if row.width is not None and not all(row.width in module.shape for module in modules):
        raise _Unknown(f"its loader divides such layers at a width of {row.width} only")
    is_peft = (start, ending) == (f"{family.component}.", "A")
    if row.block_layers is not None:
        in_block = Counter(block_of_module(module.path) for module in modules).values()
        if min(in_block) < row.block_layers:
            return ()
        if max(in_block) > row.block_layers:
            raise _Unknown(f"blocks of more than {row.block_layers} layers were not measured")
    outside = next(
        (module.name for module in modules if not any(map(str.isdigit, module.path.split(".")))), None
    )
    if outside is not None and not is_peft and not family.is_unet:
        raise _Unknown(f"layers outside of blocks, such as {outside}, were not measured")
    return tuple(module for module in modules if not _diffusers_loses(module, family))


def _rows(
    host: Host, start: str, ending: str, modules: Sequence[_Module], family: Family
) -> tuple[Reads, ...]:
    return tuple(
        row
        for row in family.reads
        if (row.host, row.start) == (host.name, start)
        and all(row.naming in module.namings for module in modules)
        and (not row.endings or ending in row.endings.split())
    )


def _diffusers_loses(module: _Module, family: Family) -> bool:
    down = "lora_A" if module.ending.startswith("A") else "lora_down"
    return module.start == "diffusion_model." and family.loses("diffusers", "comfyui", module.path, down)


def _diffusers_strengths(
    taken: Sequence[_Module],
    modules: Sequence[_Module],
    family: Family,
    configs: Mapping[str, PeftConfig] | str,
) -> list[float]:
    if isinstance(configs, str):
        raise _Unknown(configs)
    config = configs.get(family.component, configs.get(""))
    has_alphas = any(module.alpha is not None for module in taken)
    if config is not None and has_alphas:
        raise _Unknown("it has alphas in its header and beside its factors")
    if config is not None:
        return [_by_config(config, module) for module in taken]
    if not has_alphas or not taken:
        return [1.0 for _ in taken]
    (row, *_) = [
        row
        for row in family.reads
        if (row.host, row.start) == ("diffusers", taken[0].start) and taken[0].ending in row.endings.split()
    ]
    if not row.folds_alpha:
        return [1.0 for _ in taken]
    if not family.is_unet:
        return [module.by_alpha for module in taken]
    usual = Counter(module.alpha for module in modules).most_common(2)
    if len(usual) > 1 and usual[0][1] == usual[1][1]:
        raise _Unknown("two alphas are equally frequent, and attention gets the most frequent one")
    return [_of_unet(module, usual[0][0]) for module in taken]


def _by_config(config: PeftConfig, module: _Module) -> float:
    scale = config.scale_of(module.path, module.rank)
    return 1.0 if scale is None else scale


def _of_unet(module: _Module, usual_alpha: float | None) -> float:
    """See `formats.alphas_mislead`: attention is scaled by the alpha that most modules have."""
    if usual_alpha is None or module.rank is None or not is_attention_projection(module.name):
        return module.by_alpha
    return scale_of(usual_alpha, module.rank)


def host_findings(
    readings: Sequence[HostReading], path: Path, family: str | None, kinds: Collection[str]
) -> tuple[Finding, ...]:
    """`lora_hosts_differ`, if the newest hosts take other modules, or apply them with another strength.

    Args:
        readings: Of the file, as `host_readings` gives them.
        path: The file, for the command.
        family: The model family that it is for.
        kinds: Of its modules.
    """
    first, second = (
        reading for reading, host in zip(readings, HOSTS, strict=True) if host.version != "0.3.64"
    )
    modules = first.taken is not None and second.taken is not None and first.taken != second.taken
    strengths = (
        bool(first.taken and second.taken)
        and None not in (first.strengths, second.strengths)
        and first.strengths != second.strengths
    )
    if not modules and not strengths:
        return ()
    return (
        verdict_finding(
            "lora_hosts_differ",
            {"diffusers": first.taken, "comfyui": second.taken, "modules": first.modules},
            first=_in_words(first),
            second=_in_words(second),
            how=_conversion(path, family_named(family), kinds),
        ),
    )


def _in_words(reading: HostReading) -> str:
    at = f" with strength {strengths_in_words(reading)}" if reading.taken and reading.strengths else ""
    return f"{reading.host} takes {reading.taken} of {counted(reading.modules, 'module')}{at}"


def strengths_in_words(reading: HostReading) -> str:
    """The factors and how many modules have each, such as `4` or `1 (19), 0.333 (38)`."""
    if not reading.taken:
        return "-"
    if reading.strengths is None:
        return "unknown"
    shown = list(reading.strengths.items())
    if len(shown) == 1:
        return f"{shown[0][0]:.3g}"
    more = f", and {len(shown) - 3} more" if len(shown) > 3 else ""
    return ", ".join(f"{factor:.3g} ({count})" for factor, count in shown[:3]) + more


def _conversion(path: Path, family: Family, kinds: Collection[str]) -> str:
    format = _read_by_both(family)
    if format is None or not _TO_FACTORS.issuperset(kinds):
        return " for each host: to peft for diffusers, to comfyui for ComfyUI (sigmascope lora convert)"
    rank = "" if set(kinds) == {"lora"} else f" --rank {_WHOLE_RANK}"
    return f" to what both apply alike: sigmascope lora convert {path.name} NEW.safetensors --format {format}{rank}"


_WRITTEN: Final = (
    ("peft", None, "diffusers", "A"),
    ("kohya", "lora_unet_", None, "down+alpha"),
    ("comfyui", "diffusion_model.", "original", "down+alpha"),
)
"""How Sigmascope's formats begin names, with which naming and endings; None for the family's own."""


def _read_by_both(family: Family) -> str | None:
    """The first format that both hosts read whole."""
    for format, start, naming, ending in _WRITTEN:
        wanted = (start or f"{family.component}.", naming or family.kohya_naming)
        readers = {
            row.host
            for row in family.reads
            if (row.start, row.naming) == wanted
            and row.known
            and (not row.endings or ending in row.endings.split())
        }
        lost = any(lost.format == format and lost.down in (None, "lora_down") for lost in family.lost)
        if len(readers) > 1 and not lost:
            return format
    return None
