"""Which family a LoRA's file is for, or the model that it is put on: told by names and shapes, or named by the user."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from sigmascope.errors import ConfigError, SigmascopeError
from sigmascope.lora.families import (
    CONTEXT_WIDTHS,
    FAMILIES,
    UNET_FAMILIES,
    ModelLayout,
    Part,
    families_with,
    family_misfit,
    family_named,
    is_layer_of,
    known_names,
    likeliest,
    without_twin,
)
from sigmascope.lora.families.known import as_wide
from sigmascope.lora.file import LoraFile, family_in
from sigmascope.lora.linalg import without_pointwise_kernel
from sigmascope.lora.module_names import (
    BIAS,
    CONTEXT_LAYERS,
    is_of_family,
    mark_of_sdxl,
    naming_of,
    parse_name,
    parse_names,
    redotted,
    require_family,
    unwrapped,
)
from sigmascope.units import counted


def told_by_lora(lora: LoraFile, layers: Iterable[str], layout: ModelLayout) -> ModelLayout:
    """The layout of a model that lacks its family's signature: the LoRA's family, if most of the layers are that family's.

    Args:
        lora: In any format; its tensors are not read.
        layers: Paths of the model's layers.
        layout: As `layout_of` told it; returned as it is if it has a family.
    """
    family = file_family(lora).family if layout.family == "unknown" else None
    if family is None or family in UNET_FAMILIES:
        return layout
    paths = _paths_in(layers, layout)
    start = _wrapper_of(paths)
    own = [path for path in (path.removeprefix(start) for path in paths) if is_layer_of(family, path)]
    if not own or 2 * len(own) < len(paths):
        return layout
    return ModelLayout(family, naming_of(lora, family, dict.fromkeys(own, ())), _inside(layout, start))


def layout_as(
    family: str, lora: LoraFile, shapes: Mapping[str, tuple[int, ...]], layout: ModelLayout
) -> ModelLayout:
    """The layout of a model whose family the user names: it says the names, and the model the shapes.

    Args:
        family: Of the model.
        lora: To be put on it; its tensors are not read.
        shapes: Of the model's weights, by layer.
        layout: As `layout_of` told it.

    Raises:
        ConfigError: There is no such family, or the model has other names or shapes.
    """
    require_family(family)
    if layout.family == family:
        return layout
    of_paths = {path: shapes[layer] for layer in shapes for path in _paths_in([layer], layout)}
    start = _wrapper_of(of_paths)
    own = {path.removeprefix(start): shape for path, shape in of_paths.items()}
    of_family = {path: shape for path, shape in own.items() if is_of_family(family, path)}
    otherwise = family_misfit(family, own) if of_family else "none of its layers has a name of that family"
    if otherwise is not None:
        raise ConfigError(
            f"--family {family}: the model is not one of {title_of(family)}: {otherwise}.",
            hint="Leave --family out, or give the model that the LoRA is for.",
        )
    return ModelLayout(family, naming_of(lora, family, of_family), _inside(layout, start))


def _wrapper_of(paths: Iterable[str]) -> str:
    """What a wrapper put before the layers of a model (`unwrapped`), or nothing."""
    wrapped = unwrapped(paths)
    return next((key.removesuffix(path) for key, path in wrapped.items() if key.endswith(path)), "")


def _inside(layout: ModelLayout, start: str) -> dict[Part, str]:
    """The prefixes of a model whose denoiser is in a wrapper."""
    return {**layout.prefixes, "denoiser": layout.prefixes.get("denoiser", "") + start}


def _paths_in(layers: Iterable[str], layout: ModelLayout) -> list[str]:
    """Of a model's layers, the paths in the denoiser."""
    placed = (layout.split(layer) for layer in layers if not layer.endswith(BIAS))
    return [path for part, path in placed if part == "denoiser"]


@dataclass(frozen=True, slots=True)
class FileFamily:
    """What a file is for.

    Attributes:
        family: As in `ModelLayout.family`; None where nothing tells.
        is_unet: Whether its names are those of a U-Net, of whatever family.
        evidence: What it was told from.
        others: Families that have all of its names and fit its shapes as well; it was chosen by its width, or because
            it is the usual one.
        unknown_names: How many of the denoiser's names the family does not have.
    """

    family: str | None
    is_unet: bool
    evidence: str
    others: tuple[str, ...] = ()
    unknown_names: int = 0

    @property
    def is_certain(self) -> bool:
        """Whether nothing speaks for another family."""
        return self.family is not None and not self.others and not self.unknown_names

    @property
    def doubt(self) -> str | None:
        """Why the family is a guess, such as "its names and shapes fit Chroma too"; None if it is certain or not known."""
        if self.family is None or self.is_certain:
            return None
        if self.others:
            return f"its names and shapes fit {' and '.join(map(title_of, self.others))} too"
        return f"{counted(self.unknown_names, 'of its names is', 'of its names are')} not among its own"


