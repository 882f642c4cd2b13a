"""What each host makes of a LoRA file: how many modules its loader takes, and by which factor it multiplies up·down.

`host_readings` judges a file by its names, alphas and header, for the versions of `HOSTS`. What a host reads of a family
is in the family's record (`Family.reads`, `Family.lost`), as measured of its loader. What is not there is unknown, with
the reason, and never 0.

The factor differs where the hosts look for alpha in different places. ComfyUI reads `.alpha` tensors only (its issue
12191). diffusers reads PEFT's configuration in the header too (`lora_adapter_metadata`), and with `use_rslora` divides by
√r. Neither scales a whole difference.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate
from math import isnan, nan, prod
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Literal, NamedTuple

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import DOWN, UP, scale_of
from sigmascope.lora.families import family_named, row_of_diffusers, row_of_original, unflattened
from sigmascope.lora.families.family import Family, Reads, Row
from sigmascope.lora.families.known import vector_of_diffusers, vector_of_original
from sigmascope.lora.families.text_encoders import ENCODER_READS, EncoderReads
from sigmascope.lora.file import PEFT_CONFIGS, BrokenPart, LoraFile, ModuleFacts
from sigmascope.lora.file_family import FileFamily, file_family
from sigmascope.lora.formats import DIFF_M, MODULATION, NORM_SCALE, is_attention_projection
from sigmascope.lora.layer_names import is_linear, kernel_of, to_diffusers, to_sgm
from sigmascope.lora.module_names import flat, is_of_controlnet, parse_name, unflattened_denoiser
from sigmascope.lora.reader import PeftConfig, lora_in, read_configs
from sigmascope.units import counted

__all__ = ["HOSTS", "HostReading", "host_readings"]


Storage = Literal["plain", "quantised", "gguf"]
"""How a file stores its numbers: as they are, quantised, or in GGUF, quantised or not."""


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
PEFT_START: Final = "base_model.model."
_FACTORS: Final = frozenset(
    f"{end}{alpha}" for end in ("A", "A.default", "down", "lora.down", "lokr") for alpha in ("", "+alpha")
)
_ENDS: Final[Mapping[str, Mapping[str, str]]] = {
    "lora": {
        "lora_A.weight": "A",
        "lora_A.default.weight": "A.default",
        "lora_down.weight": "down",
        "lora.down.weight": "lora.down",
    },
    "tucker": {"lora_mid.weight": "tucker"},
    "loha": {"hada_w1_a": "loha"},
    "lokr": {"lokr_w1": "lokr", "lokr_w1_a": "lokr"},
    "dora": {"dora_scale": "dora"},
    "diff": dict.fromkeys(("diff", "diff_b", "w_norm", "b_norm"), "diff"),
    "set": {"set_weight": "set", NORM_SCALE: NORM_SCALE},
    "oft": {**dict.fromkeys(("oft_blocks", "oft_diag"), "oft"), "oft_R.weight": "oft_R"},
    "boft": {**dict.fromkeys(("oft_blocks", "oft_diag", "boft_blocks"), "boft"), "boft_R": "boft_R"},
    "glora": {"a1.weight": "glora"},
    "ia3": dict.fromkeys(("on_input", "ia3_l"), "ia3"),
    "vera": {"vera_lambda_b": "vera"},
    "hra": {"hra_u": "hra"},
}
"""What a loader looks for, and what `Reads.endings` calls it, by the kind of change."""
_BIAS: Final = ".bias"
IN_NO_HOST: Final = {
    "boft_R": "PEFT's BOFT",
    "hra": "HRA",
    "ia3": "(IA)³",
    "oft_R": "PEFT's OFT",
    "vera": "VeRA",
}
"""What `ending_of` gives of kinds of change that no host's LoRA loader applies, and what they are called."""
_NEVER_IN_DIFFUSERS: Final = {"diff", DIFF_M, "loha", "oft", "boft", "glora"} | IN_NO_HOST.keys()
_SGM: Final = ("input_blocks.", "middle_block.", "output_blocks.", "time_embed.", "label_emb.", "out.")


@dataclass(frozen=True, slots=True)
class HostReading:
    """What one host makes of a file, or of its part for text encoders.

    Attributes:
        host: Its title, with the version.
        modules: How many modules the file has for the denoiser; in `encoders`, for text encoders.
        taken: How many of them the host applies; None if that is not known.
        strengths: By which factor it multiplies up·down (or a whole change), and how many modules have it, the most
            frequent first; None if that is not known.
        unavailable: The reason for each field that is not known, and for what the figures leave out. `loader`: why the
            host has none for such a model. `refused`: why it refuses the file.
        encoders: The same of the modules for text encoders; None if the file has none.
    """

    host: str
    modules: int
    taken: int | None
    strengths: Mapping[float, int] | None
    unavailable: Mapping[str, str] = field(default_factory=dict)
    encoders: "HostReading | None" = None

    def as_dict(self) -> dict[str, Any]:
        """The reading as JSON values."""
        return asdict(self) | {"unavailable": dict(self.unavailable)}

    @property
    def parts(self) -> "tuple[HostReading, ...]":
        """The readings of the denoiser's modules and of the text encoders', where the file has any."""
        encoders = () if self.encoders is None else (self.encoders,)
        return (self, *encoders) if self.modules or not encoders else encoders


