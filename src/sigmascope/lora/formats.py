"""LoRA file formats: how kohya, PEFT, ComfyUI and native (LBM) files name a module and its tensors.

A `LoraFormat` recognises its files by their keys and names modules; its `FactorKeys` names their tensors.

- **kohya** flattens the whole path into one word, `lora_unet_down_blocks_1_resnets_0_conv1`, as sd-scripts and its
  kin write it: SD 1 and SD 2 by diffusers' names, SDXL, SD 3, FLUX and WAN by the names of their original files.
  ComfyUI reads both; diffusers reads it through the pipelines of SD 1, SDXL and Qwen-Image (docs/lora-files.md).
- **comfyui** keeps the original model's own paths, `diffusion_model.input_blocks.4.0.in_layers.2`. ComfyUI finds
  every weight of every model by it, whatever the family.
- **peft** names layers as diffusers reads them, `unet.down_blocks.1.resnets.0.conv1.lora_A.weight`. There is no
  alpha: most loaders in diffusers refuse a file with one beside `lora_A` and `lora_B`, so the scale is always in the up
  factor. The prefix must be that of the pipeline's component, or be given to `load_lora_adapter`. DoRA's magnitudes per output can be
  written, which PEFT takes for all modules of a LoRA or for none.
- **native** is the checkpoint's own module paths, LBM's first of all: `<module>.lora_up.weight` (out, r[, 1, 1]),
  `<module>.lora_down.weight` (r, in[, kh, kw]) and the scalar `<module>.alpha`; the header says
  `lbm_native_naming: "true"`. A model of any other family has its own paths in the same way.

In a file, each key is a module's name and an ending that says what the tensor is (`group_keys`). The endings are those
of kohya's and LyCORIS' tools (`.lora_up.weight`, `.alpha`, `.hada_w1_a`, `.diff`), of PEFT (`.lora_A.weight`, with the
adapter's name between in files saved from a live model) and of diffusers before it used PEFT (`.lora.up.weight`,
`.processor.to_q_lora.up.weight`, `.lora_linear_layer.up.weight`). A module's tensors form one or several entries
(`entries_of`). Each entry (plain factors, LoHa, a difference, …) is one change of one tensor of the model.

If plain factors are written with an alpha, it equals r, so that a reader that ignores alpha gets the same ΔW. There is
one exception: a kohya file of a U-Net with attention modules of different ranks has one alpha for all: see `KOHYA`.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple, get_args

from torch import Tensor

from sigmascope.errors import LoraFormatError
from sigmascope.lora.adapters import DOWN, MID, UP
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import (
    UNET_FAMILIES,
    ModelLayout,
    Naming,
    Part,
    Row,
    UnetBlocks,
    family_named,
    layout_of,
)
from sigmascope.lora.families.family import COMFYUI_ENCODERS, KOHYA_ENCODERS
from sigmascope.lora.families.known import row_of_original
from sigmascope.lora.file import PEFT_CONFIGS
from sigmascope.lora.format_names import FormatName
from sigmascope.lora.kinds import BASE_CHANGES
from sigmascope.lora.layer_names import renamed
from sigmascope.lora.linalg import is_convolution
from sigmascope.units import counted

FLAT_PREFIXES: Final = ("lora_", "lycoris_", "oft_unet_")
"""How kohya's names begin."""

# What a module's tensors are, and how their keys end.
ALPHA: Final = "alpha"
DORA: Final = "dora_scale"
MAGNITUDE: Final = "lora_magnitude_vector"
UP_BIAS: Final = "lora_up.bias"
EMBEDDING_UP: Final = "lora_embedding_B"
EMBEDDING_DOWN: Final = "lora_embedding_A"
LATENT: Final = "lora_latent_mapping.weight"
"""LoRA-XS' r×r matrix between the factors (Bałazy et al., arXiv 2405.17604)."""

DIFF_M: Final = "diff_m"
MODULATION: Final = ".modulation"
"""A WAN block's own parameter, whose difference is the block's `diff_m`."""
SET_BIAS: Final = "set_bias"
"""The whole bias of a layer that PEFT trained whole (`take_whole_modules`)."""
NORM_SCALE: Final = "scale"
"""How BFL's control LoRAs of FLUX end the key of a norm's new weight: diffusers and ComfyUI put it in the old one's place."""

# Of changes that depend on the weight. (IA)³'s `weight` is told by the `on_input` beside it.
_BASE_ROLES: Final = sorted(
    {role for change in BASE_CHANGES.values() for role in change.roles if "weight" not in role}
)
_SHARED: Final = frozenset(role for change in BASE_CHANGES.values() for role in change.shared)
_ON_INPUT: Final = ".on_input"

