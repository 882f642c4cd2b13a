"""A LoRA in memory or still in its file (`LoraFile`), its header, and checks of the paths that users give.

Every format is read into a `LoraFile` and written from one; a `LazyDict` reads a module when it is asked for.

In a header, `ss_*` are the fields of kohya's tools, which web UIs read too; `networks.lora` is their name for plain
up/down factors. `modelspec.*` is Stability AI's model metadata standard. Hashes of the tensors (`sshs_*`) are left out:
tools that want one calculate it, and a stale one is worse than none. All header text is untrusted: `read_training_facts`
sorts it and runs none of it.
"""

import json
import os
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final, Generic, NamedTuple, TypeVar

from torch import Tensor

from sigmascope.checkpoints import Checkpoint
from sigmascope.checkpoints.checkpoint import is_folder, is_same_file
from sigmascope.errors import (
    CheckpointError,
    ConfigError,
    LoraFormatError,
    ModelMismatchError,
    WriteError,
)
from sigmascope.files import parse_json, require_writable
from sigmascope.lora.adapters import WeightChange
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.families import FAMILIES, family_of_header
from sigmascope.units import counted

__all__ = ["LoraFile", "ModuleFacts", "WeightChange"]


if TYPE_CHECKING:
    Modules = Mapping[str, LoraFactors]
    Changes = Mapping[str, WeightChange]
else:  # a run-time check of the values would read them from the file
    Modules = Changes = Mapping


_MAX_CONFIG_BYTES: Final = 1 << 20
Key = TypeVar("Key")
Value = TypeVar("Value")


class ModuleFacts(NamedTuple):
    """What is known of a module without reading it.

    Attributes:
        kind: `lora` for plain factors, else as `WeightChange.kind`.
        weight_shape: Shape of the weight that it changes, as far as its tensors tell.
        rank: Of its factors; None where it has none.
        parameters: Number of stored values.
    """

    kind: str
    weight_shape: tuple[int, ...]
    rank: int | None
    parameters: int


class BrokenPart(NamedTuple):
    """A module of a file, or PEFT's configuration of it, that cannot be read.

    Attributes:
        message: What is wrong, with the file and the module.
        why: The same without these.
        hint: What to do.
        shapes: Of a module's tensors, by what they are (`formats.UP`, …).
    """

    message: str
    why: str
    hint: str | None
    shapes: Mapping[str, tuple[int, ...]]

    def as_error(self) -> LoraFormatError:
        """What a command raises that needs the whole file."""
        return LoraFormatError(self.message, hint=self.hint)


class StackedFactors(NamedTuple):
    """Plain factors of modules whose factors have the same shapes and dtypes, as they are stored, finite or not.

    Attributes:
        names: Of the modules.
        ups: (modules, out, rank).
        downs: (modules, rank, in·kh·kw).
    """

    names: tuple[str, ...]
    ups: Tensor
    downs: Tensor


class PlainSource(ABC):
    """What reads the plain factors of an open file by the names of modules, several at once."""

    @abstractmethod
    def alpha(self, name: str) -> float:
        """As `LoraFactors.alpha`; raises what reading the module does, as far as its alpha is concerned."""

    @abstractmethod
    def stacks(self, names: Iterable[str]) -> Iterator[StackedFactors]:
        """The factors of these modules, without those that take more than reading two tensors."""