@dataclass(frozen=True, slots=True)
class SeenModule:
    """A module of the denoiser or of a text encoder, as loaders see it.

    Attributes:
        name: As in the file.
        start: How the name begins, one of `_STARTS`; as in `EncoderReads.starts` for a text encoder.
        path: The rest, dotted where it could be told; with underscores for dots for a text encoder.
        namings: Those of `Reads.naming` whose layers it names; ComfyUI's name of a text encoder.
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


class _Refused(Exception):
    """The host refuses the file; the message says why."""


def host_readings(path: str | PathLike[str]) -> tuple[HostReading, ...]:
    """Say what each of `HOSTS` makes of a file.

    Args:
        path: A LoRA of any format. Only names, shapes, alphas and the header are read.

    Raises:
        CheckpointError: The file is missing or damaged.
        LoraFormatError: Its keys follow no known format.
    """
    with open_checkpoint(Path(path)) as checkpoint:
        lora = lora_in(checkpoint, check_finite=False, allow_broken=True)
        return tuple(reading_of(file) for file in before_hosts(lora, checkpoint))


def before_hosts(
    lora: LoraFile, checkpoint: Checkpoint, of_model: str | None = None
) -> "tuple[SeenFile, ...]":
    """The file before each of `HOSTS`, as one for the family that it tells, or else for that of its model."""
    told = file_family(lora)
    if told.family is None and of_model is not None:
        told = replace(told, family=of_model, evidence="the model")
    if any(is_of_controlnet(lora.stored_names.get(name, name)) for name in lora.names):
        return tuple(
            SeenFile(host, family_named(None), told, (), (), len(lora.names), None) for host in HOSTS
        )
    stored: Storage = (
        "gguf" if checkpoint.format == "gguf" else "quantised" if checkpoint.dequantised else "plain"
    )
    family = family_named("sd15" if told.family is None and told.is_unet else told.family)
    modules = tuple(_modules(lora, checkpoint, family))
    encoders = tuple(_encoder_modules(lora, checkpoint, family))
    others = len(lora.names) - len(modules) - len(encoders)
    configs = configs_of(checkpoint)
    if isinstance(configs, dict) and lora.broken_config is not None:
        configs = lora.broken_config.why
    return tuple(
        SeenFile(
            host, family, told, modules, encoders, others, configs, stored, lora.unused_keys, lora.broken
        )
        for host in HOSTS
    )


class SeenFile(NamedTuple):
    """A file before a host; see `SeenModule` and `configs_of`. `stored` says how its numbers are.

    `unused` has the keys that belong to no module, `broken` the modules of the denoiser or the encoders that cannot be read.
    """

    host: Host
    family: Family
    told: FileFamily
    modules: Sequence[SeenModule]
    encoders: Sequence[SeenModule]
    others: int
    configs: Mapping[str, PeftConfig] | str | None
    stored: Storage = "plain"
    unused: Sequence[str] = ()
    broken: Mapping[str, BrokenPart] = MappingProxyType({})


def configs_of(checkpoint: Checkpoint) -> dict[str, PeftConfig] | str | None:
    """What diffusers reads of the header, by component; why it cannot be read, if so; None if it has none."""
    if checkpoint.metadata.get(PEFT_CONFIGS, _NO_CONFIG).strip() == _NO_CONFIG:
        return None
    try:
        return read_configs(checkpoint.path, checkpoint.metadata)
    except LoraFormatError as error:
        return error.message.removeprefix(f"{checkpoint.path}: ").rstrip(".")


_NO_CONFIG: Final = "null"


def reading_of(file: SeenFile) -> HostReading:
    if file.host.name == "comfyui":
        reading = _judged(file, file.modules, _comfyui, _comfyui_strengths)
    else:
        modules = file.modules
        file = file._replace(modules=_of_one_naming(file))
        reading = _judged(file, modules, _diffusers, _diffusers_strengths)
    encoders = None
    if file.encoders:
        encoders = _judged(file, file.encoders, _of_encoders, _encoder_strengths)
    others = (
        {"others": f"{counted(file.others, 'module')} of other parts of the model"} if file.others else {}
    )
    return replace(reading, unavailable={**reading.unavailable, **others}, encoders=encoders)


def _of_one_naming(file: SeenFile) -> Sequence[SeenModule]:
    """The modules that diffusers looks at: of a file for SDXL with kohya's names of both kinds, those of its own (its issue 11062)."""
    both = [module for module in file.modules if module.start == "lora_unet_" and module.namings]
    namings = {naming for module in both for naming in module.namings}
    if file.family.name != "sdxl" or len(both) < len(file.modules) or len(namings) < 2:
        return file.modules
    return [module for module in both if "diffusers" in module.namings]