_KEY: Final = re.compile(
    r"(?P<name>.+?)(?P<end>(?=\.|_lora)(?:"  # looked for first: most places of a name have neither
    r"\.lora_(?:up|down|mid)(?:\.weight)?"
    r"|[._]lora[12]?\.(?:up|down)\.weight"
    r"|\.lora_linear_layer\.(?:up|down)\.weight"
    r"|\.lora_[AB](?:(?:\.[^.]+){0,2}\.(?:weight|bias))?"
    r"|\.lora_embedding_[AB](?:\.[^.]+)?"
    r"|(?:\.default)?_lora_latent_mapping\.weight"
    r"|\.lora_magnitude_vector(?:\.[^.]+)?(?:\.weight)?"
    r"|\.hada_(?:w[12]_[ab]|t[12])(?:\.[^.]+)?"
    r"|\.lokr_(?:w[12](?:_[ab])?|t2)(?:\.[^.]+)?"
    r"|\.(?:alpha|dora_scale|diff|diff_b|diff_m|set_weight|w_norm|b_norm)"
    r"|(?<=_norm)\.scale"
    r"|\.[ab][12]\.weight"
    rf"|\.(?:{'|'.join(_BASE_ROLES)})(?:\.(?!weight$)[^.]+)?(?:\.weight)?"
    r"))"
)
_XLABS: Final = re.compile(
    r"(?P<start>.*?)(?P<list>double|single)_blocks\.(?P<number>\d+)\.processor\.(?P<layer>\w+_lora[12]?)\.(?:up|down)\.weight"
)
"""XLabs' trainer names FLUX' layers by its attention processors: 1 is the picture's, 2 the text's."""
_OF_XLABS: Final = {
    ("double", "qkv_lora1"): "double_blocks.#.img_attn.qkv",
    ("double", "proj_lora1"): "double_blocks.#.img_attn.proj",
    ("double", "qkv_lora2"): "double_blocks.#.txt_attn.qkv",
    ("double", "proj_lora2"): "double_blocks.#.txt_attn.proj",
    ("single", "proj_lora"): "single_blocks.#.linear2",
}
_BESIDE_SINGLE_QKV: Final = {
    ("double", "qkv_lora1"): "transformer_blocks.#.attn.to_qkv",
    ("double", "proj_lora1"): "transformer_blocks.#.attn.to_out.0",
    ("double", "qkv_lora2"): "transformer_blocks.#.attn.to_added_qkv",
    ("double", "proj_lora2"): "transformer_blocks.#.attn.to_add_out",
    ("single", "qkv_lora"): "single_transformer_blocks.#.attn.to_qkv",
    ("single", "proj_lora"): "single_transformer_blocks.#.proj_out",
}
"""The same in a file that changes query, key and value of single blocks: the original model has no matrix of these alone."""
_SINGLE_QKV: Final = ".processor.qkv_lora."
_ROLES: Final = {"lora_A": DOWN, "lora_B": UP, "down": DOWN, "up": UP}
_GLORA_FACTORS: Final = frozenset({"a1", "a2", "b1", "b2"})
_KOHYA_FACTORS: Final = frozenset({"lora_up", "lora_down", "lora_mid"})
_PEFT_ROLES: Final = ("lora", "oft_R", "boft_", "ia3_", "vera_", "hra_")
# They change what a weight becomes, so a reader that skips them reads a different LoRA.
_REFUSED: Final = (
    (re.compile(r".*\.bm\.weight|.*\.glora_.+"), "a GLoRA factor of an unknown form"),
    (re.compile(r".*\.(?:lora_E|ranknum)(?:\..+)?"), "a factor that AdaLoRA prunes"),
    (re.compile(r".*\.reshape_weight"), "another size for the weight (reshape_weight)"),
    (re.compile(r".*\.lora_(?:up|down)\.\d+\.weight"), "the factor of one part of a fused layer"),
)
_SUSPECT: Final = re.compile(
    r"\.bm\.weight|\.glora_|\.lora_E|\.ranknum|\.reshape_weight|\.lora_(?:up|down)\.\d"
)
"""What every refused key has in it."""
Kind = str
"""`lora`, `lora_xs`, `embedding`, `tucker`, `loha`, `lokr`, `diff`, `set`, `up_bias`, or one of `BASE_CHANGES`."""
PLAIN_KINDS: Final = frozenset({"lora", "lora_xs", "embedding"})
"""Those that are read as one up and one down factor."""

_PARTNERS: Final = (("lora_up", "lora_down"), ("lora_B", "lora_A"), (".up.", ".down."), ("_B", "_A"))

# kohya: how attention's names end.
_ATTENTION_PROJECTIONS: Final = (
    *("_to_q", "_to_k", "_to_v", "_to_out_0"),
    *("_q_proj", "_k_proj", "_v_proj", "_out_proj"),
)

# PEFT: how names of text encoders begin, those whose rank diffusers finds, and how a U-Net's layers begin.
_TEXT_ENCODER: Final = "text_encoder"
_PEFT_FOUND_IN_ENCODERS: Final = (".q_proj", ".k_proj", ".v_proj", ".out_proj", ".fc1", ".fc2")
_PEFT_UNET_STARTS: Final = ("down_blocks.", "mid_block.", "up_blocks.", "conv_in", "conv_out")

# ComfyUI: how names begin.
COMFYUI_STARTS: Final = ("diffusion_model.", "text_encoders.")


