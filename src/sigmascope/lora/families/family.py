"""One record for each family of models. Every table of names, shapes and hosts is derived from these records."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache, cached_property
from types import MappingProxyType
from typing import Any, Final, Literal

from sigmascope.lora.format_names import FormatName

Part = Literal[
    "denoiser",
    "denoiser_2",
    "vae",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "text_encoder_4",
    "other",
]
Shapes = Mapping[str, tuple[int, ...]]
Naming = Literal["diffusers", "original"]

KOHYA_ENCODERS: Final[Mapping[Part, str]] = MappingProxyType(
    {
        "text_encoder": "lora_te1_",
        "text_encoder_2": "lora_te2_",
        "text_encoder_3": "lora_te3_",
        "text_encoder_4": "lora_te4_",
    }
)
"""How kohya's tools begin the names of text encoders' modules, where a family has nothing else."""
COMFYUI_ENCODERS: Final[Mapping[Part, str]] = MappingProxyType(
    {"text_encoder": "clip_l", "text_encoder_2": "clip_g", "text_encoder_3": "t5xxl"}
)
"""What ComfyUI calls text encoders, where a family has nothing else."""


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a family's layers.

    Attributes:
        original: The layer's name in the original model.
        parts: Diffusers' layers that are its rows, in order; one where nothing is fused.
        swapped: Whether the halves of the rows are in the opposite order, in a layer with twice as many outputs as
            inputs.
        grouped: Whether the parts are query, key and value of grouped attention: the query has as many rows as the
            matrix has columns; key and value have half of the remaining rows each.
        also: The layer's name in a second dialect of original files.
        gated: Whether the halves that are swapped are a gate and what it gates: then they are in a layer of any size.
        read_only: Whether the original name is that of files which no host's LoRA loader reads; another line has the
            name that is written.
    """

    original: str
    parts: tuple[str, ...]
    swapped: bool = False
    grouped: bool = False
    also: str | None = None
    gated: bool = False
    read_only: bool = False

    @property
    def originals(self) -> tuple[str, ...]:
        """The layer's names in original files."""
        return (self.original,) if self.also is None else (self.original, self.also)

    @property
    def is_rename(self) -> bool:
        """Whether the two layers hold the same matrix under two names."""
        return len(self.parts) == 1 and not self.swapped

    def swaps(self, outputs: int, inputs: int) -> bool:
        """Whether the halves of the rows are in the opposite order in a matrix of that size."""
        return self.swapped and (self.gated or outputs == 2 * inputs)

    def numbered(self, number: str) -> "Row":
        """The line for one block; the line itself if `number` is empty."""
        if not number:
            return self
        return Row(
            self.original.replace("#", number),
            tuple(part.replace("#", number) for part in self.parts),
            self.swapped,
            self.grouped,
            None if self.also is None else self.also.replace("#", number),
            self.gated,
            self.read_only,
        )


@dataclass(frozen=True, slots=True)
class UnetBlocks:
    """What a translation needs to know of a U-Net.

    Attributes:
        layers_per_block: Residual layers of a lower block; an upper block has one more.
        attention: The upper blocks that have attention.
    """

    layers_per_block: int = 2
    attention: frozenset[int] = frozenset({0, 1})


@dataclass(frozen=True, slots=True)
class Ratio:
    """Outputs and inputs of a layer as multiples of the family's width. Of several for the same layers, one must fit.

    Attributes:
        layers: A regular expression, of the whole path in either naming.
        outputs: Multiple of the width.
        inputs: Multiple of the width.
    """

    layers: str
    outputs: int
    inputs: int

    @property
    def words(self) -> str:
        """Such as `4 times as many outputs as inputs`."""
        if self.inputs == self.outputs:
            return "as many outputs as inputs"
        if min(self.inputs, self.outputs) > 1:
            return f"{self.outputs} outputs to {self.inputs} inputs"
        if self.inputs > self.outputs:
            return f"{self.inputs} times as many inputs as outputs"
        return f"{self.outputs} times as many outputs as inputs"

    def matches(self, path: str) -> bool:
        """Whether it is about that layer. Answers are cached, so ask with the same number for all blocks."""
        return _matches(self.layers, path)


@cache
def _matches(pattern: str, path: str) -> bool:
    return re.fullmatch(pattern, path) is not None


@dataclass(frozen=True, slots=True)
class Lost:
    """Layers that a host does not load from a format, usually without an error.

    Attributes:
        host: `diffusers` through its pipeline, or `comfyui`.
        format: The LoRA format.
        layers: A regular expression for the whole path of a layer, as the format names it.
        down: The ending of the down factors' keys in the files concerned; None for all files.
        or_refused: Whether it raises an error instead where a key, such as an `.alpha`, does not contain "lora".
    """

    host: Literal["diffusers", "comfyui"]
    format: FormatName
    layers: str = ".*"
    down: Literal["lora_A", "lora_down"] | None = None
    or_refused: bool = False