def _judged(
    file: SeenFile,
    modules: Sequence[SeenModule],
    read: Callable[[SeenFile], tuple[SeenModule, ...]],
    scale: Callable[[SeenFile, Sequence[SeenModule]], list[float]],
) -> HostReading:
    is_of_encoders = modules is file.encoders
    broken = {name: part for name, part in file.broken.items() if is_for_encoder(name) == is_of_encoders}
    title, count = file.host.title, len(modules) + len(broken)
    try:
        if not modules and file.encoders:
            return HostReading(title, 0, 0, {})
        if not modules:
            raise _Unknown("the file changes no denoiser")
        if file.stored == "gguf" and file.host.name == "comfyui":
            raise _Refused("its LoRA loaders read no GGUF")
        if file.stored != "plain":
            raise _Unknown("it is quantised, and loaders were measured with plain files")
        if file.host.name == "diffusers" and (reason := no_loader(file.family)) is not None:
            _require_known(modules, file.family)
            return HostReading(title, count, 0, {}, {"loader": reason})
        if not any(row.host == file.host.name for row in file.family.reads):
            unknown_family = file.told.family is None
            raise _Unknown(
                "the file does not tell its model family"
                if unknown_family
                else f"{file.family.title} was not measured"
            )
        _require_no_other_keys(file)
        _require_readable(file)
        taken = read(file)
    except LoraFormatError as error:
        return HostReading(title, count, None, None, {"taken": _of_config(error)})
    except _Refused as reason:
        return HostReading(title, count, 0, {}, {"refused": str(reason)})
    except _Unknown as reason:
        return HostReading(title, count, None, None, {"taken": str(reason)})
    try:
        strengths = dict(Counter(map(_one_nan, scale(file, taken))).most_common())
    except _Unknown as reason:
        return HostReading(title, count, len(taken), None, {"strengths": str(reason)})
    except LoraFormatError as error:
        return HostReading(title, count, len(taken), None, {"strengths": _of_config(error)})
    return HostReading(title, count, len(taken), strengths)


def _of_config(error: LoraFormatError) -> str:
    """What of PEFT's configuration cannot be read, without the file's name."""
    return PEFT_CONFIGS + error.message.rpartition(PEFT_CONFIGS)[2].rstrip(".")


def is_for_encoder(name: str) -> bool:
    """Whether a module is one of a text encoder, by its name."""
    parts = parse_name(name).parts
    return bool(parts) and parts[0].startswith("text_encoder")


_SURELY_READ: Final = ("lora_unet_", "diffusion_model.")
"""How names begin of which ComfyUI reads every layer's."""


def _require_readable(file: SeenFile) -> None:
    """Leave out a file with a module that cannot be read, unless the host is known to leave out just that module."""
    for name, part in file.broken.items():
        why = f"{name} cannot be read"
        up, down = part.shapes.get(UP), part.shapes.get(DOWN)
        is_lone_up = up is not None and down is None and name.startswith(_SURELY_READ)
        if file.host.name == "comfyui" and is_lone_up:
            raise _Refused(f"it refuses the file, since {why}")
        is_misfit = up is not None and down is not None and _never_multiply(up, down)
        if file.host.name == "diffusers" and is_misfit:
            raise _Refused(f"it refuses the file, since {why}")
        is_lone_down = up is None and down is not None
        if file.host.name == "diffusers" or not (is_misfit or is_lone_down):
            raise _Unknown(f"{why}, and what becomes of such a file was not measured")


def _never_multiply(up: tuple[int, ...], down: tuple[int, ...]) -> bool:
    """Whether no host can form the product of two factors."""
    return min(len(up), len(down)) < 2 or prod(up[1:]) != down[0]


def _one_nan(number: float) -> float:
    """The number, or for NaN the one that equals itself where it is counted: Python compares what is the same first."""
    return nan if isnan(number) else number


def no_loader(family: Family) -> str | None:
    """Why diffusers loads no LoRA of a family, whatever its names; None if its pipelines have a loader."""
    if family.in_diffusers is None or family.in_diffusers.loader is not None:
        return None
    return f"diffusers' pipelines of {family.title} have no load_lora_weights"