def file_family(lora: LoraFile) -> FileFamily:
    """Recognise the family by names and shapes, and by the header if these leave it open.

    Args:
        lora: In any format; its tensors are not read.
    """
    by_names = _by_names(lora)
    stated = family_in(lora.metadata)
    if by_names in UNET_FAMILIES:
        return _unet_file_family(lora, by_names, stated)
    is_kin = by_names is not None and family_named(stated).else_ == by_names
    if is_kin and family_misfit(str(stated), _denoiser_layers(lora)) is None:  # names and shapes fit both
        return FileFamily(stated, False, "its header")
    if by_names is not None:
        return _with_doubts(lora, FileFamily(by_names, False, "its names"), stated)
    if stated is not None and (others := known_names(_denoiser_layers(lora))) and stated not in others:
        return FileFamily(None, False, f"its header says {title_of(stated)}, which has none of its names")
    return FileFamily(stated, False, "its header" if stated else "neither its names nor its header say")


def _with_doubts(lora: LoraFile, told: FileFamily, stated: str | None) -> FileFamily:
    """What else the names fit, and which names do not; nothing where the header says the same."""
    layers, family = _denoiser_layers(lora), told.family
    if stated == family or family is None:
        return told
    fitting = as_wide([name for name in families_with(layers) if family_misfit(name, layers) is None], layers)
    others = tuple(name for name in fitting if name != family) if family in fitting else ()
    return replace(
        told,
        others=others,
        unknown_names=sum(not is_layer_of(family, redotted(family, path)) for path in layers),
    )


def _by_names(lora: LoraFile) -> str | None:
    try:
        family = parse_names(replace(lora, metadata={})).layout.family
    except SigmascopeError:
        family = "unknown"
    return _by_most_names(lora) if family == "unknown" else family


def _by_most_names(lora: LoraFile) -> str | None:
    """The family whose tables have most of the denoiser's names: some may be renamed, or of a variant."""
    layers = _denoiser_layers(lora)
    counts = known_names(layers)
    most = max(counts.values(), default=0)
    candidates = [
        family for family in counts if counts[family] == most and family_misfit(family, layers) is None
    ]
    first = likeliest(candidates, layers)
    return first[0] if len(first) == 1 and 2 * most >= len(layers) > 0 else None


def _denoiser_layers(lora: LoraFile) -> dict[str, tuple[int, ...]]:
    """Shapes of the denoiser's weights by path."""
    return {
        path: without_pointwise_kernel(lora.shape_of(name))
        for name in lora.names
        if (path := _denoiser_path(name)) is not None
    }


def nearest_family(layers: Mapping[str, tuple[int, ...]]) -> str:
    """Say which family is nearest to a denoiser that fits none, and how it differs.

    Args:
        layers: Shapes of weights by path.

    Returns:
        The end of a sentence, such as "the nearest is FLUX, but …"; "" where no family has any of the names.
    """
    fitting = [family for family in families_with(layers) if family_misfit(family, layers) is None]
    alike = likeliest(fitting, layers)
    if len(alike) > 1:
        return f"; its names and shapes fit {' and '.join(map(title_of, alike))}"
    counts = known_names(layers)
    if not counts:
        return ""
    family = max(sorted(counts), key=lambda family: (counts[family], FAMILIES[family].else_ is None))
    others = [path for path in layers if not is_layer_of(family, path)]
    lacking = f"{len(others)} of {len(layers)} names are not among its own ({others[0]})" if others else None
    otherwise = family_misfit(family, layers) or lacking
    return "" if otherwise is None else f"; the nearest is {title_of(family)}, but {otherwise}"


def _denoiser_path(name: str) -> str | None:
    parsed = parse_name(name.removesuffix(BIAS))
    if parsed.parts and not parsed.parts[0].startswith("denoiser"):
        return None
    parsed = replace(parsed, path=without_twin(parsed.path))
    return parsed.dotted("denoiser") or parsed.path


def _unet_file_family(lora: LoraFile, by_names: str, stated: str | None) -> FileFamily:
    """The names of all U-Nets are alike: the width of what cross attention reads tells them apart."""
    if by_names == "lbm":
        return FileFamily("lbm", True, "its names")
    width = _context_width(lora)
    if width in CONTEXT_WIDTHS:
        return FileFamily(CONTEXT_WIDTHS[width], True, f"cross attention that reads {width} features")
    if stated in UNET_FAMILIES:
        return FileFamily(stated, True, "its header")
    mark = mark_of_sdxl(lora.names)
    if mark is not None:
        return FileFamily("sdxl", True, mark)
    return FileFamily(None, True, "the names of a U-Net, whose width is not known")


def _context_width(lora: LoraFile) -> int | None:
    for name in lora.names:
        shape = without_pointwise_kernel(lora.shape_of(name))
        if name.endswith(CONTEXT_LAYERS) and len(shape) == 2:
            return shape[1]
    return None


def title_of(family: str | None) -> str:
    """The family as its users call it."""
    return family_named(family).title


# The family that a file is for.
