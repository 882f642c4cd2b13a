"""What the names of a LoRA's modules mean: part of the model, layer and family, with a model or without one.

kohya's names have underscores for dots, prefixes differ from tool to tool, and a U-Net or transformer has one name
for each layer in diffusers and another in its original file. Three steps undo all of that:

- `parse_name` takes one name apart: the part of the model, and the path inside that part. A name with all its dots
  turned into underscores, `down_blocks_1_resnets_0_conv1`, could be many paths. `unflattened_denoiser` and
  `unflattened_text_encoder` match it against the grammar of known architectures; other names stay flat, and only a
  model's own layers can resolve them.
- `LayerIndex` finds a model's layer for each name. Names are compared without dots and prefixes, part by part of
  the model, in both namings of its family.
- Without a model, `parse_names` gives the layers' paths with their family and naming. Which family a file is for, and
  what shows it, says `file_family.py`.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Final

from sigmascope.errors import ConfigError, LoraFormatError
from sigmascope.lora.families import (
    FAMILIES,
    SINGLE_FILE,
    UNET_FAMILIES,
    ModelLayout,
    Part,
    Row,
    UnetBlocks,
    attends_to_itself,
    families_with,
    family_misfit,
    family_named,
    is_layer_of,
    likeliest,
    row_of_diffusers,
    row_of_original,
    unflattened,
)
from sigmascope.lora.families.known import (
    ENCODER_PARTS,
    WIDTHS_BY_NAMES,
    is_known_layer,
    vector_of_diffusers,
    vector_of_original,
)
from sigmascope.lora.file import LoraFile, family_in
from sigmascope.lora.layer_names import (
    RESNET,
    RESNET_OF_SGM,
    TOP,
    TOP_OF_SGM,
    any_of,
    blocks_of,
    is_unet_layer,
    to_diffusers,
    to_sgm,
    usual_blocks,
)
from sigmascope.lora.linalg import without_pointwise_kernel

BIAS: Final = ".bias"
_TEXT_MODEL: Final = "text_model_"
_PARTS: Final[tuple[Part, ...]] = (
    "denoiser",
    "denoiser_2",
    "text_encoder",
    "text_encoder_2",
    "text_encoder_3",
    "text_encoder_4",
    "vae",
    "other",
)

# Of the checkpoint that `parse_names` gives layers of.
_OWN_PREFIXES: Final[dict[Part, str]] = {
    "denoiser": "denoiser.",
    "denoiser_2": "transformer_2.",
    "text_encoder": "text_encoder.",
    "text_encoder_2": "text_encoder_2.",
    "text_encoder_3": "text_encoder_3.",
    "text_encoder_4": "text_encoder_4.",
    "vae": "vae.",
}
ENCODER_PREFIXES: Final = {
    part: start for part, start in _OWN_PREFIXES.items() if part.startswith("text_encoder")
}
"""Of text encoders' layers in the checkpoint that `parse_names` gives layers of."""
# How names begin, and the parts that they may be of, the likeliest first.
_FLAT_STARTS: Final[dict[str, tuple[Part, ...]]] = {
    "lora_unet_": ("denoiser",),
    "lora_transformer_": ("denoiser",),
    "lycoris_": ("denoiser",),
    "oft_unet_": ("denoiser",),
    "lora_te_": ("text_encoder", "text_encoder_2"),
    "lora_te1_": ("text_encoder",),
    "lora_te2_": ("text_encoder_2", "text_encoder"),
    # T5: SD 3's third encoder, FLUX' second, Chroma's only one
    "lora_te3_": ("text_encoder_3", "text_encoder_2", "text_encoder"),
    "lora_te4_": ("text_encoder_4",),
}
_DOTTED_STARTS: Final[dict[str, tuple[Part, ...]]] = {
    # Of a trainer that put kohya's starts before dotted paths (ComfyUI's issue 4439).
    **{
        f"{start.removesuffix('_')}.": parts
        for start, parts in _FLAT_STARTS.items()
        if start.startswith("lora_te")
    },
    "diffusion_model.": ("denoiser",),
    "denoiser.": ("denoiser",),
    "unet.": ("denoiser",),
    "transformer_2.": ("denoiser_2",),
    "text_encoder.": ("text_encoder",),
    "text_encoder_2.": ("text_encoder_2",),
    "text_encoder_3.": ("text_encoder_3",),
    "text_encoder_4.": ("text_encoder_4",),
    "vae.vae_model.": ("vae",),
    **{prefix: (part,) for part, prefix in SINGLE_FILE},
    **{f"text_encoders.{encoder}.transformer.": parts for encoder, parts in ENCODER_PARTS.items()},
}
_ENCODER: Final = re.compile(r"text_encoders\.(\w+)\.transformer\.")