@dataclass(frozen=True, slots=True)
class Reads:
    """Names of a denoiser's modules that a host's loader reads. What `Lost` has is left out all the same.

    Attributes:
        host: As in `lora.hosts.HOSTS`, without the version.
        start: What names begin with.
        naming: Whose paths follow; `also` is `Row.also`.
        endings: How the tensors' keys may end (`lora.hosts.ending_of`), separated by spaces; "" for any ending.
        since: The first version that reads them; None if all of `lora.hosts.HOSTS` do.
        width: The loader divides fused layers at this width, and no other.
        leaves_out: A regular expression for the paths of layers that it leaves out.
        refuses: The same for layers whose presence makes it refuse the whole file.
        misreads: The same for layers that it gives another change than the file has.
        whole_blocks: The loader refuses the file unless all blocks, from 0 on without a gap, have one of these sets of
            layers and no others; separated by spaces.
        requires: The same for the paths of all modules, one a line: it takes nothing of a file without a match.
        known: Whether what it does was measured. If not, all that is known is that it might read them.
        folds_alpha: Whether it multiplies by alpha / rank; otherwise it ignores `.alpha` tensors.
    """

    host: Literal["diffusers", "comfyui"]
    start: str
    naming: Literal["diffusers", "original", "also"]
    endings: str = ""
    since: str | None = None
    width: int | None = None
    leaves_out: str | None = None
    refuses: str | None = None
    misreads: str | None = None
    whole_blocks: tuple[str, ...] = ()
    requires: str | None = None
    known: bool = True
    folds_alpha: bool = True


COMFYUI_READS: Final = (
    Reads("comfyui", "lora_unet_", "original"),
    Reads("comfyui", "diffusion_model.", "original"),
)
"""What ComfyUI reads for every model."""