@dataclass(slots=True)
class KeyGroups:
    """The keys of a LoRA file, sorted.

    Attributes:
        groups: Key by role, for each module.
        unused: Keys that belong to no module.
        by_peft: Whether some key is written as PEFT and diffusers write it, not as kohya does.
        spelled: How the file's keys begin, by the names of modules that are called otherwise here.
        broken: What is wrong with modules whose tensors cannot be read as a change.
    """

    groups: dict[str, dict[str, str]] = field(default_factory=dict)
    unused: list[str] = field(default_factory=list)
    by_peft: bool = False
    spelled: dict[str, str] = field(default_factory=dict)
    broken: dict[str, LoraFormatError] = field(default_factory=dict)

    @property
    def any_flat(self) -> bool:
        """Whether some name has underscores instead of dots, like kohya's."""
        return any(name.startswith(FLAT_PREFIXES) and "." not in name for name in self.groups)

    @property
    def any_of_comfyui(self) -> bool:
        """Whether some name has one of ComfyUI's prefixes."""
        return any(name.startswith(COMFYUI_STARTS) for name in self.groups)


@dataclass(frozen=True, slots=True)
class FactorKeys:
    """The ends of a module's keys.

    Attributes:
        up: Ending of the up factor.
        down: Ending of the down factor.
        alpha: Ending of the alpha; None if the format has none.
        holds_changes: Whether LoHa, LoKr, DoRA and differences are written too, under the names of kohya's tools.
        magnitude: Ending of DoRA's magnitudes per output, if the format writes those but no other changes.
        up_bias: Ending of the bias of an up factor, if the format writes changes of biases beside factors alone.
    """

    up: str = "lora_up.weight"
    down: str = "lora_down.weight"
    alpha: str | None = "alpha"
    holds_changes: bool = True
    magnitude: str | None = None
    up_bias: str | None = None

    def of(self, module: str) -> list[str]:
        """The keys of a module's up, down and, where the format has one, alpha."""
        return [f"{module}.{end}" for end in (self.up, self.down, self.alpha) if end is not None]

    def tensors(self, module: str, factors: LoraFactors) -> dict[str, Tensor]:
        """Up and down by key, contiguous. `writer.LoraWriter` adds alpha, once it knows the ranks of all modules."""
        up, down = factors.up.detach(), factors.down.detach()
        if is_convolution(factors.weight_shape):
            up = up.reshape(*up.shape, *(1 for _ in factors.weight_shape[2:]))
            down = down.reshape(factors.rank, *factors.weight_shape[1:])
        return {f"{module}.{self.up}": up.contiguous(), f"{module}.{self.down}": down.contiguous()}


@dataclass(frozen=True, slots=True)
class LoraFormat:
    """One way to name a LoRA's tensors in a file.

    Attributes:
        name: As in `LoraFile.format`.
        recognises: Whether a file with these keys has this format; no two formats recognise the same file.
        takes_rest: Whether it takes the files that no other format recognises.
        used_by: Which tools read it, in words for users.
        usual_naming: The naming of its layers for a model of a known family; None for the checkpoint's own.
        writable: The namings from which it can be written for a model of an unknown family, which has only its own
            names.
        module_name: Gives the name of a module from the part of the model, the layer's path there in that naming, the
            checkpoint's layout, and the prefix that the user asked for.
        keys: How a module's tensors are named.
    """

    name: FormatName
    recognises: Callable[[KeyGroups], bool]
    usual_naming: Naming | None
    used_by: str
    writable: frozenset[str]
    module_name: Callable[[Part, str, ModelLayout, str | None], str]
    keys: FactorKeys = field(default_factory=FactorKeys)
    takes_rest: bool = False

    def naming(self, layout: ModelLayout) -> Naming | None:
        """The naming of a model's layers that the names follow; None for the checkpoint's own."""
        if layout.family == "unknown":
            return None
        if self.name != "kohya":
            return self.usual_naming
        # Of every U-Net, hosts read diffusers' names; diffusers reads original ones for SDXL alone.
        return "diffusers" if layout.is_any_unet else family_named(layout.family).kohya_naming

    def name_for(
        self,
        layer: str,
        layout: ModelLayout,
        *,
        prefix: str | None = None,
        blocks: UnetBlocks | None = None,
    ) -> str:
        """The name of a layer's module.

        Args:
            layer: The layer's path in the checkpoint, without `.weight`.
            layout: The checkpoint's.
            prefix: What to write before the denoiser's names if the format leaves it open; "" for nothing.
            blocks: The U-Net's blocks; by default the family's own.

        Raises:
            LoraFormatError: The format has no name for such a layer.
        """
        placed = self.placement(layer, layout, blocks=blocks)
        if isinstance(placed, Row):
            raise LoraFormatError(
                f"{layer} is not one layer in {self.name} format: it belongs with "
                f"{', '.join(placed.parts)} in {placed.original}.",
                hint="Convert the whole LoRA, which joins and divides such layers.",
            )
        return self.named(layer, placed, layout, prefix)

    def placement(self, layer: str, layout: ModelLayout, *, blocks: UnetBlocks | None = None) -> str | Row:
        """The layer's path in the format's naming; a line of the table if it is not a separate layer there.

        Raises:
            LoraFormatError: The layer has no known name in that naming.
        """
        wanted = self.naming(layout)
        part, path = layout.split(layer)
        return path if wanted is None else renamed(path, part, layout, wanted, blocks)

    def named(self, layer: str, path: str, layout: ModelLayout, prefix: str | None = None) -> str:
        """The name of a module by its path in the format's naming; `layer` says which part it is of."""
        part, _ = layout.split(layer)
        return self.module_name(part, path, layout, prefix)

    def keys_for(self, layer: str, layout: ModelLayout, blocks: UnetBlocks | None = None) -> list[str]:
        """The keys of a layer's up, down and alpha, for `StorageCost`.

        For a layer that is joined with others, they are made from its own name: the file has fewer keys, and none is
        much longer.
        """
        try:
            return self.keys.of(self.name_for(layer, layout, blocks=blocks))
        except LoraFormatError:
            return self.keys.of(layer)