_FLAT_START: Final = re.compile(any_of(_FLAT_STARTS))
_DOTTED_START: Final = re.compile(any_of(_DOTTED_STARTS))
_FLAT_ANY_START: Final = re.compile(r"\w*?lora_(\w+)")
_NORM_SCALE: Final = ".scale"
"""A norm's weight in the original files of FLUX and its like."""
_CONTROLNET: Final = "controlnet"
_MOST_PEELED: Final = 4
"""Words that wrappers put before a layer's path."""
_USUAL_FLAT_START: Final = "lora_unet_"
_NUMBERED: Final = re.compile(r"\.(?:block)?\d+\.")
_LISTS: Final = (".to_out", "_to_out")
_UNET_OUT: Final = re.compile(r"\.transformer_blocks\.\d+\.attn\d\.to_out\.0$")
_COMPONENTS: Final = ("transformer.", "transformer_2.", "unet.", "text_encoder")  # of diffusers' pipelines
_TRANSFORMER: Final = "transformer."  # also the start of a path in some text encoders

# Names with underscores for dots.
_BLOCKS: Final = re.compile(
    r"(?:(down_blocks|up_blocks)_(\d+)_(resnets|attentions|downsamplers|upsamplers)_(\d+)"
    r"|(mid_block)_(resnets|attentions)_(\d+)"
    r"|(input_blocks|output_blocks)_(\d+)_(\d+)"
    r"|(middle_block)_(\d+))_(\w+)"
)
_TRANSFORMER_BLOCK: Final = re.compile(r"transformer_blocks_(\d+)_(\w+)")

_MARKS_OF_SDXL: Final = {
    "transformer_blocks_9_": "ten transformer blocks in a row",
    "add_embedding_linear": "its embedding of image sizes",
    "label_emb_0": "its embedding of image sizes",
    "text_encoder_2_": "its second text encoder",
    "lora_te2_": "its second text encoder",
}
"""What flat names of a U-Net's LoRA have in them that are for SDXL."""
CONTEXT_LAYERS: Final = ("attn2.to_k", "attn2.to_v", "attn2_to_k", "attn2_to_v")


@dataclass(frozen=True, slots=True)
class ModuleName:
    """A module's name, taken apart.

    Attributes:
        parts: The parts of the model that it may belong to, the likeliest first; none if the name does not say.
        path: The layer's path inside the part.
        is_flat: Whether the path has underscores where it had dots.
        encoder: ComfyUI's name of the text encoder, where the name has it.
    """

    parts: tuple[Part, ...]
    path: str
    is_flat: bool = False
    encoder: str | None = None

    def dotted(self, part: Part) -> str | None:
        """The path in one of the parts, with its dots; None for a flat path of no known architecture."""
        if not self.is_flat:
            return self.path
        is_text = part.startswith("text_encoder")
        return unflattened_text_encoder(self.path) if is_text else unflattened_denoiser(self.path)


@lru_cache(maxsize=4096)
def parse_name(name: str) -> ModuleName:
    """Take the name of a LoRA's module apart, in any format."""
    flat_start = _FLAT_START.match(name)
    if flat_start is not None:  # a few tools keep some dots, or put underscores around the path
        return ModuleName(
            _FLAT_STARTS[flat_start[0]], flat(name[flat_start.end() :]).strip("_"), is_flat=True
        )
    start = _DOTTED_START.match(name)
    if start is not None:
        encoder = _ENCODER.match(name)
        parts, path = _DOTTED_STARTS[start[0]], name[start.end() :]
        if parts == ("denoiser",):
            path = _peeled(path) or path
        return ModuleName(parts, path, encoder=None if encoder is None else encoder[1])
    if name.startswith(_TRANSFORMER) and not name.startswith(f"{_TRANSFORMER}resblocks."):
        path = name.removeprefix(_TRANSFORMER)
        return ModuleName(("denoiser",), _peeled(path) or path)
    peeled = _peeled(name)
    if peeled is not None:
        return ModuleName(("denoiser",), peeled)
    flat_peeled = _FLAT_ANY_START.match(name)
    if flat_peeled is not None and unflattened_denoiser(flat_peeled[1]) is not None:
        return ModuleName(("denoiser",), flat_peeled[1], is_flat=True)
    return ModuleName((), name)