def leaves_other_keys(family: Family) -> bool:
    """Whether diffusers' loader leaves alone what it does not know: all but FLUX's want `lora` in every key."""
    return family.in_diffusers is not None and family.in_diffusers.loader == "FluxLoraLoaderMixin"


def _require_no_other_keys(file: SeenFile) -> None:
    """Leave out a file that diffusers refuses since it holds more than a LoRA, such as embeddings of words."""
    if file.host.name != "diffusers" or not file.unused or leaves_other_keys(file.family):
        return
    odd = next((key for key in file.unused if "lora" not in key), None)
    if odd is None:
        raise _Unknown(f"keys such as {file.unused[0]}, which belong to no module, were not measured")
    raise _Refused(f"it refuses files with keys such as {odd}, which do not contain “lora”")


def _modules(lora: LoraFile, checkpoint: Checkpoint, family: Family) -> Iterator[SeenModule]:
    keys = frozenset(checkpoint.keys())
    wrapped = _wrapped(keys)
    for name in lora.names:
        parts = parse_name(name).parts
        if parts and not parts[0].startswith("denoiser"):
            continue
        own = lora.stored_names.get(name, name).removesuffix(_BIAS)
        own = PEFT_START + own if PEFT_START + own in wrapped else own
        start = next(start for start in _STARTS if own.startswith(start))
        path, facts = own[len(start) :], lora.facts_of(name)
        dotted, namings = namings_of(path, family, is_flat=start.endswith("_"))
        yield _module(own, start, dotted, namings, facts, checkpoint, keys)


def _encoder_modules(lora: LoraFile, checkpoint: Checkpoint, family: Family) -> Iterator[SeenModule]:
    keys = frozenset(checkpoint.keys())
    for name in lora.names:
        parsed, own = parse_name(name), name.removesuffix(_BIAS)
        if not is_for_encoder(name):
            continue
        known = [family.encoders[part] for part in parsed.parts if part in family.encoders]
        encoder = parsed.encoder or (known[0][0] if known else "")
        start = name.removesuffix(parsed.path).replace(f".{encoder}.", ".{}.")
        path = flat(parsed.path.removesuffix(_BIAS))
        yield _module(own, start, path, frozenset({encoder}), lora.facts_of(name), checkpoint, keys)


def _module(
    name: str,
    start: str,
    path: str,
    namings: frozenset[str],
    facts: ModuleFacts,
    checkpoint: Checkpoint,
    keys: frozenset[str],
) -> SeenModule:
    ending, alpha = ending_of(name, facts.kind, keys), None
    if f"{name}.alpha" in keys:
        stored = checkpoint.tensor(f"{name}.alpha")
        alpha, ending = (_one_nan(float(stored)), ending) if stored.numel() == 1 else (None, "other")
    return SeenModule(name, start, path, namings, ending, facts.kind, facts.rank, alpha, facts.weight_shape)


def _wrapped(keys: frozenset[str]) -> frozenset[str]:
    """What keys with PEFT's own start begin with, up to each dot: that start is not part of a `LoraFile`'s names."""
    own = (key.split(".") for key in keys if key.startswith(PEFT_START))
    return frozenset(start for words in own for start in accumulate(words, "{}.{}".format))


def ending_of(name: str, kind: str, keys: frozenset[str]) -> str:
    """How a module's keys end: `A` and `down` for factors, else the kind; `other` if no key is named so.

    `+alpha` follows where the file has an alpha for it.
    """
    if f"{name.removesuffix(MODULATION)}.{DIFF_M}" in keys:
        return DIFF_M
    ends = _ENDS.get(kind, {})
    ending = next((ending for end, ending in ends.items() if f"{name}.{end}" in keys), "other")
    scaled = f"{name}.alpha" in keys and ending not in _NEVER_IN_DIFFUSERS
    return f"{ending}+alpha" if scaled else ending


def namings_of(path: str, family: Family, *, is_flat: bool) -> tuple[str, frozenset[str]]:
    """The path with its dots, and in which of `Reads.naming` it is a layer's name."""
    if family.is_unet:
        dotted = (unflattened_denoiser(path) if is_flat else path) or path
        if to_sgm(dotted, family.unet_blocks) is None and to_diffusers(dotted, family.unet_blocks) is None:
            return dotted, frozenset()
        return dotted, frozenset({"original" if dotted.startswith(_SGM) else "diffusers"})
    dotted = (unflattened(path) if is_flat else path) or path
    shown = flat if is_flat else str
    lookups = (row_of_original, row_of_diffusers, vector_of_original, vector_of_diffusers)
    rows = [look_up(family.name, dotted) for look_up in lookups]
    names = {
        naming
        for row in rows
        if row is not None
        for naming in _names_of(row)
        if path in map(shown, naming[1])
    }
    return dotted, frozenset(naming for naming, _ in names)


