"""Read a LoRA file of any format.

`open_lora` reads names, shapes and ranks from the header, and a module's tensors when it is asked for; `load_lora` reads
the whole file into memory.

A module's own alpha overrides PEFT's configuration; without either, the scale is 1. diffusers writes the configuration
of each component as JSON into the header (`lora_adapter_metadata`: `unet.r`, `unet.lora_alpha`, …), PEFT writes
`adapter_config.json` beside `adapter_model.safetensors` (`read_configs`).

Some tools store the requested rank as alpha although the layer allows only r = min(rank, out, in·kh·kw): rank 16 for an
output convolution of 4 channels gives r = 4 and alpha 16. The factors already are the whole ΔW, and alpha / r = 4 would
make it four times too strong. `true_alpha` recognises such an alpha by the rank in the header.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from math import isfinite, prod
from os import PathLike
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from sigmascope.checkpoints import Checkpoint, open_checkpoint
from sigmascope.checkpoints.checkpoint import TensorInfo
from sigmascope.errors import FileError, LoraFormatError, NonFiniteError, SigmascopeError
from sigmascope.files import parse_json, reason_of
from sigmascope.lora.adapters import (
    DOWN,
    UP,
    Adapter,
    AdapterFacts,
    DiffChange,
    DoraChange,
    LohaChange,
    LokrChange,
    SetChange,
    TuckerChange,
    WeightChange,
    magnitudes_per_output,
    require_magnitudes,
    scale_of,
    shapes_error,
)
from sigmascope.lora.alignment import unfused
from sigmascope.lora.factors import NUMBER_FOR_ALPHA, LoraFactors
from sigmascope.lora.file import (
    PEFT_CONFIGS,
    BrokenPart,
    LazyDict,
    LoraFile,
    ModuleFacts,
    PlainSource,
    StackedFactors,
)
from sigmascope.lora.formats import (
    EMBEDDING_DOWN,
    EMBEDDING_UP,
    LATENT,
    PLAIN_KINDS,
    UP_BIAS,
    Entry,
    Kind,
    entries_of,
    group_keys,
    recognised,
    take_whole_modules,
)
from sigmascope.lora.kinds import BASE_CHANGES, BaseChange
from sigmascope.lora.linalg import at_least_float32, is_convolution, is_finite, is_real, max_rank
from sigmascope.lora.module_names import unwrapped, with_numbers

_ADAPTERS: Final[Mapping[Kind, type[Adapter]]] = {
    "tucker": TuckerChange,
    "loha": LohaChange,
    "lokr": LokrChange,
    "diff": DiffChange,
    "set": SetChange,
    "up_bias": DiffChange,
    **BASE_CHANGES,
}
_MOST_BYTES_AT_ONCE: Final = 16 << 20
_FLAGS: Final = frozenset({"on_input"})
"""Roles that are no weights but a choice: LyCORIS stores it as an integer."""
_SHARING_KEYS: Final = {"OftChange": ("OftChange", "BoftChange")}
"""Kinds whose keys end alike; the shapes of their tensors tell which it is."""


@contextmanager
def open_lora(
    path: str | PathLike[str] | Mapping[str, Tensor],
    *,
    check_finite: bool = True,
    keep_float8: bool = False,
    allow_broken: bool = False,
) -> Iterator[LoraFile]:
    """Open a LoRA file of any known format for reading one module at a time.

    Names, shapes and ranks come from the header alone; a module's tensors are read each time it is asked for.

    Args:
        path: A safetensors file, a `.pt`/`.ckpt` of tensors only, or a folder that holds one; or a file's tensors in memory, by key.
        check_finite: Whether reading a module that holds NaN or Inf is an error.
        keep_float8: Whether float8 factors stay float8. By default they become float32, without loss, because PyTorch
            does not calculate in float8.
        allow_broken: Whether a file is read of which some modules are broken, or PEFT's configuration; `LoraFile.broken` and
            `LoraFile.broken_config` have them then.

    Yields:
        The LoRA. Its modules can only be read inside the block.

    Raises:
        CheckpointError: The file is missing, damaged, or not a file of tensors.
        LoraFormatError: Its keys follow no known format, it holds an unsupported kind of change (AdaLoRA, …), or its
            tensors do not fit together.
        NonFiniteError: On reading a module: a tensor holds NaN or Inf.
    """
    with open_checkpoint(path) as checkpoint:
        yield lora_in(
            checkpoint, check_finite=check_finite, keep_float8=keep_float8, allow_broken=allow_broken
        )


def load_lora(path: str | Path) -> LoraFile:
    """Read a LoRA file of any known format into memory; see `open_lora`.

    Raises:
        NonFiniteError: A factor holds NaN or Inf.
    """
    with open_lora(path) as lora:
        return replace(lora, modules=dict(lora.modules), changes=dict(lora.changes), facts={}, source=None)


def lora_in(
    checkpoint: Checkpoint,
    *,
    check_finite: bool = True,
    keep_float8: bool = False,
    allow_broken: bool = False,
) -> LoraFile:
    """The LoRA in a file that is open already; see `open_lora`."""
    outline = _outline_of(checkpoint)
    wrong = next(filter(None, (outline.broken_config, *outline.broken.values())), None)
    if wrong is not None and not (allow_broken and outline.facts):
        raise wrong.as_error()
    reader = EntryReader(checkpoint, outline.configs, check_finite, keep_float8)
    lora = LoraFile(
        modules=LazyDict(outline.plain, reader.factors),
        metadata=dict(checkpoint.metadata),
        path=checkpoint.path,
        format=outline.format,
        unused_keys=(*outline.unused, *checkpoint.skipped),
        changes=LazyDict(outline.others, reader.change),
        facts=outline.facts,
        stored_names=outline.stored_names,
        source=PlainEntries(reader, outline.plain, outline.facts),
        broken=outline.broken,
        broken_config=outline.broken_config,
    )
    return unfused(lora)


@dataclass(frozen=True, slots=True)
class _Outline:
    """What the names, shapes and texts of a file say.

    Attributes:
        path: The file's.
        infos: Of all its tensors, in its order.
        metadata: The header's strings.
        stated: What PEFT's configurations are, or why they cannot be read, before they are held to the modules.
        configs: PEFT's configurations of it by component; none if they cannot be read.
        format: As in `LoraFile.format`.
        plain: The entries that are plain factors, by name.
        others: The other entries.
        facts: Of all of them.
        unused: As `LoraFile.unused_keys`, without those that cannot be read.
        stored_names: As in `LoraFile`.
        broken: As in `LoraFile`.
        broken_config: As in `LoraFile`.
    """

    path: Path
    infos: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    stated: "dict[str, PeftConfig] | BrokenPart"
    configs: Mapping[str, "PeftConfig"]
    format: str
    plain: Mapping[str, Entry]
    others: Mapping[str, Entry]
    facts: Mapping[str, ModuleFacts]
    unused: tuple[str, ...]
    stored_names: Mapping[str, str]
    broken: Mapping[str, BrokenPart]
    broken_config: BrokenPart | None


_LAST: Final[list[_Outline]] = []
"""Of the file that was opened last: whoever watches a LoRA opens its file before it is applied and again after that."""


def _outline_of(checkpoint: Checkpoint) -> _Outline:
    infos = tuple(map(checkpoint.info, checkpoint.keys()))
    for known in tuple(_LAST):
        is_same = known.path == checkpoint.path and known.metadata == checkpoint.metadata
        if is_same and known.infos == infos and known.stated == _configs_of(checkpoint, known.format):
            return known
    outline = _read_outline(checkpoint, infos)
    _LAST[:] = [outline]
    return outline


def _configs_of(checkpoint: Checkpoint, lora_format: str) -> "dict[str, PeftConfig] | BrokenPart":
    try:
        return read_configs(checkpoint.path, checkpoint.metadata) if lora_format == "peft" else {}
    except LoraFormatError as error:
        return _broken(error, checkpoint.path)


def _broken(
    error: LoraFormatError,
    path: Path,
    name: str = "",
    shapes: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
) -> BrokenPart:
    why = error.message.removeprefix(f"{path}: ")
    while name and why.startswith(name):  # the module's, and its key's
        why = why.removeprefix(name).lstrip(":. ")
    return BrokenPart(error.message, why.rstrip("."), error.hint, shapes)


def _unread_alphas(
    configs: "Mapping[str, PeftConfig]", entries: Iterable[Entry], path: Path
) -> BrokenPart | None:
    """Why PEFT's configurations give no alphas, where modules have no other; None if all is well."""
    if configs and any(entry.alpha is None for entry in entries):
        try:
            for config in configs.values():
                config.require_alphas()
        except LoraFormatError as error:
            return _broken(error, path)
    return None