@cache
def _peeled(path: str) -> str | None:
    """A known layer's path in a denoiser, without what wrappers put before it, such as `module.` or `pipe.dit.`.

    Returns:
        The path; None if it begins with a known layer, or none follows.
    """
    return _without_wrapper(path, ".", _is_known)


_OF_CONTROLNET: Final = re.compile(
    r"(?:.*[._])?controlnet[._].*|(?:.*\.)?(?:control_model|input_hint_block|zero_convs|middle_block_out)\..*"
)


@lru_cache(maxsize=16384)
def is_of_controlnet(name: str) -> bool:
    """Whether a name, of a module or a model's layer, is one that only a ControlNet has, or says that it is inside of one."""
    return _OF_CONTROLNET.fullmatch(name) is not None


def _without_wrapper(path: str, between: str, is_layer: Callable[[str], bool]) -> str | None:
    """The layer that a path ends with, if it has a few words before it; None if it is a layer itself, or none follows.

    Args:
        path: Dotted or flat.
        between: What parts its words.
        is_layer: Whether a path is a layer's.
    """
    rest = path
    for _ in range(_MOST_PEELED + 1):
        if is_layer(rest):
            return rest if rest != path else None
        word, found, rest = rest.partition(between)
        if (
            not found or word.isdigit() or word == _CONTROLNET
        ):  # a numbered block or another model is no wrapper
            return None
    return None


def _is_known(path: str) -> bool:
    """Whether it is a layer in a block of a known family or a variant. Layers outside of blocks have names that any model may use."""
    return _NUMBERED.search(path) is not None and (
        is_known_layer(path) or to_sgm(path) is not None or to_diffusers(path) is not None
    )


def _is_known_flat(path: str) -> bool:
    dotted = unflattened_denoiser(path)
    return dotted is not None and _is_known(dotted)


def unwrapped(names: Iterable[str], is_layer: Callable[[str], bool] | None = None) -> dict[str, str]:
    """Take off what wrappers put before the layers' paths, by what the names have in common; no wrapper is listed.

    What precedes a known layer of a block is a wrapper, and it precedes the layers outside of blocks too: `pipe.dit.` in
    `pipe.dit.double_blocks.0.img_attn.proj` is what stands before `img_in` in `pipe.dit.img_in`. A flat name says less,
    as `single_blocks` could be `blocks` with something before it: there all have to begin alike.

    Args:
        names: Of a file's modules, or of anything inside them.
        is_layer: Whether a dotted path is a layer in a block of a model; without, known families alone decide.

    Returns:
        The names that have a wrapper, each with the name without it: the start that tells the part of the model stays,
        and becomes `lora_unet_` where another stood before flat paths. None of them, if two would become one.
    """
    own = {name: without_private(name) for name in names if _start_and_path(name)[0] is not None}
    dotted = _wrappers(
        [name for name in own.values() if "." in name],
        ".",
        lambda path: _is_known(path) or (is_layer is not None and is_layer(path)),
    )
    flat_names = [name for name in own.values() if "." not in name]
    flat_ones = _wrappers(flat_names, "_", _is_known_flat)
    if len(flat_ones) == 1 and all(name.startswith(next(iter(flat_ones))) for name in flat_names):
        dotted |= dict.fromkeys(flat_ones, _USUAL_FLAT_START)
    after: dict[str, str] = {}
    for name, rest in own.items():
        wrapper = max(filter(rest.startswith, dotted), key=len, default="")
        is_inside = wrapper and len(rest) > len(wrapper)
        after[name] = dotted[wrapper] + rest.removeprefix(wrapper) if is_inside else rest
    if len(set(after.values())) < len(after):
        return {}
    return {name: rest for name, rest in after.items() if rest != name}


@cache
def without_private(name: str) -> str:
    """A name without the words of wrappers inside it, such as `_orig_mod` in `blocks.0._orig_mod.attn.to_q`.

    torch's wrappers keep what they wrap under a private name, which begins with an underscore. In a flat name two
    underscores stand before it, and a known layer tells where it ends.
    """
    if "." in name.removesuffix(BIAS):
        return ".".join(word for word in name.split(".") if not word.startswith("_")) or name
    head, found, rest = name.partition("__")
    start = _FLAT_START.match(name)
    if not found or start is None or start.end() > len(head):
        return name
    words = rest.split("_")
    candidates = (f"{head}_{'_'.join(words[number:])}" for number in range(1, len(words)))
    return next((one for one in candidates if _is_known_flat(one[start.end() :])), name)