def may_read(host: str, name: str, ending: str, family: Family) -> bool:
    """Whether a host reads a module of the denoiser under such a name, or may: of what was not measured nothing is denied.

    Args:
        host: Without its version.
        name: As in the file.
        ending: As `ending_of` gives it.
        family: Of the model.
    """
    start = next(start for start in _STARTS if name.startswith(start))
    _, namings = namings_of(name[len(start) :], family, is_flat=start.endswith("_"))
    rows = [row for row in family.reads if row.host == host]
    return (
        not rows
        or not namings
        or any(
            row.start == start
            and row.naming in namings
            and (not row.endings or ending in row.endings.split())
            for row in rows
        )
    )


def _names_of(row: Row) -> Iterator[tuple[str, tuple[str, ...]]]:
    yield "diffusers", row.parts
    if row.read_only:
        yield "read-only", (row.original,)
        return
    yield "original", (row.original,)
    yield "also", (row.also or row.original,)


def _comfyui(file: SeenFile) -> tuple[SeenModule, ...]:
    """It looks up each name by itself."""
    _require_in_comfyui(file)
    return tuple(module for module in file.modules if _comfyui_takes(file.host, module, file.family))


def _require_in_comfyui(file: SeenFile) -> None:
    if file.host.name == "comfyui" and file.family.in_comfyui_since not in (None, file.host.version):
        raise _Unknown(f"this version has no {file.family.title}")


def _comfyui_takes(host: Host, module: SeenModule, family: Family) -> bool:
    if module.ending.startswith("other"):
        raise _Unknown(f"tensors such as those of {module.name} were not measured")
    if module.ending == DIFF_M or module.ending in IN_NO_HOST:
        return False
    rows = [
        row
        for row in family.reads
        if (row.host, row.start) == (host.name, module.start)
        and row.naming in module.namings
        and row.since in (None, host.version)
        and not _any_of(row.leaves_out, [module])
    ]
    if rows and not any(row.known for row in rows):
        raise _Unknown(f"names such as {module.name} were not measured for {family.title}")
    if not rows and not module.namings:
        raise _Unknown(f"{module.name} is no known layer of {family.title}")
    dotted_unet = family.is_unet and module.start in ("unet.", "") and module.namings == {"diffusers"}
    return bool(rows) and not (dotted_unet and family.loses("comfyui", "peft", module.path))


def _comfyui_strengths(file: SeenFile, taken: Sequence[SeenModule]) -> list[float]:
    return [_comfyui_strength(module) for module in taken]


def _comfyui_strength(module: SeenModule) -> float:
    if module.kind in ("oft", "boft", "glora"):
        raise _Unknown(f"{module.kind.upper()} has no such factor")
    return 1.0 if module.kind in ("diff", "set") else module.by_alpha


def _diffusers(file: SeenFile) -> tuple[SeenModule, ...]:
    """It converts a file as a whole, so what was measured holds for files of one kind of names."""
    modules, family = file.modules, file.family
    endings, starts = {module.ending for module in modules}, {module.start for module in modules}
    _require_header(file)
    endings -= {NORM_SCALE}  # it goes with BFL's factors
    if endings <= _NEVER_IN_DIFFUSERS:
        return ()
    _require_one_kind(file)
    if len(endings) > 1 or len(starts) > 1:
        raise _Unknown("its modules have different kinds of names or tensors")
    start, ending = starts.pop(), endings.pop()
    if ending not in _FACTORS:
        raise _Unknown(f"tensors such as those of {modules[0].name} were not measured")
    _require_known(modules, family)
    rows = _rows(file.host.name, start, ending, modules, family)
    is_mixed = not rows and not frozenset.intersection(*(frozenset(module.namings) for module in modules))
    if is_mixed and any(_rows(file.host.name, start, ending, [module], family) for module in modules):
        raise _Unknown("its modules have names of several kinds")
    if not rows:
        return ()
    row = next((row for row in rows if row.known), None)
    if row is None:
        raise _Unknown(f"names such as {modules[0].name} were not measured for {family.title}")
    if not _goes_with_encoders(file):
        return ()
    if _any_of(row.refuses, modules) or (row.whole_blocks and not _has_whole_blocks(row, modules)):
        return ()
    if row.requires is not None and not re.match(row.requires, "\n".join(module.path for module in modules)):
        return ()
    if row.width is not None and not all(row.width in module.shape for module in modules):
        raise _Unknown(f"its loader divides such layers at a width of {row.width} only")
    _require_kernels(file)
    if row.folds_alpha and not (family.is_unet or start == _OWN_START or ending.startswith("lokr")):
        _require_positive_alphas(file)
    return _as_configured(
        file, [module for module in modules if not _diffusers_leaves_out(row, module, family)]
    )