def format_named(name: str) -> LoraFormat:
    """The format of that name.

    Raises:
        LoraFormatError: There is none.
    """
    for lora_format in FORMATS:
        if lora_format.name == name:
            return lora_format
    known = ", ".join(lora_format.name for lora_format in FORMATS)
    raise LoraFormatError(f"there is no LoRA format {name!r}.", hint=f"Use one of: {known}.")


def _kohya_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    flat = path.replace(".", "_")
    if part == "denoiser":
        return f"lora_unet_{flat}"
    if part in KOHYA_ENCODERS:
        return family_named(layout.family).kohya_encoders[part] + flat
    raise LoraFormatError(
        f"kohya's format has no names for {path} of the part {part}.",
        hint="Leave that part out, or write the format native.",
    )


def alphas_mislead(lora_format: LoraFormat, ranks: Mapping[str, int], layout: ModelLayout) -> bool:
    """Whether diffusers would scale a U-Net's attention by other modules' alphas if each module's alpha were its rank.

    When diffusers (as of 0.42) reads kohya's files, it stores the alphas of attention projections under names that no
    layer has. So these layers get the alpha that most modules of their model have. That is right only if it is their
    own.
    """
    if lora_format.name != "kohya" or layout.family not in UNET_FAMILIES:
        return False
    models = _by_start(ranks, "_", 2).values()
    return not all(
        {rank for name, rank in of_model.items() if is_attention_projection(name)} <= {_usual_rank(of_model)}
        for of_model in models
    )


def is_attention_projection(name: str) -> bool:
    """Whether a module of kohya's format is a projection of attention, by its name."""
    return name.endswith(_ATTENTION_PROJECTIONS)


def _by_start(ranks: Mapping[str, int], separator: str, words: int) -> dict[str, dict[str, int]]:
    ranks_by_start: dict[str, dict[str, int]] = {}
    for name, rank in ranks.items():
        ranks_by_start.setdefault(separator.join(name.split(separator)[:words]), {})[name] = rank
    return ranks_by_start


def _usual_rank(ranks: Mapping[str, int]) -> int | None:
    """The rank that more modules have than any other."""
    counts = Counter(ranks.values()).most_common(2)
    is_clear = len(counts) == 1 or (len(counts) > 1 and counts[0][1] > counts[1][1])
    return counts[0][0] if is_clear else None


KOHYA = LoraFormat(
    name="kohya",
    used_by="ComfyUI, Forge, sd-scripts, LyCORIS",
    writable=frozenset({"original", "unknown"}),
    recognises=lambda groups: groups.any_flat,
    usual_naming="original",
    module_name=_kohya_module_name,
)


def _peft_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    if part == "denoiser":
        if prefix is None:
            is_unet = layout.family in UNET_FAMILIES or path.startswith(_PEFT_UNET_STARTS)
            prefix = "unet" if is_unet else "transformer"
            path = _without_start(path, layout, f"{prefix}.")
        return f"{prefix}.{path}" if prefix else path
    if part == "denoiser_2":
        return f"transformer_2.{path}"
    return path if part == "other" else f"{part}.{path}"


def _without_start(path: str, layout: ModelLayout, start: str) -> str:
    """A layer's path in a model of an unknown family, whose own keys may begin as the format's names do."""
    return path.removeprefix(start) if layout.family == "unknown" else path


def peft_header(ranks: Mapping[str, int], *, has_dora: bool) -> dict[str, str]:
    """PEFT's configuration of each component, if diffusers would not find the rank of a `text_projection`.

    Diffusers (as of 0.42) only looks at the ranks of a text encoder's attention and feed-forward layers. It assumes
    their most frequent rank for any other layer, and refuses the file if that layer has another rank.
    """
    components = _by_start(ranks, ".", 1)
    if all(_finds_ranks(name, of_component) for name, of_component in components.items()):
        return {}
    values: dict[str, object] = {}
    for component, of_component in components.items():
        usual = Counter(of_component.values()).most_common(1)[0][0]
        # `^`: not of other modules whose names end like this one's. CLIP's names had one part more before transformers 5
        start = "" if component.startswith(_TEXT_ENCODER) else "^"
        paths = {
            name.removeprefix(f"{component}.").removeprefix("text_model."): rank
            for name, rank in of_component.items()
        }
        others = {f"{start}{path}": rank for path, rank in paths.items() if rank != usual}
        config = {"r": usual, "lora_alpha": usual, "rank_pattern": others, "alpha_pattern": others}
        config |= {"target_modules": list(paths), "use_dora": has_dora}
        values |= {f"{component}.{field}": value for field, value in config.items()}
    return {PEFT_CONFIGS: json.dumps(values)}