def with_numbers(names: Iterable[str]) -> dict[str, str]:
    """Put the number of a list's only layer behind names that lack it: attention's `to_out` is a list in diffusers.

    Returns:
        The names that become others, each with the other. A family's own layer of that name stays as it is.
    """
    own = dict.fromkeys(names)
    found: dict[str, str] = {}
    for name in own:
        module, end = name.removesuffix(BIAS), BIAS if name.endswith(BIAS) else ""
        if not module.endswith(_LISTS):
            continue
        longer = f"{module}{'_' if parse_name(module).is_flat else '.'}0"
        if f"{longer}{end}" not in own and not _is_layer(module) and _is_layer(longer):
            found[name] = f"{longer}{end}"
    return found


def _is_layer(name: str) -> bool:
    """Whether a name is that of a denoiser's layer in a known family; of a U-Net's attention, its path tells."""
    path = parse_name(name).dotted("denoiser")
    if path is None:
        return False
    return bool(families_with([path])) or bool(
        _UNET_OUT.search(path) and (to_sgm(path) or to_diffusers(path))
    )


def _wrappers(names: Iterable[str], between: str, is_layer: Callable[[str], bool]) -> dict[str, str]:
    """What stands before layers in blocks, with the start that tells the part; and that start alone."""
    found: dict[str, str] = {}
    for name in names:
        start, path = _start_and_path(name.removesuffix(BIAS))
        rest = _without_wrapper(path, between, is_layer)
        if rest is not None:
            found[f"{start}{path.removesuffix(rest)}"] = start or ""
    return found


def _start_and_path(name: str) -> tuple[str | None, str]:
    """How a denoiser's name begins, which may be nothing, and the rest; None for a name of another part."""
    flat_start, start = _FLAT_START.match(name), _DOTTED_START.match(name)
    if flat_start is not None:
        of_denoiser = _FLAT_STARTS[flat_start[0]] == ("denoiser",)
        return (flat_start[0] if of_denoiser else None), name[flat_start.end() :]
    if start is not None:
        return (start[0] if _DOTTED_STARTS[start[0]] == ("denoiser",) else None), name[start.end() :]
    if name.startswith(_TRANSFORMER):
        return _TRANSFORMER, name.removeprefix(_TRANSFORMER)
    return "", name


def flat(path: str) -> str:
    """A path with underscores for dots."""
    return path.replace(".", "_")


def _dotted(*paths: str) -> dict[str, str]:
    return {flat(path): path for path in paths}


_TRANSFORMER_LAYERS: Final = _dotted(
    *(f"attn{number}.to_{name}" for number in (1, 2) for name in ("q", "k", "v", "out.0")),
    *("ff.net.0.proj", "ff.net.2"),
    *(f"norm{number}" for number in (1, 2, 3)),
)


@lru_cache(maxsize=4096)
def unflattened_denoiser(name: str) -> str | None:
    """The path of a denoiser's layer, in the flat name's own naming.

    Args:
        name: Without `lora_unet_` or the like.

    Returns:
        The path; None for a name of no known architecture.
    """
    if name in _TOP_NAMES:
        return _TOP_NAMES[name]
    block = _BLOCKS.fullmatch(name)
    if block is None:
        return unflattened(name)
    *start, rest = (piece for piece in block.groups() if piece is not None)
    inner = _inside_block(rest)
    return None if inner is None else ".".join([*start, inner])


_TOP_NAMES: Final = _dotted(*TOP, *TOP_OF_SGM)


def _inside_block(rest: str) -> str | None:
    transformer = _TRANSFORMER_BLOCK.fullmatch(rest)
    if transformer is not None:
        inner = _TRANSFORMER_LAYERS.get(transformer[2])
        return None if inner is None else f"transformer_blocks.{transformer[1]}.{inner}"
    if rest in {"conv", "op"}:
        return rest
    return _ATTENTION_LAYERS.get(rest) or _RESNET_LAYERS.get(rest)


_ATTENTION_LAYERS: Final = _dotted("proj_in", "proj_out", "norm")
_RESNET_LAYERS: Final = _dotted(*RESNET, *RESNET_OF_SGM)