@dataclass(frozen=True, slots=True)
class InDiffusers:
    """A family's classes in diffusers.

    Attributes:
        model: The denoiser's.
        loader: What gives its pipelines `load_lora_weights`, in `diffusers.loaders`; None where they have no such method.
        config: What the model's class needs to be made at all, or to have the layers of every variant.
    """

    model: str
    loader: str | None
    config: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Family:
    """A family of models. To add one, write a file with its record beside this one; `known` reads them all.

    Attributes:
        name: In options, reports and `ModelLayout.family`.
        title: What its users call it.
        architecture: What is written as `modelspec.architecture`.
        base_version: What is written as kohya's `ss_base_model_version`.
        also_called: What other tools write there; case, dots, dashes, underscores and whatever follows do not matter.
        not_called: Beginnings of other models' names that start with one of the names above.
        component: The diffusers pipeline's component that is the denoiser.
        in_diffusers: Its classes there; None where diffusers has none.
        signatures: Keys that a checkpoint of the family has, by the naming of its denoiser; separated by spaces.
        ratios: Sizes by which it differs from a family with the same names; see `family_misfit`.
        most_blocks: How many numbered blocks it has at most, by the name of the list.
        widest: Features that attention reads at most; None for any number.
        widths: Features of the blocks of its published models; they tell where names and shapes fit several families.
        else_: The family to assume for a file whose names both have, unless shapes or blocks rule it out.
        layers: One a line, `original = diffusers`; `#` is the number of a block, the first
            number of the name. A name alone is the same in both. A line for one block, with its number, goes first.
            Several names on the right, with commas, are the rows of one fused matrix on the left, in that order.
            `swapped`: the halves of the rows are in the opposite order, if the layer gives only (shift, scale).
            `gated`: the same of a gate and what it gates, whatever the layer's size.
            `read-only`: the name is read, but another is written, whose line follows (`Row.read_only`).
            `grouped`: the parts are the query, key and value of grouped attention (`Row.grouped`).
        aliases: What a second dialect of original files writes for parts of the names in `layers`.
        vectors: The same as `layers` for norms and other tensors that are no layers, by the module's path; of names that
            both have, or that no checkpoint in original names has, there is none.
        variant: A regular expression for layers that only variants of it have.
        sometimes: The same for layers of `layers`, in either naming, that some of its models lack in all blocks. What has
            blocks without another layer is incomplete.
        twin: The beginning of the names of extra blocks in a variant, which have the same layers as the model's own.
        blocks: Lists of blocks, and layers outside of them, in the order in which a latent passes them, and what
            reports call them: `double_blocks.# = transformer_blocks`, or a name alone. `.#` marks a numbered list.
        extra_blocks: Layers outside of blocks that have no place in that order.
        attention: A regular expression for attention layers that do not have `attn` in their names.
        around: The same for layers around attention that are not called `ff`, `mlp` or the like.
        encoders: What ComfyUI calls the text encoders; several names where models of the family differ, the one to assume first.
        decides: Those of these that are different parts in different families: in a model of an unknown family, they
            are taken for the parts that they are here.
        kohya_encoders: Prefixes of text encoders' modules in kohya's files.
        kohya_naming: The naming in kohya's files of this family.
        lost: What hosts silently do not load from the formats' files.
        reads: The names that hosts read; those of a host that is not there were not measured.
        in_comfyui_since: The first version of ComfyUI in `lora.hosts.HOSTS` that has such models; None for all.
        context_widths: For a U-Net: widths of the context that its cross attention reads; the first is the base
            model's.
        unet_blocks: For a U-Net: its published blocks.
        projects_by_convolution: Whether a U-Net's transformers begin and end with 1×1 convolutions.
        steps: How many steps make a picture: 1, or None for several.
    """

    name: str
    title: str
    architecture: str
    base_version: str
    also_called: tuple[str, ...] = ()
    not_called: tuple[str, ...] = ()
    component: Literal["unet", "transformer"] = "transformer"
    in_diffusers: InDiffusers | None = None
    signatures: Mapping[str, str] = field(default_factory=dict)
    ratios: tuple[Ratio, ...] = ()
    most_blocks: Mapping[str, int] = field(default_factory=dict)
    widest: int | None = None
    widths: tuple[int, ...] = ()
    else_: str | None = None
    layers: str = ""
    aliases: Mapping[str, str] = field(default_factory=dict)
    vectors: str = ""
    variant: str | None = None
    sometimes: str | None = None
    twin: str | None = None
    blocks: str = ""
    extra_blocks: tuple[str, ...] = ()
    attention: str | None = None
    around: str | None = None
    encoders: Mapping[Part, tuple[str, ...]] = field(default_factory=dict)
    decides: tuple[str, ...] = ()
    kohya_encoders: Mapping[Part, str] = field(default_factory=lambda: KOHYA_ENCODERS)
    kohya_naming: Naming = "original"
    lost: tuple[Lost, ...] = ()
    reads: tuple[Reads, ...] = ()
    in_comfyui_since: str | None = None
    context_widths: tuple[int, ...] = ()
    unet_blocks: UnetBlocks = UnetBlocks()
    projects_by_convolution: bool = False
    steps: int | None = None

    @property
    def is_unet(self) -> bool:
        """Whether its denoiser is a U-Net of Stable Diffusion's make, which is translated by rule."""
        return self.component == "unet"

    def loses(self, host: str, format: str, path: str | None = None, down: str | None = None) -> bool:
        """Whether a host leaves a layer out.

        Args:
            host: As in `Lost.host`.
            format: Of the file.
            path: The layer's path, as the format names it; by default, all layers must be lost.
            down: The ending of the file's down factors; by default, it must be lost whatever the ending.
        """
        return any(
            (lost.host, lost.format) == (host, format)
            and lost.down in (None, down)
            and (lost.layers == ".*" if path is None else re.fullmatch(lost.layers, path) is not None)
            for lost in self.lost
        )

    @property
    def header_names(self) -> tuple[str, ...]:
        """All that headers call it."""
        return self.architecture, self.base_version, *self.also_called

    @cached_property
    def shown_blocks(self) -> tuple[tuple[str, str], ...]:
        """Each list of blocks (with `.#` after its name) or layer outside of blocks, and what reports call it."""
        lines = [line.partition(" = ") for line in map(str.strip, self.blocks.splitlines()) if line]
        return tuple((name, shown or name.removesuffix(".#")) for name, _, shown in lines)

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        """The lines of `layers`."""
        return parsed_rows(self.layers, self.aliases)

    @cached_property
    def has_one_naming(self) -> bool:
        """Whether diffusers' names are the original's."""
        return all(row.parts == (row.original,) for row in self.rows)


def parsed_rows(text: str, aliases: Mapping[str, str] = MappingProxyType({})) -> tuple[Row, ...]:
    """Read a table of layers; see `Family.layers` and `Family.aliases`."""
    return tuple(_parsed_row(line, aliases) for line in filter(None, map(str.strip, text.splitlines())))


def _parsed_row(line: str, aliases: Mapping[str, str]) -> Row:
    original, _, right = line.partition(" = ")
    *names, last = (right or original).split(", ")
    last, _, mark = last.partition(" ")
    also = original
    for name, other in aliases.items():
        also = also.replace(name, other)
    return Row(
        original,
        (*names, last),
        swapped=mark in ("swapped", "gated"),
        grouped=mark == "grouped",
        also=also if also != original else None,
        gated=mark == "gated",
        read_only=mark == "read-only",
    )