def _read_outline(checkpoint: Checkpoint, infos: tuple[TensorInfo, ...]) -> _Outline:
    path = checkpoint.path
    groups = group_keys(path, (info.name for info in infos))
    lora_format = recognised(path, {info.name: info.shape for info in infos}, groups)
    stated = _configs_of(checkpoint, lora_format.name)
    configs = {} if isinstance(stated, BrokenPart) else stated
    take_whole_modules(groups, [name for config in configs.values() for name in config.whole_modules])
    reader = EntryReader(checkpoint, configs, check_finite=True, keep_float8=False)
    entries = [entry for entry in entries_of(path, groups) if _changes(checkpoint, entry)]
    names = [*(entry.name for entry in entries), *groups.broken]
    peeled = unwrapped(names)
    listed = with_numbers(peeled.get(name, name) for name in names)
    peeled |= {stored: listed[name] for stored in names if (name := peeled.get(stored, stored)) in listed}
    if peeled:
        entries = [replace(entry, name=peeled.get(entry.name, entry.name)) for entry in entries]
    _refuse_twice(path, entries)
    errors = {peeled.get(name, name): (name, error) for name, error in groups.broken.items()}
    facts: dict[str, ModuleFacts] = {}
    for entry in entries:
        try:
            facts[entry.name] = reader.facts(entry)
        except LoraFormatError as error:
            errors[entry.name] = entry.module, error
    wrong = stated if isinstance(stated, BrokenPart) else _unread_alphas(configs, entries, path)
    configs = {} if wrong else configs
    spelled = {entry.name: groups.spelled[entry.name] for entry in entries if entry.name in groups.spelled}
    return _Outline(
        path,
        infos,
        dict(checkpoint.metadata),
        stated,
        configs,
        lora_format.name,
        {entry.name: entry for entry in entries if entry.is_plain and entry.name in facts},
        {entry.name: entry for entry in entries if not entry.is_plain and entry.name in facts},
        facts,
        tuple(groups.unused),
        spelled | {name: groups.spelled.get(stored, stored) for stored, name in peeled.items()},
        {
            name: _broken(
                error,
                path,
                module,
                {role: checkpoint.info(key).shape for role, key in groups.groups[module].items()},
            )
            for name, (module, error) in errors.items()
        },
        wrong,
    )