def unflattened_text_encoder(name: str) -> str | None:
    """The path of a text encoder's layer, as transformers names it.

    Args:
        name: Without `lora_te_` or the like.

    Returns:
        The path; None for a name of no known architecture.
    """
    if name == "text_projection":
        return name
    inner = unflattened(name.removeprefix(_TEXT_MODEL), text_encoder=True)
    if inner is None:
        return None
    return f"text_model.{inner}" if name.startswith(_TEXT_MODEL) else inner


@dataclass(frozen=True, slots=True)
class NameMatch:
    """Which layer each module of a LoRA is for.

    Attributes:
        matched: Layer path by module name, in the LoRA's order. For a change of a bias, `<layer>.bias`.
        unmatched: Modules for which the model has no layer, or none of their own: a matrix that is fused on one
            side and in parts on the other is put together by `align`.
    """

    matched: dict[str, str]
    unmatched: tuple[str, ...]


_AS_PARTS: Final = ("unet.", "transformer.")
"""What a model of no known family has before its names as a part of a pipeline, and files for it alone have not."""


@dataclass(slots=True)
class LayerIndex:
    """The layers of a model by every name that they may have in a LoRA.

    Attributes:
        layers: The paths.
        by_name: The layers of each flat name, in each part of the model.
        swapped: The lines of layers whose halves may be in the opposite order under that name (`Row.swaps`).
    """

    layers: frozenset[str] = frozenset()
    by_name: defaultdict[tuple[Part, str], set[str]] = field(default_factory=lambda: defaultdict(set))
    swapped: dict[tuple[Part, str], Row] = field(default_factory=dict)

    @classmethod
    def of(cls, layers: Iterable[str], layout: ModelLayout) -> "LayerIndex":
        """Index the layers of a model.

        Args:
            layers: Their paths, without `.weight`; all of them, so that a U-Net of unusual size is counted right.
                Other tensors that a LoRA may change are named in the same way: a norm by its path, any other
                parameter by its key.
            layout: How the model names its weights.
        """
        placed = [(layer, *layout.split(layer)) for layer in layers]
        index = cls(frozenset(layer for layer, _, _ in placed))
        blocks = blocks_of(path for _, part, path in placed if part == "denoiser")
        for layer, part, path in placed:
            for name, row in _names_of_layer(part, path, layout, blocks):
                key = part, _comparable(part, name)
                index.by_name[key].add(layer)
                if row is not None and row.swapped:
                    index.swapped[key] = row
            inner = next((path.removeprefix(start) for start in _AS_PARTS if path.startswith(start)), None)
            if inner is not None and part == "denoiser" and layout.family == "unknown":
                index.by_name[part, _comparable(part, inner)].add(layer)
        return index

    def match(self, lora: LoraFile) -> NameMatch:
        """Find the layer of each module and change of a LoRA of any format; its tensors are not read.

        A name that could be two layers is unmatched.

        Raises:
            LoraFormatError: Two modules of the LoRA are for one layer.
        """
        matched: dict[str, str] = {}
        taken: dict[str, str] = {}
        peeled = self.unwrapped(lora)
        for name in lora.names:
            layer = self.layer_of(peeled.get(name, name), lora.shape_of(name))
            if layer is None:
                continue
            if layer in taken:
                raise layer_twice(lora, taken[layer], name, layer)
            taken[layer], matched[name] = name, layer
        return NameMatch(matched, tuple(name for name in lora.names if name not in matched))

    def unwrapped(self, lora: LoraFile) -> dict[str, str]:
        """The names of modules that have a wrapper before one of the model's layers (see `unwrapped`), without it.

        A LoRA of WAN 2.2's second denoiser alone is for the one that the model is.
        """
        own = [name for name in lora.names if name.removesuffix(BIAS) not in self.layers]
        peeled = unwrapped(own, self._has_in_block)
        is_for_controlnet = any(map(is_of_controlnet, lora.names))
        if all(map(is_of_controlnet, self.layers)) or (
            is_for_controlnet and any(map(is_of_controlnet, self.layers))
        ):
            for name in own:
                rest = name.removeprefix(f"{_CONTROLNET}.")
                candidates = (
                    rest,
                    f"{_CONTROLNET}.{rest}",
                )  # of a ControlNet alone, and of one in a pipeline
                inside = [path for path in candidates if path.removesuffix(BIAS) in self.layers]
                peeled |= dict.fromkeys([name], inside[0]) if inside else {}
        if is_of_second_denoiser(lora.names) and not any(part == "denoiser_2" for part, _ in self.by_name):
            peeled |= {
                name: _OWN_PREFIXES["denoiser"] + name.removeprefix(_OWN_PREFIXES["denoiser_2"])
                for name in own
            }
        return peeled

    def _has_in_block(self, path: str) -> bool:
        return _NUMBERED.search(path) is not None and ("denoiser", flat(path)) in self.by_name

    def find(self, part: Part, path: str) -> str | None:
        """The layer of a path inside a part of the model, whatever its prefix."""
        layers = self.by_name.get((part, _comparable(part, path)), set())
        return next(iter(layers)) if len(layers) == 1 else None

    def layer_of(self, name: str, shape: tuple[int, ...]) -> str | None:
        """The layer that a module is for; None if there is none, or more than one.

        Args:
            name: The module's, in any format.
            shape: Of the weight that it changes.
        """
        if name in self.layers:
            return name
        module = name.removesuffix(BIAS)
        layer = module if module in self.layers else self._look_up(parse_name(module), module, shape)
        return None if layer is None else layer + name[len(module) :]

    def _look_up(self, parsed: ModuleName, module: str, shape: tuple[int, ...]) -> str | None:
        whole = ModuleName((), module)
        for candidate in (parsed, whole):
            for part in candidate.parts or _PARTS:
                key = part, _comparable(part, candidate.path)
                layers = self.by_name.get(key, set())
                row = self.swapped.get(key)
                # The weight tells of a bias, and of a change whose tensors tell no shape.
                is_swapped = row is not None and (len(shape) < 2 or row.swaps(*shape[:2]))
                if len(layers) == 1 and not is_swapped:
                    return next(iter(layers))
        return None