@dataclass(frozen=True, eq=False)
class LoraFile:
    """The weight changes of one LoRA, and where they come from.

    Attributes:
        modules: Plain factors by module name, which is the start of its keys: "denoiser.conv_in" in native naming,
            "lora_unet_conv_in" in kohya's.
        changes: The changes that are more than up·down, by the tensor they change without ".weight":
            "denoiser.conv_in" for the weight, "denoiser.conv_in.bias" for the bias. No name is in both.
        metadata: The header's strings.
        path: The file it was read from, if any.
        format: The format it was read from: "native", "kohya", "peft" or "comfyui".
        unused_keys: Keys of the file that belong to no module here, so that nothing is dropped unseen.
        facts: Of each module and change that is still in its file; empty for a LoRA in memory.
        stored_names: What the file calls the modules whose names had a wrapper before the layer's path, which is not part
            of the names here (`module_names.unwrapped`).
        source: What reads plain factors, where the modules are still in their file as they are here.
        broken: The modules of the file that cannot be read, in none of the others; empty unless such a file was asked for.
        broken_config: Why PEFT's configuration cannot be read, likewise; the alphas are those of tensors then.
    """

    modules: Modules
    metadata: Mapping[str, str] = field(default_factory=dict)
    path: Path | None = None
    format: str = "native"
    unused_keys: tuple[str, ...] = ()
    changes: Changes = field(default_factory=dict)
    facts: Mapping[str, ModuleFacts] = field(default_factory=dict)
    stored_names: Mapping[str, str] = field(default_factory=dict)
    source: PlainSource | None = None
    broken: Mapping[str, BrokenPart] = field(default_factory=dict)
    broken_config: BrokenPart | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all modules, then of all changes."""
        return (*self.modules, *self.changes)

    @property
    def parameters(self) -> int:
        """Number of stored values, over all modules and changes."""
        return sum(self.facts_of(name).parameters for name in self.names)

    @property
    def ranks(self) -> dict[int, int]:
        """How many modules have each rank, by rising rank. Changes are not counted."""
        counts = Counter(self.facts_of(name).rank or 0 for name in self.modules)
        return dict(sorted(counts.items()))

    def shape_of(self, name: str) -> tuple[int, ...]:
        """Shape of the weight that a module or change is for, without reading the module.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).weight_shape

    def rank_of(self, name: str) -> int | None:
        """Rank of a module or change, without reading it; None if it has none.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).rank

    def kind_of(self, name: str) -> str:
        """`lora` for plain factors, otherwise the kind of change.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        return self.facts_of(name).kind

    def change(self, name: str) -> LoraFactors | WeightChange:
        """Read a module or change.

        Raises:
            KeyError: There is none of that name.
            NonFiniteError: It holds NaN or Inf.
        """
        return self.modules[name] if name in self.modules else self.changes[name]

    def alpha_of(self, name: str) -> float:
        """The alpha of plain factors, which are not read where that can be told without.

        Raises:
            KeyError: There is no module of that name.
            NonFiniteError: alpha is NaN or infinite, or the factors had to be read and hold NaN or Inf.
            LoraFormatError: alpha is not a number.
        """
        return self.modules[name].alpha if self.source is None else self.source.alpha(name)

    def stacks(self, names: Iterable[str]) -> Iterator[StackedFactors]:
        """The factors of these modules, read together; `modules` has those that are left out.

        At no time are more than a few modules in memory, or a few MiB.
        """
        return iter(()) if self.source is None else self.source.stacks(names)

    def only(self, names: Collection[str]) -> "LoraFile":
        """A LoRA of only these modules and changes, still in their file."""
        modules = {name: name for name in self.modules if name in names}
        changes = {name: name for name in self.changes if name in names}
        return replace(
            self,
            modules=LazyDict(modules, self.modules.__getitem__),
            changes=LazyDict(changes, self.changes.__getitem__),
        )

    def __len__(self) -> int:
        return len(self.modules)

    def __str__(self) -> str:
        """The name for messages: the file, if there is one."""
        return str(self.path) if self.path is not None else f"a LoRA of {counted(len(self), 'module')}"

    def facts_of(self, name: str) -> ModuleFacts:
        """Kind, shape, rank and size of a module or change, without reading it.

        Raises:
            LoraFormatError: There is no module or change of that name.
        """
        known = self.facts.get(name)
        if known is not None:
            return known
        if name in self.modules:
            factors = self.modules[name]
            return ModuleFacts("lora", factors.weight_shape, factors.rank, factors.parameters)
        if name in self.changes:
            change = self.changes[name]
            rank = getattr(change, "rank", None)
            return ModuleFacts(change.kind, change.weight_shape, rank, change.parameters)
        raise LoraFormatError(f"{self} has no module {name}.", hint="Choose one of its modules.")