def _finds_ranks(component: str, ranks: Mapping[str, int]) -> bool:
    if not component.startswith(_TEXT_ENCODER):
        return True
    seen = {name: rank for name, rank in ranks.items() if name.endswith(_PEFT_FOUND_IN_ENCODERS)}
    others = {rank for name, rank in ranks.items() if name not in seen}
    return not others or others == {_usual_rank(seen)}


PEFT = LoraFormat(
    name="peft",
    used_by="pipeline.load_lora_weights(...) in diffusers; on a model alone load_lora_adapter(..., prefix=...)",
    writable=frozenset({"diffusers"}),
    recognises=lambda groups: groups.by_peft and not (groups.any_flat or groups.any_of_comfyui),
    usual_naming="diffusers",
    module_name=_peft_module_name,
    keys=FactorKeys(
        up="lora_B.weight",
        down="lora_A.weight",
        alpha=None,
        holds_changes=False,
        magnitude="lora_magnitude_vector",
        up_bias="lora_B.bias",
    ),
)


def _comfyui_module_name(part: Part, path: str, layout: ModelLayout, prefix: str | None) -> str:
    if part == "denoiser":
        row = row_of_original(layout.family, path)
        own = row.original if row is not None and path == row.also else path  # ComfyUI has no second dialect
        return f"diffusion_model.{_without_start(own, layout, 'diffusion_model.')}"
    whole = layout.prefixes.get(part, "")
    if whole.startswith("text_encoders."):
        return whole + path  # the checkpoint says which of the family's encoders it has
    encoders = family_named(layout.family).encoders.get(part) or (COMFYUI_ENCODERS.get(part),)
    if encoders[0] is None:
        raise LoraFormatError(
            f"ComfyUI's format has no names for {path} of the part {part}.",
            hint="Leave that part out, or write the format native.",
        )
    return f"text_encoders.{encoders[0]}.transformer.{path}"


COMFYUI = LoraFormat(
    name="comfyui",
    used_by="ComfyUI's LoRA loaders",
    writable=frozenset({"original"}),
    recognises=lambda groups: groups.any_of_comfyui and not groups.any_flat,
    usual_naming="original",
    module_name=_comfyui_module_name,
)


NATIVE = LoraFormat(
    name="native",
    used_by="sigmascope lora validate, merge, inspect; sigmascope lbm infer --lora_path",
    writable=frozenset({"diffusers", "original", "unknown"}),
    recognises=lambda groups: bool(groups.groups),
    takes_rest=True,
    usual_naming=None,
    module_name=lambda part, path, layout, prefix: layout.prefixes.get(part, "") + path,
)
FORMATS: Final = tuple(
    sorted(
        (value for value in list(globals().values()) if isinstance(value, LoraFormat)),
        key=lambda lora_format: get_args(FormatName).index(lora_format.name),
    )
)
"""All that this module defines, as commands list them."""


class _OtherFile(NamedTuple):
    """A kind of file that is taken for a LoRA.

    Attributes:
        mark: What one of its keys begins with.
        what: What it is.
        hint: Where to load it.
    """

    mark: re.Pattern[str]
    what: str
    hint: str


_OTHER_FILES: Final = (
    _OtherFile(
        re.compile(r"lora_controlnet$"),
        "a Control-LoRA: a ControlNet, kept as factors beside the U-Net",
        "Load it where ControlNets are loaded: ComfyUI's Load ControlNet Model. diffusers cannot read it.",
    ),
    _OtherFile(
        re.compile(r"lllite_"),
        "a ControlNet-LLLite",
        "Load it with sd-scripts, or ComfyUI's nodes for ControlNet-LLLite. diffusers cannot read it.",
    ),
    _OtherFile(
        re.compile(
            r"(?:.*\.)?controlnet_(?:cond_embedding|down_blocks|mid_block|blocks|x_embedder)\.|(?:control_model\.)?input_hint_block\."
        ),
        "a ControlNet",
        "Load it where ControlNets are loaded: ControlNetModel.from_pretrained or from_single_file in diffusers, Load ControlNet "
        "Model in ComfyUI.",
    ),
    _OtherFile(
        re.compile(r"(?:image_proj|ip_adapter)\."),
        "an IP-Adapter",
        "Load it with pipe.load_ip_adapter in diffusers, or ComfyUI's nodes for IP-Adapters.",
    ),
    _OtherFile(
        re.compile(r"(?:emb_params|string_to_param(?:\..*)?|clip_[lg])$"),
        "a textual inversion (an embedding of a word)",
        "Load it with pipe.load_textual_inversion in diffusers, or put it into ComfyUI's folder models/embeddings.",
    ),
)
"""What is said of a file without a LoRA's keys; the first that fits."""
_BESIDE_FACTORS: Final = {"alpha": "alphas", "dora_scale": "DoRA's magnitudes"}
"""What keys end with that mean nothing by themselves, and what they hold."""