def is_of_second_denoiser(names: Iterable[str]) -> bool:
    """Whether all modules are for the second denoiser of a pipeline, which WAN 2.2 takes for low noise."""
    return all(name.startswith(_OWN_PREFIXES["denoiser_2"]) for name in names)


def layer_twice(lora: LoraFile, first: str, second: str, layer: str) -> LoraFormatError:
    """What is raised of two modules for one layer."""
    return LoraFormatError(
        f"{lora}: {first} and {second} are both for {layer}.",
        hint="The file holds one layer under two names: remove one of them.",
    )


def _comparable(part: Part, path: str) -> str:
    """A path without what formats and versions write differently."""
    name = flat(path)
    return name.removeprefix(_TEXT_MODEL) if part.startswith("text_encoder") else name


def _names_of_layer(
    part: Part, path: str, layout: ModelLayout, blocks: UnetBlocks
) -> Iterator[tuple[str, Row | None]]:
    """A layer's own path and its name in the other naming; and the line of its family that says so."""
    yield path, None
    bare = without_private(path).removesuffix(_NORM_SCALE)
    if bare != path:
        path = bare
        yield path, None
    if part.startswith("text_encoder"):
        row = row_of_original("open_clip", path)
        if row is not None and row.is_rename:
            yield row.parts[0], row
    elif part in {"denoiser", "denoiser_2"} and is_unet_layer(path, layout):
        other = to_diffusers(path, blocks) or to_sgm(path, blocks)
        if other is not None:
            yield other, None
    elif part in {"denoiser", "denoiser_2"}:
        yield from _transformer_names(path, layout)


def _transformer_names(path: str, layout: ModelLayout) -> Iterator[tuple[str, Row | None]]:
    family = layout.family
    by_original = row_of_original(family, path) or vector_of_original(family, path)
    by_part = row_of_diffusers(family, path) or vector_of_diffusers(family, path)
    if layout.naming == "original" and by_original is not None:
        for name in by_original.originals:  # one matrix, whose halves are in one order
            if name != path:
                yield name, None
        if len(by_original.parts) == 1:
            yield by_original.parts[0], by_original
    elif layout.naming == "diffusers" and by_part is not None and len(by_part.parts) == 1:
        yield by_part.original, by_part
        if by_part.also is not None:
            yield by_part.also, by_part


@dataclass(frozen=True, slots=True)
class ParsedNames:
    """A LoRA's names, understood.

    Attributes:
        layout: Of a checkpoint that would have the layers under these paths.
        layers: Path by name in the LoRA; for a change of a bias, `<layer>.bias`.
        unknown: Flat names whose dots are not known.
        blocks: Of the U-Net, as far as the names tell.
    """

    layout: ModelLayout
    layers: Mapping[str, str]
    unknown: tuple[str, ...]
    blocks: UnetBlocks