class LazyDict(Mapping[str, Value], Generic[Key, Value]):
    """A mapping that makes a value at each access; iterating, counting and `in` make none.

    Args:
        sources: What each value is made from.
        read: Makes a value from its source.
    """

    def __init__(self, sources: Mapping[str, Key], read: Callable[[Key], Value]) -> None:
        self._sources = sources
        self._read = read

    def __getitem__(self, name: str) -> Value:
        return self._read(self._sources[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._sources)

    def __len__(self) -> int:
        return len(self._sources)

    def __contains__(self, name: object) -> bool:
        return name in self._sources


def as_text(name: str | os.PathLike[str]) -> str:
    """A file name as valid UTF-8 text: other bytes become U+FFFD."""
    return os.fsencode(name).decode("utf-8", "replace")


def is_of_diffusers(model: Path) -> bool:
    """Whether a model says that its names are diffusers' own, which PEFT's files go by."""
    folder = model if model.is_dir() else model.parent
    for file in (folder / "model_index.json", folder / "config.json"):
        if file.is_file():
            with file.open("rb") as stream:
                if b"_diffusers_version" in stream.read(_MAX_CONFIG_BYTES):
                    return True
    return False


def check_target(
    save_to: Path, flag: str = "--save_to", *, content: str = "a LoRA", format: str = "safetensors"
) -> None:
    """Refuse a target that is a folder, has a name of another format, or cannot be written.

    Args:
        save_to: The target.
        flag: Its flag, for messages.
        content: What is going to be written, for messages.
        format: Of the file, which is the ending of its name.

    Raises:
        ConfigError: Names the flag and the target.
        WriteError: The folder cannot be created or entered, or the existing file cannot be replaced.
    """
    try:
        target_is_folder = is_folder(save_to)
    except CheckpointError as error:
        raise WriteError(
            save_to, "cannot be reached.", hint="Choose a folder that you can open, or a shorter name."
        ) from error
    if target_is_folder:
        raise ConfigError(
            f"{flag} {save_to} is a folder.", hint=f"Name a file in it: {save_to / 'lora.safetensors'}."
        )
    if save_to.suffix != f".{format}":
        raise ConfigError(
            f"{flag} {save_to}: {content} is written as {'GGUF' if format == 'gguf' else format}.",
            hint=f"Name it {save_to.stem}.{format}.",
        )
    require_writable(save_to)


def refuse_inputs(target: Path, *models: Checkpoint, flag: str = "--save_to") -> None:
    """Refuse a target that is a file of an open input model.

    Raises:
        ConfigError: Names the flag and the model.
    """
    for model in models:
        if any(is_same_file(target, file) for file in model.files):
            raise ConfigError(
                f"{flag} {target} is part of the input {model.path}.", hint="Choose another name."
            )


_BASE_LAYER: Final = ".base_layer."
"""Where PEFT keeps the layer that an adapter was put on."""
_LORA_KEY_PARTS: Final = (".lora_up.", ".lora_down.", ".lora_A.", ".lora_B.", ".lora.up.", ".lora.down.")


def require_model(checkpoint: Checkpoint) -> None:
    """Refuse a LoRA where a model is asked for.

    Raises:
        ModelMismatchError: Names the file.
    """
    of_lora = [key for key in checkpoint if any(mark in key for mark in _LORA_KEY_PARTS)]
    if not of_lora:
        return
    wrapped = sum(_BASE_LAYER in key for key in checkpoint)
    if wrapped:
        raise ModelMismatchError(
            f"{checkpoint.path} is a model with a LoRA in it: {counted(wrapped, 'tensor is', 'tensors are')} the base's own "
            f"({_BASE_LAYER.strip('.')}), and {len(of_lora)} the adapter's. It was saved with PEFT's layers in place.",
            hint="Save it again after merge_and_unload() (PEFT) or fuse_lora() and unload_lora_weights() (diffusers), or unload "
            "the LoRA first to get the base back.",
        )
    raise ModelMismatchError(
        f"{checkpoint.path} is a LoRA, not a model.",
        hint="Give a complete checkpoint, or merge the LoRA into its base first.",
    )


def refuse_files(target: Path, files: Sequence[Path], flag: str = "--save_to") -> None:
    """Refuse a target that is one of the input files.

    Raises:
        ConfigError: Names the flag and the file.
    """
    for file in files:
        if is_same_file(target, file):
            raise ConfigError(f"{flag} {target} is the input {file}.", hint="Choose another name.")


PEFT_CONFIGS: Final = "lora_adapter_metadata"
"""The field in which diffusers writes the configurations of all components, as JSON."""
HASHES: Final = ("sshs_model_hash", "sshs_legacy_hash", "modelspec.hash_sha256")
"""Fields that hold a hash of the file's tensors."""
# Fields that are no longer true of a file that is made from another.
_STALE_FIELDS: Final = (
    *HASHES,
    "lbm_native_naming",
    PEFT_CONFIGS,
    "ss_network_module",
    "ss_network_dim",
    "ss_network_alpha",
    "ss_network_args",
)
VARYING: Final = "Dynamic"
"""What kohya's tools write for a rank that differs from layer to layer."""


_MODELSPEC_PREFIX: Final = "modelspec."
_OWN_PREFIX: Final = "sigmascope_"
_MAX_TAG_JSON_LENGTH: Final = 16 * 2**20
_MAX_TAGS: Final = 20
_TRAINING_FIELDS: Final = {
    "base model": ("ss_sd_model_name", "sshs_model_name"),
    "base version": ("ss_base_model_version",),
    "base hash": ("ss_new_sd_model_hash", "ss_sd_model_hash"),
    "network": ("ss_network_module",),
    "network arguments": ("ss_network_args",),
    "rank asked for": ("ss_network_dim",),
    "alpha asked for": ("ss_network_alpha",),
    "epochs": ("ss_num_epochs",),
    "epoch saved": ("ss_epoch",),
    "steps": ("ss_steps", "ss_max_train_steps"),
    "learning rate": ("ss_learning_rate",),
    "learning rate, denoiser": ("ss_unet_lr",),
    "learning rate, text encoder": ("ss_text_encoder_lr",),
    "schedule": ("ss_lr_scheduler",),
    "optimizer": ("ss_optimizer",),
    "batch size": ("ss_total_batch_size", "ss_batch_size_per_device"),
    "images": ("ss_num_train_images",),
    "resolution": ("ss_resolution",),
    "precision": ("ss_mixed_precision",),
    "clip skip": ("ss_clip_skip",),
    "seed": ("ss_seed",),
    "name": ("ss_output_name",),
    "comment": ("ss_training_comment",),
}
"""Fields of kohya's training header by meaning; the first one present counts."""


def lora_header(
    format_name: str,
    family: str,
    rank: int | str | None,
    conv_rank: int | None,
    *,
    module: str = "networks.lora",
    alpha: int | None = None,
) -> dict[str, str]:
    """The header of a LoRA with these ranks.

    Args:
        format_name: The format that is written.
        family: The family of the LoRA's model.
        rank: The rank of its Linear layers, or `VARYING`; None if there are none.
        conv_rank: The rank of its convolutions; None if there are none.
        module: kohya's name for the kind of network.
        alpha: One alpha for all modules; by default each module's alpha is its rank.
    """
    main_rank = rank if rank is not None else conv_rank
    header = {
        "ss_network_module": module,
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.implementation": "sigmascope",
    }
    if main_rank is not None:
        header |= {"ss_network_dim": str(main_rank), "ss_network_alpha": str(alpha or main_rank)}
    if format_name == "native":
        header["lbm_native_naming"] = "true"
    if family in FAMILIES:
        header["ss_base_model_version"] = FAMILIES[family].base_version
        header["modelspec.architecture"] = f"{FAMILIES[family].architecture}/lora"
    if conv_rank is not None:
        header["ss_network_args"] = json.dumps(
            {"conv_dim": str(conv_rank), "conv_alpha": str(alpha or conv_rank)}
        )
    return header


def kept_metadata(metadata: Mapping[str, str]) -> dict[str, str]:
    """The header fields that are still true once the LoRA is in another file."""
    return {key: value for key, value in metadata.items() if key not in _STALE_FIELDS}


def family_in(metadata: Mapping[str, str]) -> str | None:
    """The family that a header names; None if it names no known one."""
    for key in ("modelspec.architecture", "ss_base_model_version"):
        family = family_of_header(metadata.get(key, "").partition("/")[0])
        if family is not None:
            return family
    return None


@dataclass(frozen=True, slots=True)
class TrainingFacts:
    """A header, sorted by meaning. Every string is as the file has it.

    Attributes:
        training: Training settings by meaning, such as `learning rate`.
        trigger_phrase: `modelspec.trigger_phrase`, if any.
        tags: The most frequent tags of the training captions with their counts, the most frequent first.
        modelspec: The fields of the model metadata standard, without their prefix.
        provenance: The fields that Sigmascope wrote, without their prefix.
        others: Names of all other fields.
    """

    training: dict[str, str]
    trigger_phrase: str | None
    tags: tuple[tuple[str, int], ...]
    modelspec: dict[str, str]
    provenance: dict[str, str]
    others: tuple[str, ...]


def read_training_facts(metadata: Mapping[str, str]) -> TrainingFacts:
    """Sort a header by meaning; a malformed field counts as missing.

    Args:
        metadata: A LoRA file's header.
    """
    training = {}
    for meaning, names in _TRAINING_FIELDS.items():
        value = next((metadata[name] for name in names if _has_content(metadata.get(name))), None)
        if value is not None:
            training[meaning] = value
    known = {name for names in _TRAINING_FIELDS.values() for name in names} | {"ss_tag_frequency"}
    return TrainingFacts(
        training=training,
        trigger_phrase=metadata.get(f"{_MODELSPEC_PREFIX}trigger_phrase"),
        tags=_most_frequent(metadata.get("ss_tag_frequency", "")),
        modelspec=_with_prefix(metadata, _MODELSPEC_PREFIX),
        provenance=_with_prefix(metadata, _OWN_PREFIX),
        others=tuple(
            name
            for name in metadata
            if name not in known and not name.startswith((_MODELSPEC_PREFIX, _OWN_PREFIX))
        ),
    )


def _has_content(value: str | None) -> bool:
    return value is not None and value.strip() not in ("", "None", "null", "{}")


def _with_prefix(metadata: Mapping[str, str], prefix: str) -> dict[str, str]:
    return {name.removeprefix(prefix): value for name, value in metadata.items() if name.startswith(prefix)}


def _most_frequent(text: str) -> tuple[tuple[str, int], ...]:
    """The most frequent tags of `{"folder": {"tag": count, …}, …}`, summed over the folders."""
    counts: Counter[str] = Counter()
    try:
        folders = parse_json(text) if len(text) <= _MAX_TAG_JSON_LENGTH else None
    except ValueError:
        folders = None
    for tags in folders.values() if isinstance(folders, dict) else ():
        if not isinstance(tags, dict):
            continue
        for tag, count in tags.items():
            if type(count) is int and count > 0 and tag.strip():
                counts[tag.strip()] += count
    return tuple(counts.most_common(_MAX_TAGS))