def recognised(path: Path, shapes: Mapping[str, tuple[int, ...]], groups: KeyGroups) -> LoraFormat:
    """The format of a file.

    Args:
        path: The file, for the message.
        shapes: Of all of its tensors by key, for the message.
        groups: Its keys, sorted.

    Raises:
        LoraFormatError: Its keys follow none.
    """
    matching = [lora_format for lora_format in FORMATS if lora_format.recognises(groups)]
    if matching:
        return min(matching, key=lambda lora_format: lora_format.takes_rest)
    keys = list(shapes)
    if not keys:
        raise LoraFormatError(
            f"{path}: it holds no tensors, so it is not a LoRA.",
            hint="The tool that wrote it saved nothing: make the file again.",
        )
    other = next((other for other in _OTHER_FILES if any(other.mark.match(key) for key in keys)), None)
    if other is not None:
        raise LoraFormatError(f"{path}: it is {other.what}, and no LoRA of a model.", hint=other.hint)
    ends = {key.rpartition(".")[2] for key in keys}
    if ends <= _BESIDE_FACTORS.keys():
        held = " and ".join(_BESIDE_FACTORS[end] for end in sorted(ends))
        raise LoraFormatError(
            f"{path}: it holds {held} and no factors, so it changes nothing.",
            hint="The tool that wrote it left out the factors: make the file again.",
        )
    known = ", ".join(lora_format.name for lora_format in FORMATS)
    known_formats = f"Known formats: {known} (<module>.lora_up.weight and <module>.lora_down.weight, or lora_B and lora_A)."
    family = layout_of(shapes).family
    looks = (
        "" if family == "unknown" else f"it looks like a model ({family_named(family).title}) and no LoRA: "
    )
    extract = (
        " sigmascope lora extract makes a LoRA from a model and its fine-tuned version." if looks else ""
    )
    raise LoraFormatError(
        f"{path}: {looks}its {counted(len(keys), 'key follows', 'keys follow')} no known LoRA format. "
        f"First keys: {', '.join(keys[:3])}.",
        hint=known_formats + extract,
    )


def group_keys(path: Path, keys: Iterable[str]) -> KeyGroups:
    """Sort a file's keys.

    Args:
        path: The file, for messages.
        keys: All of its keys.

    Returns:
        The modules in the file's order. Their names are the file's, without the parts that wrappers add:
        `base_model.model.`, `.processor`, an adapter's name.

    Raises:
        LoraFormatError: An unsupported kind of change, two adapters in one file, or two keys for one role.
    """
    groups, adapters, keys = KeyGroups(), set[str](), list(keys)
    scaled = {key.removesuffix(_ON_INPUT) for key in keys if key.endswith(_ON_INPUT)}
    layers_of_xlabs = _BESIDE_SINGLE_QKV if any(_SINGLE_QKV in key for key in keys) else _OF_XLABS
    shared: dict[str, str] = {}
    for key in keys:
        _refuse(path, key)
        of_file = _SHARED & set(key.split("."))
        if of_file:
            shared[next(iter(of_file))] = key
            continue
        match = _KEY.fullmatch(key)
        if match is None and key.removesuffix(".weight") in scaled:
            groups.groups.setdefault(_module_name(key.removesuffix(".weight"), old=False), {})["weight"] = key
            continue
        if match is None:
            groups.unused.append(key)
            continue
        words = match["end"].strip("._").split(".")
        role, adapter = _role(words)
        adapters.update(adapter)
        if len(adapters) > 1:
            raise LoraFormatError(
                f"{path} holds several adapters: {', '.join(sorted(adapters))}.",
                hint="Save each adapter in a file of its own.",
            )
        by_peft = words[0].startswith(_PEFT_ROLES) and words[0] not in _KOHYA_FACTORS
        groups.by_peft |= by_peft or "base_model.model." in match["name"]
        layer = _of_xlabs(key, layers_of_xlabs)
        name = layer or _module_name(match["name"], old=match["end"].startswith("_lora."))
        if layer is not None:
            groups.spelled[layer] = key.removesuffix(".weight").rpartition(".")[0]
        group = groups.groups.setdefault(name, {})
        if role in group:
            raise LoraFormatError(
                f"{path}: {group[role]} and {key} are the same tensor of {name}.",
                hint="Take one of the two out of the file, or make it again.",
            )
        group[role] = key
    _give_shared(groups, shared)
    _set_aside_lone_alphas(groups)
    return groups