def parse_names(lora: LoraFile, family: str | None = None) -> ParsedNames:
    """Interpret a LoRA's names without its model.

    Args:
        lora: In any format; its tensors are not read.
        family: The family of its model; by default it is told from header, names and shapes.

    Returns:
        The layers' paths, all in one naming.

    Raises:
        LoraFormatError: The names mix two namings that do not go together.
        ConfigError: There is no such family, or the LoRA's shapes are not that family's.
    """
    if family is not None:
        require_family(family)
    placed: dict[str, tuple[Part, str]] = {}
    unknown = []
    for name in lora.names:
        place = _placed(name)
        if place is None:
            unknown.append(name)
        else:
            placed[name] = place
    shapes = {
        path: without_pointwise_kernel(lora.shape_of(name))
        for name, (part, path) in placed.items()
        if part == "denoiser"
    }
    otherwise = None if family is None else family_misfit(family, shapes)
    if otherwise is not None:
        raise ConfigError(
            f"{lora} is not for the family {family}: {otherwise}.",
            hint="Give the model that it is for (--model).",
        )
    asked = family
    family = asked or _family(lora, placed, shapes)
    if family == "unknown":
        family = _family(lora, placed, {_by_flat(path): shape for path, shape in shapes.items()})
    placed = {
        name: (part, redotted(family, path) if part == "denoiser" else path)
        for name, (part, path) in placed.items()
    }
    shapes = {path: lora.shape_of(name) for name, (part, path) in placed.items() if part == "denoiser"}
    naming, blocks = naming_of(lora, family, shapes), blocks_of(shapes, usual_blocks(family), complete=False)
    is_any_unet = (
        asked is None
        and family in UNET_FAMILIES - {"lbm"}
        and family_in(lora.metadata) != family
        and _shown_unet_family(lora, shapes) is None
    )
    layers = {
        name: _OWN_PREFIXES.get(_part_of(family, name) if part.startswith("text") else part, "")
        + (_in_naming(naming, family, path, lora, blocks) if part == "denoiser" else path)
        for name, (part, path) in placed.items()
    }
    own = {name: layer + BIAS if name.endswith(BIAS) else layer for name, layer in layers.items()}
    layout = ModelLayout(family, naming, _OWN_PREFIXES, is_any_unet)
    return ParsedNames(layout, own, tuple(unknown), blocks)


def _by_flat(path: str) -> str:
    return unflattened_denoiser(flat(path)) or path


def redotted(family: str, path: str) -> str:
    """A family's layer by a path whose dots a tool guessed from underscores, such as `layers.0.attention.to.q`.

    Returns:
        The path itself, if it is the family's or no other dots make it so.
    """
    if family == "unknown" or is_of_family(family, path):
        return path
    other = _by_flat(path)
    return other if is_of_family(family, other) else path


def _placed(name: str) -> tuple[Part, str] | None:
    """The part and dotted path of a module; None for a flat name of no known architecture."""
    parsed = parse_name(name.removesuffix(BIAS))
    part: Part = parsed.parts[0] if parsed.parts else "denoiser"
    path = parsed.dotted(part)
    return None if path is None else (part, path)


def _part_of(family: str, name: str) -> Part:
    """The part of a module: of those that its name leaves open, the one that a family's encoder is."""
    parsed = parse_name(name.removesuffix(BIAS))
    encoders = family_named(family).encoders
    fitting = (
        part for part in parsed.parts if part in encoders and parsed.encoder in (None, *encoders[part])
    )
    return next(fitting, parsed.parts[0] if parsed.parts else "denoiser")


def _family(lora: LoraFile, names: Iterable[str], shapes: Mapping[str, tuple[int, ...]]) -> str:
    named = family_in(lora.metadata)
    if named is not None and family_misfit(named, shapes) is None:
        return named
    if any(name.startswith("denoiser.") for name in names):
        return "lbm"
    if _are_of_unet(shapes):
        return _shown_unet_family(lora, shapes) or _likely_unet_family(shapes)
    if len(shapes) == 1 and not _NUMBERED.search(next(iter(shapes))):
        return "unknown"  # one layer outside of blocks has a name that any model may use, such as `first`
    fitting = [family for family in families_with(shapes) if family_misfit(family, shapes) is None]
    candidates = likeliest(fitting, shapes)
    return candidates[0] if len(candidates) == 1 else "unknown"