def _changes(checkpoint: Checkpoint, entry: Entry) -> bool:
    """Whether an entry changes its tensor: PEFT's (IA)³ changes the bias where it scales outputs, (out, 1)."""
    return entry.kind != "Ia3BiasChange" or checkpoint.info(entry.roles["ia3_l"]).shape[:1] > (1,)


def _refuse_twice(path: Path, entries: Sequence[Entry]) -> None:
    seen: set[str] = set()
    for entry in entries:
        if entry.name in seen:
            raise LoraFormatError(
                f"{path}: two tensors change {entry.name}, and nothing tells which one is right.",
                hint="Make the file again.",
            )
        seen.add(entry.name)


@dataclass(frozen=True, slots=True)
class PeftConfig:
    """PEFT's configuration of one component.

    Attributes:
        source: Where it is written, for messages.
        values: Its fields.
    """

    source: str
    values: Mapping[str, Any] = field(default_factory=dict)

    @property
    def whole_modules(self) -> tuple[str, ...]:
        """The modules that were trained whole, beside the factors of others."""
        names = self.values.get("modules_to_save")
        return tuple(name for name in names if isinstance(name, str)) if isinstance(names, list) else ()

    @property
    def has_targets(self) -> bool:
        """Whether it names layers to put factors on."""
        return bool(self.values.get("target_modules"))

    def rank_of(self, module: str) -> float:
        """The rank that PEFT gives a module, given its path inside the component.

        Raises:
            LoraFormatError: It is not a number.
        """
        stated = self._number("r", module, "rank_pattern", "r")
        return _PEFT_RANK if stated is None else stated

    def scale_of(self, module: str, rank: int | None) -> float | None:
        """The scale of a module's product; None if the configuration does not give it.

        Args:
            module: The module's path inside the component.
            rank: The rank of the stored factors; if None, the configuration's.

        Raises:
            LoraFormatError: alpha or r is not a number above 0.
        """
        alpha = self._number("alpha", module, "alpha_pattern", "lora_alpha", "alpha")
        divisor = rank or self._number("r", module, "rank_pattern", "r")
        if alpha is None or divisor is None:
            return None
        if divisor < 1:
            raise LoraFormatError(f"{self.source}: r is {divisor:g}.", hint="Expected a rank of at least 1.")
        return scale_of(alpha, int(divisor), rank_stabilised=self.values.get("use_rslora") is True)

    def require_alphas(self) -> None:
        """Hold every alpha to being a number.

        Raises:
            LoraFormatError: One is none.
        """
        alphas = [*self._patterns("alpha_pattern").values(), *map(self.values.get, ("lora_alpha", "alpha"))]
        for value in alphas:
            if value is not None:
                self._as_number("alpha", value)

    def _number(self, name: str, module: str, patterns: str, *fields: str) -> float | None:
        values = [self._pattern(patterns, module), *map(self.values.get, fields)]
        value = next((value for value in values if value is not None), None)
        return None if value is None else self._as_number(name, value)

    def _as_number(self, name: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise LoraFormatError(
                f"{self.source}: {name} is {str(value)[:80]!r}, not a number.", hint=_MEND_CONFIG
            )
        return float(value)

    def _patterns(self, name: str) -> dict[str, Any]:
        patterns = self.values.get(name) or {}
        if not isinstance(patterns, dict):
            raise LoraFormatError(f"{self.source}: {name} is not a table of patterns.", hint=_MEND_CONFIG)
        return patterns

    def _pattern(self, name: str, module: str) -> Any:
        """The value of the first pattern that the module's path ends with, as PEFT matches them."""
        patterns = self._patterns(name)
        if len(patterns) > _MAX_PATTERNS:
            raise LoraFormatError(
                f"{self.source}: {name} has {len(patterns)} patterns; the limit is {_MAX_PATTERNS}."
            )
        for pattern, value in patterns.items():
            try:
                expression = _compiled(pattern)
            except ValueError as error:
                raise LoraFormatError(
                    f"{self.source}: the pattern {pattern[:80]!r} is refused ({error}).",
                    hint="List the modules' full names instead.",
                ) from error
            if expression.match(module):
                return value
        return None


@dataclass(frozen=True, slots=True)
class EntryReader:
    """Reads the modules of one file.

    Attributes:
        checkpoint: The open file.
        configs: PEFT's configurations of it by component; the key is "" if the file does not name its one component.
        check_finite: Whether NaN and Inf are refused.
        keep_float8: Whether float8 stays float8; otherwise it becomes float32.
    """

    checkpoint: Checkpoint
    configs: Mapping[str, PeftConfig]
    check_finite: bool
    keep_float8: bool

    def facts(self, entry: Entry) -> ModuleFacts:
        """Kind, shape, rank and size of an entry, from the header.

        Raises:
            LoraFormatError: Its tensors do not fit together, or are not floating-point numbers.
        """
        infos = {role: self.checkpoint.info(key) for role, key in entry.roles.items()}
        for role, info in infos.items():
            if not (role in _FLAGS and _is_flag(info.dtype)):
                self._require_numbers(info.name, info.dtype)
        if entry.alpha is not None:
            with self._named(entry):
                _require_one_number(self.checkpoint.info(entry.alpha))
        shape, rank = self._shape_and_rank(entry)
        parameters = sum(prod(info.shape) for role, info in infos.items() if _is_value(entry, role))
        kind = {"up_bias": "diff", "embedding": "lora"}.get(entry.kind, entry.kind)
        if entry.kind in BASE_CHANGES:
            kind = self._adapter_type(entry).kind
        if entry.magnitude is not None:
            magnitudes = self.checkpoint.info(entry.magnitude)
            self._require_numbers(magnitudes.name, magnitudes.dtype)
            parameters, kind = parameters + prod(magnitudes.shape), "dora"
        return ModuleFacts(kind, shape, rank, parameters)

    def factors(self, entry: Entry) -> LoraFactors:
        """Read a plain entry.

        Raises:
            LoraFormatError: Its alpha is not a number.
            NonFiniteError: A factor or alpha holds NaN or Inf.
        """
        shape, rank = self._shape_and_rank(entry)
        assert rank is not None
        if entry.kind == "embedding":  # its weight is (entries, width), the transpose of B·A
            up, down = (
                self._tensor(entry.roles[EMBEDDING_DOWN]).mT,
                self._tensor(entry.roles[EMBEDDING_UP]).mT,
            )
        else:
            up, down = (self._tensor(entry.roles[role]).flatten(1) for role in (UP, DOWN))
        if LATENT in entry.roles:
            latent = self._tensor(entry.roles[LATENT])
            compute = at_least_float32(up.dtype, latent.dtype)
            up = up.to(compute) @ latent.to(compute)
        with self._named(entry):
            return LoraFactors(up, down, self._alpha(entry, rank, shape), shape)

    def change(self, entry: Entry) -> WeightChange:
        """Read an entry that is more than plain factors; raises what `factors` does."""
        if entry.magnitude is None:
            return self._adapter(entry)
        direction = self.factors(entry) if entry.kind in PLAIN_KINDS else self._adapter(entry)
        magnitude = self._tensor(entry.magnitude)
        with self._named(entry):
            return DoraChange(direction, magnitude, self._per_output(entry, direction.weight_shape))

    def _adapter(self, entry: Entry) -> Adapter:
        _, rank = self._shape_and_rank(entry)
        parts = {role: self._tensor(key) for role, key in entry.roles.items() if _is_value(entry, role)}
        with self._named(entry):
            adapter = self._adapter_type(entry)
            if not issubclass(adapter, BaseChange):
                return adapter(parts, self._scale(entry, rank))
            alpha = None if entry.alpha is None else self._number(entry.alpha)
            scale = 1.0 if rank is None else self._scale(entry, rank)
            return adapter(parts, scale, alpha=alpha, settings=self._settings(entry.module))

    def _adapter_type(self, entry: Entry) -> type[Adapter]:
        names = _SHARING_KEYS.get(entry.kind, ())
        shapes = {role: self.checkpoint.info(key).shape for role, key in entry.roles.items()}
        return next(
            (BASE_CHANGES[name] for name in names if BASE_CHANGES[name].fits(shapes)), _ADAPTERS[entry.kind]
        )

    def _settings(self, name: str) -> Mapping[str, Any]:
        """PEFT's configuration of the component that a module is of; empty if there is none."""
        config = self.configs.get(name.partition(".")[0]) or self.configs.get("")
        return {} if config is None else config.values

    def alpha(self, entry: Entry, facts: ModuleFacts, known: Mapping[str, Tensor]) -> float:
        """The alpha of a plain entry, without its factors; `known` has tensors that were read before.

        Raises:
            LoraFormatError: It is not a number.
            NonFiniteError: It is NaN or infinite.
        """
        assert facts.rank is not None
        if entry.alpha is None and not self.configs:
            return float(facts.rank)
        with self._named(entry):
            alpha = self._alpha(entry, facts.rank, facts.weight_shape, known)
            if not isfinite(alpha):
                raise NonFiniteError(f"alpha is {alpha}.", hint=NUMBER_FOR_ALPHA)
        return alpha

    def _alpha(
        self,
        entry: Entry,
        rank: int,
        weight_shape: tuple[int, ...],
        known: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> float:
        """The alpha of plain factors, such that alpha / rank is their scale; raises what `factors` does."""
        if entry.alpha is not None:
            stored = self._number(entry.alpha, known.get(entry.alpha))
            return true_alpha(stored, rank, weight_shape, self.checkpoint.metadata)
        scale = self._stated_scale(entry.module, rank)
        return float(rank) if scale is None else scale * rank

    def _scale(self, entry: Entry, rank: int | None) -> float:
        """The scale of any other change; raises what `factors` does. `rank` is None if it has none."""
        if entry.kind in {"diff", "set"}:
            return 1.0
        if entry.alpha is not None:  # LyCORIS stores an alpha beside whole LoKr factors too, and ignores it
            return 1.0 if rank is None else scale_of(self._number(entry.alpha), rank)
        scale = self._stated_scale(entry.module, rank)
        return 1.0 if scale is None else scale

    def _stated_scale(self, name: str, rank: int | None) -> float | None:
        """The scale in PEFT's configurations; None if they do not give it."""
        component, _, path = name.partition(".")
        if component in self.configs:
            return self.configs[component].scale_of(path, rank)
        whole = self.configs.get("")
        return None if whole is None else whole.scale_of(name, rank)

    def _number(self, key: str, known: Tensor | None = None) -> float:
        return float(self.checkpoint.tensor(key) if known is None else known)

    def _shape_and_rank(self, entry: Entry) -> AdapterFacts:
        """Raises LoraFormatError for tensors that do not fit together."""
        shapes = {role: self.checkpoint.info(key).shape for role, key in entry.roles.items()}
        with self._named(entry):
            if entry.kind in {"lora", "lora_xs"}:
                facts = AdapterFacts(_plain_shape(shapes[UP], shapes[DOWN]), shapes[DOWN][0])
                if LATENT in shapes and shapes[LATENT] != (facts.rank, facts.rank):
                    raise shapes_error(shapes, UP, LATENT, DOWN)
            elif entry.kind == "embedding":
                entries, width = shapes[EMBEDDING_DOWN][1], shapes[EMBEDDING_UP][0]
                facts = AdapterFacts((entries, width), shapes[EMBEDDING_DOWN][0])
            elif entry.kind == "up_bias":
                facts = AdapterFacts(shapes[UP_BIAS], shapes[DOWN][0])
            else:
                facts = self._adapter_type(entry).facts(shapes)
            if entry.magnitude is not None:
                if not facts.weight_shape:
                    raise LoraFormatError(
                        f"{entry.magnitude} stands beside a change of kind {entry.kind}.",
                        hint="Take the key out of the file, or make the file again.",
                    )
                count = prod(self.checkpoint.info(entry.magnitude).shape)
                per_output = self._per_output(entry, facts.weight_shape)
                require_magnitudes(count, facts.weight_shape, per_output=per_output)
        return facts

    def _per_output(self, entry: Entry, shape: tuple[int, ...]) -> bool:
        assert entry.magnitude is not None
        return entry.by_peft or magnitudes_per_output(self.checkpoint.info(entry.magnitude).shape, shape)

    def _tensor(self, key: str) -> Tensor:
        tensor = self.checkpoint.tensor(key)
        if _is_flag(tensor.dtype):
            return tensor.to(torch.float32)
        wide = tensor.to(at_least_float32(tensor.dtype)) if tensor.dtype.itemsize == 1 else tensor
        if self.check_finite and not is_finite(wide):
            raise NonFiniteError(
                f"{self.checkpoint.path}: {key} holds NaN or Inf.",
                hint="Make the file again, in bf16 or float if it was fp16.",
            )
        return wide if tensor.dtype.itemsize == 1 and not self.keep_float8 else tensor

    def _require_numbers(self, key: str, dtype: torch.dtype) -> None:
        if not is_real(dtype):
            raise LoraFormatError(
                f"{self.checkpoint.path}: {key} is {str(dtype).removeprefix('torch.')}, "
                "not floating-point numbers.",
                hint="Convert the file to bf16, fp16 or float with the tool that made it.",
            )

    @contextmanager
    def _named(self, entry: Entry) -> Iterator[None]:
        """Put the file and the module before the message of an error."""
        where = f"{self.checkpoint.path}: {entry.module}"
        try:
            yield
        except FileError:
            raise  # names the file
        except SigmascopeError as error:
            raise type(error)(f"{where}: {error.message}", hint=error.hint) from error
        except IndexError as error:
            raise LoraFormatError(f"{where}: one of its tensors has too few axes.") from error


def _require_one_number(alpha: TensorInfo) -> None:
    is_odd = alpha.dtype.is_complex or (alpha.dtype.is_floating_point and not is_real(alpha.dtype))
    if prod(alpha.shape) == 1 and not is_odd:
        return
    dtype = str(alpha.dtype).removeprefix("torch.")
    has = (
        f"is {dtype}, and alpha is one real number"
        if is_odd
        else f"has the shape {alpha.shape}, and alpha is one number"
    )
    raise LoraFormatError(
        f"{alpha.name} {has}.", hint="Make the file again, or leave alpha out for a scale of 1."
    )


@dataclass(frozen=True, eq=False)
class PlainEntries(PlainSource):
    """Reads plain entries of one file, several at once; see `LoraFile`.

    Attributes:
        reader: Of the file.
        entries: By the names that its modules have here.
        facts: Of all of them.
    """

    reader: EntryReader
    entries: Mapping[str, Entry]
    facts: Mapping[str, ModuleFacts]

    def alpha(self, name: str) -> float:
        """Raises LoraFormatError if it is not a number, NonFiniteError if it is not a finite one."""
        return self.reader.alpha(self.entries[name], self.facts[name], self._alphas)

    @cached_property
    def _alphas(self) -> dict[str, Tensor]:
        keys = (entry.alpha for entry in self.entries.values() if entry.alpha is not None)
        return self.reader.checkpoint.tensors(keys)

    def stacks(self, names: Iterable[str]) -> Iterator[StackedFactors]:
        """The factors of entries that are a pair of factors, a few MiB at once."""
        some: list[_Pair] = []
        nbytes = 0
        for pair in self._pairs(names):
            if some and nbytes + pair.nbytes > _MOST_BYTES_AT_ONCE:
                yield from self._stacked(some)
                some, nbytes = [], 0
            some.append(pair)
            nbytes += pair.nbytes
        yield from self._stacked(some)

    def _pairs(self, names: Iterable[str]) -> Iterator["_Pair"]:
        info = self.reader.checkpoint.info
        for name in names:
            entry = self.entries.get(name)
            if entry is None or entry.kind != "lora" or len(entry.roles) != 2:
                continue
            up, down = info(entry.roles[UP]), info(entry.roles[DOWN])
            if up.dtype.itemsize > 1 and down.dtype.itemsize > 1:
                form = up.shape, up.dtype, down.shape, down.dtype
                yield _Pair(name, up.name, down.name, form, up.nbytes + down.nbytes)

    def _stacked(self, pairs: Sequence["_Pair"]) -> Iterator[StackedFactors]:
        tensors = self.reader.checkpoint.tensors(key for pair in pairs for key in (pair.up, pair.down))
        alike: dict[object, list[_Pair]] = {}
        for pair in pairs:
            alike.setdefault(pair.form, []).append(pair)
        for same in alike.values():
            ups, downs = (torch.stack([tensors[key] for key in keys]).flatten(2) for keys in _keys_of(same))
            yield StackedFactors(tuple(pair.name for pair in same), ups, downs)


class _Pair(NamedTuple):
    """A module's two factors in the file: their keys, their shapes and dtypes, and their bytes together."""

    name: str
    up: str
    down: str
    form: tuple[tuple[int, ...], torch.dtype, tuple[int, ...], torch.dtype]
    nbytes: int


def _keys_of(pairs: Sequence[_Pair]) -> tuple[list[str], list[str]]:
    return [pair.up for pair in pairs], [pair.down for pair in pairs]


def _is_flag(dtype: torch.dtype) -> bool:
    """Whether numbers of that type may be a flag, and are no weights: integers, and true or false."""
    return not (dtype.is_floating_point or dtype.is_complex)


def _is_value(entry: Entry, role: str) -> bool:
    """Whether a tensor is part of the change, and not only there to show its rank."""
    return not (entry.kind == "up_bias" and role == DOWN)


def _plain_shape(up: tuple[int, ...], down: tuple[int, ...]) -> tuple[int, ...]:
    """The weight's shape, (out, in[, kh, kw]): `down` has the kernel, and `up` is 1×1."""
    pointwise = len(up) == 2 or set(up[2:]) <= {1}
    fits = len(down) >= 2 and len(up) in (2, len(down)) and pointwise
    if not fits or up[1] != down[0] or min(*up, *down) < 1:
        ranks = f", of ranks {up[1]} and {down[0]}" if fits and up[1] != down[0] else ""
        ranks += ": they look transposed" if ranks and up[0] == down[1] < min(up[1], down[0]) else ""
        ranks += ", of rank 0: they hold nothing" if fits and up[1] == down[0] == 0 else ""
        raise LoraFormatError(
            f"up is {up} and down is {down}{ranks}.",
            hint="Expected up (out, rank[, 1, 1]) and down (rank, in[, kh, kw]), rank 1 or more.",
        )
    return (up[0], *down[1:])


_MEND_CONFIG: Final = (
    "Save the file again with the library that trained it, or take the configuration out: the alphas are those of tensors then. "
    "diffusers refuses a header that it cannot read, ComfyUI reads none."
)
_PEFT_RANK: Final = 8
"""Of a configuration that says none."""
_CONFIG_NAME: Final = "adapter_config.json"
_MAX_CONFIG_BYTES: Final = 4 * 2**20
_MAX_PATTERNS: Final = 10_000  # each is tried on each module; no model has as many layers
_CONFIG_FIELDS: Final = (
    "r",
    "lora_alpha",
    "alpha",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "target_modules",
    "modules_to_save",
)
# A file's own patterns could take for ever, so repeated groups and many quantifiers are refused.
_QUANTIFIER: Final = re.compile(r"[*+{]")
_QUANTIFIED_GROUP: Final = re.compile(r"\)\s*[*+?{]")


@lru_cache(maxsize=4096)
def _compiled(pattern: str) -> re.Pattern[str]:
    if len(pattern) > 500 or _QUANTIFIED_GROUP.search(pattern) or len(_QUANTIFIER.findall(pattern)) > 2:
        raise ValueError("too complex")
    try:
        return re.compile(rf"(?:.*\.)?(?:{pattern})$")
    except re.error as error:
        raise ValueError(str(error)) from error


def true_alpha(alpha: float, rank: int, weight_shape: Sequence[int], metadata: Mapping[str, str]) -> float:
    """`rank` (scale 1) for an alpha that only repeats the requested rank, otherwise `alpha` itself.

    Such an alpha is above the rank, the rank is the highest that the weight can have, and alpha equals the header's rank
    for that kind of layer. A chosen alpha is left alone: there the header's rank is that of the factors.

    Args:
        alpha: As stored.
        rank: The rank of the stored factors.
        weight_shape: (out, in) or (out, in, kh, kw).
        metadata: The header's `ss_network_dim` and `conv_dim` in `ss_network_args`.
    """
    if rank == max_rank(weight_shape) and alpha > rank and alpha in _ranks_asked_for(weight_shape, metadata):
        return float(rank)
    return alpha


def _ranks_asked_for(weight_shape: Sequence[int], metadata: Mapping[str, str]) -> list[float]:
    """The ranks that may have been requested; tools differ on whether a 1×1 convolution counts as Linear."""
    linear, convolution = metadata.get("ss_network_dim"), _conv_dim(metadata)
    pointwise = all(size == 1 for size in weight_shape[2:])
    asked: list[object] = [linear] if pointwise or convolution is None else []
    if is_convolution(weight_shape):
        asked.append(convolution)
    return [number for number in map(_number, asked) if number is not None]


def _conv_dim(metadata: Mapping[str, str]) -> object:
    try:
        arguments = parse_json(metadata.get("ss_network_args", "{}"))
    except ValueError:
        return None
    return arguments.get("conv_dim") if isinstance(arguments, dict) else None


def _number(value: object) -> float | None:
    try:
        return float(value) if isinstance(value, str | int | float) else None
    except (ValueError, OverflowError):
        return None


def read_configs(path: Path, metadata: Mapping[str, str]) -> dict[str, PeftConfig]:
    """PEFT's configurations of a file, by component.

    Args:
        path: The file. A configuration beside it counts only if the file is named `adapter_model.*`, as PEFT names it.
        metadata: The file's header.

    Raises:
        LoraFormatError: A configuration is not a JSON object.
    """
    if PEFT_CONFIGS in metadata:
        if metadata[PEFT_CONFIGS].strip() == "null":
            return {}
        values = _parsed(f"{path}: {PEFT_CONFIGS}", metadata[PEFT_CONFIGS])
        return _by_component(f"{path}: {PEFT_CONFIGS}", values)
    beside = path.with_name(_CONFIG_NAME)
    if not path.name.startswith("adapter_model.") or not beside.is_file():
        return {}
    try:
        if beside.stat().st_size > _MAX_CONFIG_BYTES:
            raise LoraFormatError(f"{beside} is too large to be a configuration.", hint=_MEND_CONFIG)
        values = _parsed(str(beside), beside.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise LoraFormatError(f"{beside} cannot be read ({reason_of(error)}).", hint=_MEND_CONFIG) from error
    return {"": PeftConfig(str(beside), values)}


def _parsed(source: str, text: str) -> dict[str, Any]:
    try:
        values = parse_json(text)
    except ValueError as error:
        raise LoraFormatError(f"{source} is not valid JSON ({error}).", hint=_MEND_CONFIG) from error
    if not isinstance(values, dict):
        raise LoraFormatError(f"{source} is not a JSON object.", hint=_MEND_CONFIG)
    return values


def _by_component(source: str, values: Mapping[str, Any]) -> dict[str, PeftConfig]:
    """Fields are named `unet.r` if the file has several components, and `r` otherwise."""
    components: dict[str, dict[str, Any]] = {}
    for key, value in values.items():
        component, _, name = key.rpartition(".")
        if name in _CONFIG_FIELDS:
            components.setdefault(component, {})[name] = value
    return {component: PeftConfig(source, fields) for component, fields in components.items()}