def _of_xlabs(key: str, layers: Mapping[tuple[str, str], str]) -> str | None:
    """The module that a key of XLabs' trainer is of; None for any other key."""
    match = _XLABS.fullmatch(key) if ".processor." in key else None
    layer = None if match is None else layers.get((match["list"], match["layer"]))
    return None if match is None or layer is None else match["start"] + layer.replace("#", match["number"])


def _give_shared(groups: KeyGroups, shared: Mapping[str, str]) -> None:
    """Put the tensors that a file holds once beside those of each module that they are for."""
    given: set[str] = set()
    for group in groups.groups.values():
        for change in BASE_CHANGES.values():
            if change.shared and change.roles[0] in group:
                own = {role: shared[role] for role in change.shared if role in shared}
                group |= own
                given |= own.keys()
    groups.unused.extend(key for role, key in shared.items() if role not in given)


def _refuse(path: Path, key: str) -> None:
    if _SUSPECT.search(key) is None:
        return
    kind = next((what for pattern, what in _REFUSED if pattern.fullmatch(key)), None)
    if kind is not None:
        raise LoraFormatError(
            f"{path}: {key} holds {kind}, which Sigmascope does not read.",
            hint="Convert the file to plain LoRA factors with the tool that made it.",
        )


def _role(words: list[str]) -> tuple[str, list[str]]:
    """What a tensor is, and the name of its adapter if the key has one."""
    first, *rest = words
    if first in _KOHYA_FACTORS:
        return f"{first}.weight", []
    if f"{first}.weight".endswith(LATENT):
        return LATENT, []
    if first == "oft_blocks" and rest and rest[0].isdecimal():
        return f"{first}.{rest[0]}", []
    if first in {"lora", "lora1", "lora2", "lora_linear_layer"}:
        return _ROLES[rest[0]], []
    if first in _GLORA_FACTORS:
        return ".".join(words), []
    if first in {"lora_A", "lora_B"} and rest:
        bias = rest[-1] == "bias"
        return UP_BIAS if bias else _ROLES[first], [".".join(rest[:-1])] if rest[:-1] else []
    adapter = [word for word in rest if word != "weight"]
    return ("set_weight" if first == NORM_SCALE else _ROLES.get(first, first)), adapter


_OF_ATTENTION: Final = re.compile(
    r"\.processor\.(?=(?:to_[qkv]|to_out(?:\.\d+)?|to_add_out|add_[qkv]_proj)$)"
)
"""What stands before an attention's own projections where a file names them by its processor."""


def _module_name(name: str, *, old: bool) -> str:
    """A module's path without what PEFT and diffusers' attention processors put into it.

    A processor's own layers, such as an IP-Adapter's `to_k_ip.0`, keep their path.
    """
    plain = name.replace("base_model.model.", "", 1)
    if not old:
        return _OF_ATTENTION.sub(".", plain)
    plain = plain.replace(".processor.", ".")
    path, _, last = plain.rpartition(".")
    if ".self_attn" in path:  # of a text encoder: its projections were named as a UNet's are
        return f"{path}.{last.removeprefix('to_')}_proj"
    return f"{path}.{last}.0" if last == "to_out" else plain


def take_whole_modules(groups: KeyGroups, names: Collection[str]) -> None:
    """Of the keys that belong to no module, make modules of those that PEFT trained whole.

    Args:
        groups: Of a file.
        names: As in the configuration's `modules_to_save`: the ends of modules' paths.
    """
    for key in list(groups.unused):
        module, _, end = key.rpartition(".")
        name = _module_name(module, old=False)
        if end in ("weight", "bias") and any(f".{whole}." in f".{name}." for whole in names):
            groups.groups.setdefault(name, {})["set_weight" if end == "weight" else SET_BIAS] = key
            groups.unused.remove(key)


def _set_aside_lone_alphas(groups: KeyGroups) -> None:
    """An alpha or magnitude without factors changes nothing, unless a flat name has them.

    diffusers' conversion to kohya's names left the dots of its last words in the names of magnitudes (ComfyUI's issue 3494).
    """
    lone = [name for name, group in groups.groups.items() if group.keys() <= {ALPHA, DORA, MAGNITUDE}]
    for name in lone:
        own = groups.groups.pop(name)
        module = groups.groups.get(name.replace(".", "_"), own)
        groups.unused.extend(key for role, key in own.items() if role in module)
        module |= {role: key for role, key in own.items() if role not in module}


@dataclass(frozen=True, slots=True)
class Entry:
    """One change of one tensor of the model, still in its file.

    Attributes:
        name: Its name in `LoraFile.modules` or `LoraFile.changes`.
        module: Name of the file's module that it is part of.
        kind: What its tensors are.
        roles: Key of each tensor, by role.
        alpha: Key of the alpha.
        magnitude: Key of DoRA's magnitudes; they make any kind of change a `dora`.
        by_peft: Whether the magnitudes are PEFT's, which are always per output.
    """

    name: str
    module: str
    kind: Kind
    roles: Mapping[str, str]
    alpha: str | None = None
    magnitude: str | None = None
    by_peft: bool = False

    @property
    def is_plain(self) -> bool:
        """Whether it is plain factors, and so one of `LoraFile.modules`."""
        return self.magnitude is None and self.kind in PLAIN_KINDS