def _require_header(file: SeenFile) -> None:
    """Leave out a file that diffusers refuses for its header: PEFT's configuration there is to be one for each part of the model."""
    if file.configs is None:
        return
    if isinstance(file.configs, str):
        raise _Refused(f"it refuses the file, since {file.configs}")
    component = file.family.component
    if file.modules and component not in file.configs:
        raise _Refused(f"it refuses the file, since {PEFT_CONFIGS} has nothing for the {component}")
    handed_on = (one for one in file.modules if file.family.is_unet or one.ending.startswith("A"))
    if (name := next((one.name for one in handed_on if one.alpha is not None), None)) is not None:
        raise _Refused(f"it refuses alphas beside {PEFT_CONFIGS} ({name})")


def _require_positive_alphas(file: SeenFile) -> None:
    """Leave out a file on which diffusers' converters loop for ever: they double alpha / rank until it is near 1."""
    names = (one.name for one in (*file.modules, *file.encoders) if one.alpha is not None and one.alpha < 0.0)
    if (name := next(names, None)) is not None:
        raise _Refused(f"it never comes to an end with a negative alpha ({name})")


def _require_kernels(file: SeenFile) -> None:
    """Leave out a file that PEFT refuses, for a layer whose kernel, or none, the factors do not have."""
    family = file.family
    for module in () if family.is_unet else file.modules:
        if len(module.shape) > 2 and any(
            is_linear(one, family) for one in paths_in("diffusers", module, family)
        ):
            kernels = "×".join(map(str, module.shape[2:]))
            raise _Refused(f"it refuses files with {kernels} kernels for a linear layer ({module.name})")
    for module in file.modules if family.is_unet else ():
        (path,) = paths_in("diffusers", module, family)
        own, layers = (module.shape[2] if len(module.shape) > 2 else None), kernel_of(path, family)
        if own == layers:
            continue
        if file.told.family is None and path.endswith((".proj_in", ".proj_out")):
            raise _Unknown(f"families differ in whether {module.name} is a convolution")
        factors = "matrices" if own is None else f"{own}×{own} kernels"
        layer = "a linear layer" if layers is None else f"a {layers}×{layers} convolution"
        raise _Refused(f"it refuses files with {factors} for {layer} ({module.name})")


def _as_configured(file: SeenFile, modules: Sequence[SeenModule]) -> tuple[SeenModule, ...]:
    """What diffusers loads by the configuration in the header: nothing if that has other ranks, or names no layers.

    Which layers it names does not matter: PEFT takes those of the file.
    """
    config = _config(file, file.family.component)
    if config is None:
        return tuple(modules)
    ranks = (
        (module.rank, config.rank_of(path))
        for module in modules
        for path in paths_in("diffusers", module, file.family)
    )
    if not config.has_targets or any(own not in (None, stated) for own, stated in ranks):
        raise _Refused(f"it refuses the file, since {PEFT_CONFIGS} names no layers, or other ranks")
    return tuple(modules)


def _require_known(modules: Sequence[SeenModule], family: Family) -> None:
    lost = next((module.name for module in modules if not module.namings), None)
    if lost is not None:
        raise _Unknown(f"{lost} is no known layer of {family.title}")


def _any_of(layers: str | None, modules: Sequence[SeenModule]) -> bool:
    """Whether a regular expression for layers, as in `Reads`, is that of one of the modules."""
    return layers is not None and any(re.fullmatch(layers, module.path) for module in modules)


def _has_whole_blocks(row: Reads, modules: Sequence[SeenModule]) -> bool:
    blocks: dict[str, set[str]] = {}
    for _, number, layer in (module.path.split(".", 2) for module in modules):
        blocks.setdefault(number, set()).add(layer)
    return set(blocks) == {str(number) for number in range(len(blocks))} and any(
        all(layers == set(wanted.split()) for layers in blocks.values()) for wanted in row.whole_blocks
    )


def _rows(
    host: str, start: str, ending: str, modules: Sequence[SeenModule], family: Family
) -> tuple[Reads, ...]:
    return tuple(
        row
        for row in family.reads
        if (row.host, row.start) == (host, start)
        and all(row.naming in module.namings for module in modules)
        and (not row.endings or ending in row.endings.split())
    )


def _diffusers_leaves_out(row: Reads, module: SeenModule, family: Family) -> bool:
    down = {"A": "lora_A", "down": "lora_down"}.get(module.ending.partition("+")[0])
    lost = {"diffusion_model.": ("comfyui", module.path), "lora_unet_": ("kohya", flat(module.path))}
    format, path = lost.get(module.start, ("", ""))
    return _any_of(row.leaves_out, [module]) or family.loses("diffusers", format, path, down)