def _are_of_unet(paths: Iterable[str]) -> bool:
    """Whether any path is a U-Net's alone. CogVideoX has a few of its names, such as `time_embedding.linear_1`."""
    shared = [
        (to_sgm(path) is not None or to_diffusers(path) is not None, bool(families_with([path])))
        for path in paths
    ]
    return any(is_unet and not others for is_unet, others in shared) or (
        bool(shared) and all(is_unet for is_unet, _ in shared)
    )


def _shown_unet_family(lora: LoraFile, shapes: Mapping[str, tuple[int, ...]]) -> str | None:
    """By the width of what cross attention attends to, or by what SDXL alone has; None where neither tells."""
    context = [shape for path, shape in shapes.items() if path.endswith(CONTEXT_LAYERS) and len(shape) == 2]
    if context and (attends_to_itself(context) or context[0][1] in WIDTHS_BY_NAMES):
        return "lbm" if attends_to_itself(context) else WIDTHS_BY_NAMES[context[0][1]]
    return "sdxl" if mark_of_sdxl(lora.names) is not None else None


def mark_of_sdxl(names: Iterable[str]) -> str | None:
    """What among the names of a U-Net's modules is SDXL's alone, in words; None if nothing is."""
    flat_names = [flat(name) for name in names]
    return next(
        (words for mark, words in _MARKS_OF_SDXL.items() if any(mark in name for name in flat_names)), None
    )


def _likely_unet_family(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """By the number of blocks, a guess."""
    numbered = ("down_blocks.3.", "up_blocks.3.", *(f"input_blocks.{number}." for number in (9, 10, 11)))
    return "sd15" if any(path.startswith(numbered) for path in shapes) else "sdxl"


def is_of_family(family: str, path: str) -> bool:
    """Whether a path inside the denoiser is a layer of that family, in either of its namings."""
    if family in UNET_FAMILIES:
        return to_sgm(path) is not None or to_diffusers(path) is not None
    return is_layer_of(family, path)


def require_family(family: str) -> None:
    """Refuse a family that is not known.

    Raises:
        ConfigError: With those that are.
    """
    if family not in FAMILIES:
        raise ConfigError(f"--family {family} is not known.", hint=f"Use one of: {', '.join(FAMILIES)}.")


def naming_of(lora: LoraFile, family: str, shapes: Mapping[str, tuple[int, ...]]) -> str:
    """`diffusers` if any path exists only there, or is read but not written; otherwise the other naming.

    Names of an unknown family in PEFT's format are diffusers' only where they begin with a component of a pipeline, or
    where every family that they fit has them in diffusers' naming.
    """
    if family == "unknown" and lora.format == "peft":
        fitting = [name for name in families_with(shapes) if family_misfit(name, shapes) is None]
        are_of_all = bool(fitting) and all(
            row_of_diffusers(name, path) for name in fitting for path in shapes
        )
        is_component = all(name.startswith(_COMPONENTS) for name in lora.names)
        return "diffusers" if are_of_all or is_component else "unknown"
    if family == "unknown":
        return "original" if lora.format == "comfyui" else "unknown"
    if family in UNET_FAMILIES:
        return "diffusers" if any(to_sgm(path) is not None for path in shapes) else "sgm"
    own = [(row_of_diffusers(family, path), row_of_original(family, path)) for path in shapes]
    is_diffusers = any(
        (row is not None and row.original not in row.parts) or (original is not None and original.read_only)
        for row, original in own
    )
    return "diffusers" if is_diffusers or family_named(family).has_one_naming else "original"


def _in_naming(naming: str, family: str, path: str, lora: LoraFile, blocks: UnetBlocks) -> str:
    """A path in the naming of the other paths; translated if it is in another."""
    if family in UNET_FAMILIES:
        renamed_path = to_diffusers(path, blocks) if naming == "diffusers" else None
        return renamed_path or path
    row = row_of_original(family, path)
    if naming == "original" and row is not None:
        return row.original  # of two dialects, the one that is written
    if naming != "diffusers" or row is None or path in row.parts:
        return path
    if not row.is_rename:
        raise LoraFormatError(
            f"{lora}: {path} is an original name, but other names in the file are diffusers'.",
            hint="Make the file again with one kind of names.",
        )
    return row.parts[0]