def entries_of(path: Path, groups: KeyGroups) -> list[Entry]:
    """The entries of a file, in its order.

    Args:
        path: The file, for messages.
        groups: Its keys. A magnitude that has nothing to act on joins the unused ones; a module where a factor lacks its
            partner, or that has two kinds of change at once, the broken ones.
    """
    entries: list[Entry] = []
    for name, group in groups.groups.items():
        try:
            entries += _entries(path, name, group, groups)
        except LoraFormatError as error:
            groups.broken[name] = error
    return entries


def _entries(path: Path, name: str, group: dict[str, str], groups: KeyGroups) -> list[Entry]:
    kinds = _kinds(group)
    if len(kinds) > 1:
        raise LoraFormatError(
            f"{path}: {name} is {' and '.join(BASE_CHANGES[kind].kind if kind in BASE_CHANGES else kind for kind in kinds)} at once.",
            hint="Only one of them can be meant: make the file again.",
        )
    magnitudes = [role for role in (DORA, MAGNITUDE) if role in group]
    entries = []
    for kind, roles in kinds.items():
        if kind in PLAIN_KINDS | {"tucker"}:
            _require_partners(path, name, group, kind)
        scaled = kind not in {"diff", "set"}
        magnitude = group[magnitudes[0]] if magnitudes and scaled else None
        alpha = group.get(ALPHA) if scaled else None
        by_peft = bool(magnitudes) and magnitudes[0] == MAGNITUDE
        entries.append(Entry(name, name, kind, roles, alpha, magnitude, by_peft))
    entries += _bias_entries(name, group)
    used = {key for entry in entries for key in (*entry.roles.values(), entry.alpha, entry.magnitude)}
    groups.unused.extend(key for key in group.values() if key not in used)
    return entries


def _kinds(group: Mapping[str, str]) -> dict[Kind, dict[str, str]]:
    """The roles of each kind of weight change that a module has tensors of."""
    plain: Kind = "tucker" if MID in group else "lora_xs" if LATENT in group else "lora"
    by_kind: dict[Kind, tuple[str, ...]] = {
        plain: (UP, DOWN, MID, LATENT),
        "embedding": (EMBEDDING_UP, EMBEDDING_DOWN),
        "loha": tuple(role for role in group if role.startswith("hada_")),
        "lokr": tuple(role for role in group if role.startswith("lokr_")),
        "diff": ("diff", "w_norm"),
        "set": ("set_weight",),
    }
    by_kind |= {
        kind: change.roles
        for kind, change in BASE_CHANGES.items()
        if change.roles and not group.keys().isdisjoint(change.roles)
    }
    keys_by_kind = {
        kind: {role: group[role] for role in roles if role in group} for kind, roles in by_kind.items()
    }
    if "BoftChange" in keys_by_kind and "OftChange" in keys_by_kind:
        del keys_by_kind["BoftChange"]  # of the same keys; the reader tells them apart by their shapes
    return {kind: roles for kind, roles in keys_by_kind.items() if roles}


def _bias_entries(name: str, group: Mapping[str, str]) -> list[Entry]:
    """Changes of the bias: a difference, or the bias of the up factor, which takes part in its scale; and of the modulation."""
    entries = [
        Entry(f"{name}.bias", name, "diff", {role: group[role]})
        for role in ("diff_b", "b_norm")
        if role in group
    ]
    if SET_BIAS in group:
        entries.append(Entry(f"{name}.bias", name, "set", {"set_weight": group[SET_BIAS]}))
    if DIFF_M in group:
        entries.append(Entry(f"{name}{MODULATION}", name, "diff", {DIFF_M: group[DIFF_M]}))
    if "ia3_l" in group:
        entries.append(Entry(f"{name}.bias", name, "Ia3BiasChange", {"ia3_l": group["ia3_l"]}))
    if UP_BIAS in group and DOWN in group:
        roles = {UP_BIAS: group[UP_BIAS], DOWN: group[DOWN]}
        entries.append(Entry(f"{name}.bias", name, "up_bias", roles, group.get(ALPHA)))
    return entries


def _require_partners(path: Path, name: str, group: Mapping[str, str], kind: Kind) -> None:
    needed = (EMBEDDING_UP, EMBEDDING_DOWN) if kind == "embedding" else (UP, DOWN)
    missing = [role for role in needed if role not in group]
    if not missing:
        return
    there = next(group[role] for role in (*needed, MID, LATENT) if role in group)
    ending = there.removeprefix(name).strip("._")
    raise LoraFormatError(
        f"{path}: {name} has {ending} but no {_partner(ending) or missing[0]}.",
        hint="The file is incomplete: make it again, or take the whole module out.",
    )


def _partner(ending: str) -> str | None:
    """How the same file would write the other factor's ending."""
    dotted = f".{ending}"
    for up, down in _PARTNERS:
        for this, other in ((up, down), (down, up)):
            if this in dotted:
                return dotted.replace(this, other, 1).removeprefix(".")
    return None