def _diffusers_strengths(file: SeenFile, taken: Sequence[SeenModule]) -> list[float]:
    modules, family = file.modules, file.family
    config = _config(file, family.component)
    has_alphas = any(module.alpha is not None for module in taken)
    if config is not None and has_alphas:
        raise _Unknown("it has alphas in its header and beside its factors")
    if config is not None:
        return [_by_config(config, paths_in("diffusers", module, family)[0], module.rank) for module in taken]
    if not taken:
        return []
    row = _rows("diffusers", taken[0].start, taken[0].ending, modules, family)[0]
    misread = next((module.name for module in taken if _any_of(row.misreads, [module])), None)
    if misread is not None:
        raise _Unknown(f"its loader gives {misread} another change than the file has")
    if not has_alphas or not row.folds_alpha:
        return [1.0 for _ in taken]
    if not family.is_unet:
        is_as_named = all(module.start == _OWN_START for module in taken)
        return _by_pattern(taken) if is_as_named else [module.by_alpha for module in taken]
    usual = Counter(module.alpha for module in modules).most_common(2)
    if len(usual) > 1 and usual[0][1] == usual[1][1]:
        raise _Unknown("two alphas are equally frequent, and attention gets the most frequent one")
    return [_of_unet(module, usual[0][0]) for module in taken]


_OWN_START: Final = "transformer."
"""How diffusers' own names for a transformer begin: it converts none, and folds no alpha."""


def _by_pattern(taken: Sequence[SeenModule]) -> list[float]:
    """As diffusers hands alphas that it does not fold to PEFT: the first, and others by the ends of names, of which the first counts.

    So the alpha of `proj_out` is also that of `single_transformer_blocks.0.proj_out`.
    """
    alphas = {module.path: module.alpha for module in sorted(taken, key=lambda one: f"{one.path}.alpha")}
    first = next(iter(alphas.values()))
    found = []
    for module in taken:
        ends = {*_ends(module.path)}
        by_name = (alpha for path, alpha in alphas.items() if path in ends and alpha != first)
        outer = next(by_name, module.alpha)
        found.append(module.by_alpha if outer is None or not module.rank else outer / module.rank)
    return found


def _ends(path: str) -> Iterator[str]:
    """What a name ends with: `a.b`, and `b` of it."""
    while path:
        yield path
        path = path.partition(".")[2]


def _config(file: SeenFile, component: str) -> PeftConfig | None:
    if isinstance(file.configs, str):
        raise _Unknown(file.configs)
    return None if file.configs is None else file.configs.get(component)


def _by_config(config: PeftConfig, path: str, rank: int | None) -> float:
    scale = config.scale_of(path, rank)
    return 1.0 if scale is None else scale


def _of_unet(module: SeenModule, usual_alpha: float | None) -> float:
    """See `formats.alphas_mislead`: attention is scaled by the alpha that most modules have."""
    if usual_alpha is None or module.rank is None or not is_attention_projection(module.name):
        return module.by_alpha
    return scale_of(usual_alpha, module.rank)


def _of_encoders(file: SeenFile) -> tuple[SeenModule, ...]:
    _require_in_comfyui(file)
    rows, known = _encoder_rows(file), _known_of_encoders(file)
    if file.host.name == "diffusers":
        _require_header(file)
        if file.modules:
            _diffusers(file)  # what it makes of the rest is known only if this is
        _require_one_kind(file)
        found = tuple(module for module in known if not _is_lost(module, known))
        return () if _is_refused(known) or not _goes_with_encoders(file) else found
    measured = {encoder for row in rows for encoder in row.encoders.split()}
    for module in file.encoders:
        (encoder,) = module.namings
        if encoder not in measured:
            raise _Unknown(f"names such as {module.name} were not measured for {file.family.title}")
    return known


def _encoder_rows(file: SeenFile) -> list[EncoderReads]:
    return [
        row
        for row in ENCODER_READS
        if row.host == file.host.name and file.family.name in row.families.split()
    ]


def _known_of_encoders(file: SeenFile) -> tuple[SeenModule, ...]:
    rows = _encoder_rows(file)
    return tuple(module for module in file.encoders if _encoder_row(module, rows))


_TELL_NAMES: Final = {"A": ("_self_attn_",), "down": ("_out_proj", "_mlp_")}
"""The layers from which diffusers learns what an encoder's names are, by how a module's keys end.

It turns the names of attentions into older ones first, and all into PEFT's then. PEFT's names it recognises afterwards
by the attention only. kohya's are of two older kinds: the attention's, recognised by the output projection, and the others',
recognised by the feed-forward layers.
"""


def _told_by(module: SeenModule, known: Sequence[SeenModule]) -> str | None:
    """The layer from which diffusers learns what the names of a module's encoder are; None if it learns it from none."""
    tell = _TELL_NAMES[module.ending.partition("+")[0]]
    paths = [other.path for other in known if other.namings == module.namings]
    return next((layer for layer in tell if any(layer in path for path in paths)), None)


def _is_refused(known: Sequence[SeenModule]) -> bool:
    """Whether diffusers refuses the file, since it cannot tell what an encoder's names are."""
    return any(_told_by(module, known) is None for module in known)


def _is_lost(module: SeenModule, known: Sequence[SeenModule]) -> bool:
    """Whether diffusers does not find a module of an attention, as it took all names for those of other layers."""
    return "_self_attn_" in module.path and _told_by(module, known) == "_mlp_"


def _encoder_row(module: SeenModule, rows: Sequence[EncoderReads]) -> bool:
    return any(
        module.start in row.starts.split()
        and not module.namings.isdisjoint(row.encoders.split())
        and re.fullmatch(row.layers, module.path) is not None
        and (not row.endings or module.ending in row.endings.split())
        for row in rows
    )


_KOHYA_SECOND: Final = "lora_te2_"
"""How kohya's names of a second text encoder begin. diffusers converts them for every U-Net, and leaves out what has no place."""


def _goes_with_encoders(file: SeenFile) -> bool:
    """Whether diffusers loads the denoiser's modules, for all that the file has for text encoders.

    For a U-Net and SD 3 it refuses a file, or loads nothing, if it has other names for a text encoder too.
    """
    known = _known_of_encoders(file)
    if _is_refused(known):
        return False
    if not (file.family.is_unet or file.family.name == "sd3"):
        return True
    if all(module.ending == "A" for module in file.encoders):
        return True
    return all(module in known or module.start == _KOHYA_SECOND for module in file.encoders)


_Way = tuple[bool, str]
"""Of a module's names: whether they have underscores for dots, and how its factors end."""
_UNDERSCORED_DOWN, _DOWN, _A = (True, "down"), (False, "down"), (False, "A")
_MEASURED_TOGETHER: Final[frozenset[tuple[bool, frozenset[_Way], str]]] = frozenset(
    {
        (True, frozenset({_UNDERSCORED_DOWN, _DOWN}), "text_encoders.{}.transformer."),
        (False, frozenset({_UNDERSCORED_DOWN, _A}), "lora_te1."),
    }
)
"""Kinds of names that a denoiser (a U-Net, or FLUX's) and its text encoders had in one file, and how the encoders' begin."""


def _require_one_kind(file: SeenFile) -> None:
    """Leave open what diffusers makes of a file whose parts have names of different kinds: it converts a file as a whole."""
    ways = frozenset(
        (module.start.endswith("_"), module.ending.partition("+")[0])
        for module in (*file.modules, *file.encoders)
        if module.ending != NORM_SCALE
    )
    family, starts = file.family, {module.start for module in file.encoders}
    is_measured = (family.is_unet or family.name == "flux") and len(starts) == 1
    is_known = is_measured and (family.is_unet, ways, *starts) in _MEASURED_TOGETHER
    refuses = not (family.is_unet or family.name == "sd3") and (False, "lora.down") in ways
    if file.modules and file.encoders and (refuses or (len(ways) > 1 and not is_known)):
        raise _Unknown("such names of its denoiser and of its text encoders were not measured together")


def _encoder_strengths(file: SeenFile, taken: Sequence[SeenModule]) -> list[float]:
    if file.host.name == "comfyui":
        return _comfyui_strengths(file, taken)
    if isinstance(file.configs, str):
        raise _Unknown(file.configs)
    if any(component.startswith("text_encoder") for component in file.configs or ()):
        raise _Unknown("its header has PEFT's configuration for a text encoder")
    factors = [module.by_alpha for module in taken]
    if file.family.is_unet and len(set(factors)) > 1:
        raise _Unknown("alphas that differ were not measured for text encoders")
    return factors


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


def paths_in(naming: str, module: SeenModule, family: Family) -> tuple[str, ...]:
    """A module's layers, by their names in another naming; its own path where they are not known."""
    if family.is_unet:
        other = to_sgm if naming == "original" else to_diffusers
        path = module.path if naming in module.namings else other(module.path, family.unet_blocks)
        return (path or module.path,)
    if naming == "diffusers" and naming in module.namings:
        return (module.path,)
    row = row_of_original(family.name, module.path) or row_of_diffusers(family.name, module.path)
    if row is None:
        return (module.path,)
    return row.parts if naming == "diffusers" else (row.original,)
