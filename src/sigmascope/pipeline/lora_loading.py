"""What the installed diffusers makes of a LoRA file, asked of its own loader.

`lora.hosts` states what loaders do, as measured of one version. Here the file's tensors go through `load_lora_weights` of
the family's pipelines, as installed, up to where they would be put on the model; each tensor remembers the modules of the
file that it is made of. Where they would go is held to the layers of the family's class, made on the meta device. No weight
of a model is needed, and none is allocated.

Importing diffusers takes seconds. So a command asks only where that is paid already, where the installed version is another
than the measured one, or where the statement has no answer (`is_worth_asking`).
"""

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache, partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from os import PathLike
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lora import convert, extract, loadable, merge, resize, writer
from sigmascope.lora.families import Family, Part, family_named
from sigmascope.lora.families.text_encoders import in_transformers
from sigmascope.lora.file_family import file_family
from sigmascope.lora.formats import group_keys
from sigmascope.lora.hosts import HOSTS, HostReading, no_loader
from sigmascope.lora.loadable import ASK_INSTALLED, InstalledReading, Loads, WrittenLoads
from sigmascope.lora.module_names import parse_name
from sigmascope.lora.reader import lora_in

_NEEDED: Final = ("diffusers", "peft", "transformers")
_NOT_INSTALLED: Final = "diffusers, PEFT and transformers are not all installed"
_ENDING: Final = re.compile(
    r"\.(?:processor\.)?(?:lora_[AB]|lora\.(?:up|down)|lokr_\w+|lora_magnitude_vector)(?:\.|$).*"
)
_BLOCK: Final = re.compile(r"(?<=\.)\d+(?=\.)")
_MOST_CHARACTERS: Final = 200  # of an error of diffusers


def reading_of_installed(path: str | PathLike[str]) -> InstalledReading:
    """Ask the installed diffusers what it takes of a file.

    Args:
        path: A LoRA of any format.

    Raises:
        CheckpointError: The file is missing or damaged.
        LoraFormatError: Its keys follow no known format.
    """
    with open_checkpoint(Path(path)) as checkpoint:
        family = family_named(file_family(lora_in(checkpoint, check_finite=False, allow_broken=True)).family)
        modules = _modules_by_key(Path(path), tuple(checkpoint.keys()))
        of_encoders = frozenset(name for name in modules.values() if _is_of_encoder(name))
        names = frozenset(modules.values()) - of_encoders
        installed = installed_version()
        classes = family.in_diffusers
        reason = None
        if installed is None:
            reason = _NOT_INSTALLED
        elif not modules:
            reason = "the file changes no denoiser and no text encoder"
        elif classes is None:
            reason = (
                "the model family is not known"
                if family.name == "unknown"
                else f"diffusers has no pipeline of {family.title}"
            )
        if reason is not None or classes is None:
            return InstalledReading(installed, len(names), None, reason=reason)
        of_file = partial(InstalledReading, installed, family=family.name)
        none = partial(_with_nothing_taken, of_file, names, of_encoders)
        if (missing := no_loader(family)) is not None:
            return none(missing)
        traced = {key: _traced(checkpoint.tensor(key), modules.get(key)) for key in checkpoint.keys()}  # noqa: SIM118 - not a dict
    layers = _layers_of(family.name)
    if isinstance(layers, str):
        return of_file(len(names), None, reason=layers)
    given = _given(family, traced)
    if isinstance(given, str):
        return none(given)
    held = partial(_held, of_file)
    encoders = None
    if of_encoders:
        changed = {
            f"{part}.{layer}": of
            for part, state in given.encoders.items()
            for layer, of in _changed(state, _layers_of_encoder(family.name, part), "").items()
        }
        encoders = held(of_encoders, changed)
    return replace(
        held(names, _changed(given.denoiser, layers, f"{family.component}.")),
        encoders=encoders,
    )


def _held(
    of_file: Callable[..., InstalledReading], names: frozenset[str], changed: Mapping[str, frozenset[str]]
) -> InstalledReading:
    taken = names & frozenset[str]().union(*changed.values())
    return of_file(len(names), len(taken), len(changed), tuple(sorted(names - taken)))


def _with_nothing_taken(
    of_file: Callable[..., InstalledReading], names: frozenset[str], of_encoders: frozenset[str], reason: str
) -> InstalledReading:
    nothing = partial(_held, of_file, changed={})
    encoders = replace(nothing(of_encoders), reason=reason) if of_encoders else None
    return replace(nothing(names), reason=reason, encoders=encoders)


def installed_version() -> str | None:
    """Of diffusers; None unless it can load LoRAs here. Nothing is imported."""
    try:
        return version("diffusers") if all(find_spec(name) is not None for name in _NEEDED) else None
    except (PackageNotFoundError, ValueError):  # hidden, as ComfyUI's checkouts do
        return None


def is_worth_asking(reading: HostReading) -> bool:
    """Whether a command should ask the installed diffusers, which takes seconds to import.

    Args:
        reading: What the statement says of the same file.
    """
    installed = installed_version()
    if installed is None or "diffusers" in sys.modules:
        return installed is not None
    return reading.taken is None or not _is_measured(installed)


def _is_measured(installed: str) -> bool:
    measured = next(host.version for host in HOSTS if host.name == "diffusers")
    return installed.split(".")[:2] == measured.split(".")


def loads_of_written(path: Path) -> WrittenLoads:
    """`loadable.loads_of_written`, asking the installed diffusers where `is_worth_asking` says so.

    Raises:
        CheckpointError: The file is damaged.
    """
    with held_to_installed():
        return loadable.loads_of_written(path)


@contextmanager
def held_to_installed() -> Iterator[None]:
    """Inside the block, no PEFT file takes its place of which the installed diffusers would take nothing.

    What is written there has the installed diffusers' answer in its `loads`. Also a decorator of a function.
    """
    token = ASK_INSTALLED.set(_asked)
    try:
        yield
    finally:
        ASK_INSTALLED.reset(token)


convert_lora = held_to_installed()(convert.convert_lora)
extract_lora = held_to_installed()(extract.extract_lora)
merge_lora_files = held_to_installed()(merge.merge_lora_files)
resize_lora = held_to_installed()(resize.resize_lora)
save_lora = held_to_installed()(writer.save_lora)


def _asked(path: Path, stated: Loads) -> InstalledReading:
    """The installed diffusers' reading where it is worth asking; else why it was not asked."""
    reading, installed = stated.hosts.get("diffusers"), installed_version()
    modules = 0 if reading is None else reading.modules
    if reading is None:
        why = "the file is for an LBM" if stated.reason is None else stated.reason
    elif installed is None:
        why = _NOT_INSTALLED
    elif is_worth_asking(reading):
        return reading_of_installed(path)
    else:
        why = f"its rules are those that were measured, of diffusers {installed}"
    return InstalledReading(installed, modules, None, reason=why)


def _modules_by_key(path: Path, keys: tuple[str, ...]) -> dict[str, str]:
    """The module of each key, as the file is read."""
    groups = group_keys(path, keys).groups
    return {key: name for name, roles in groups.items() for key in roles.values()}


def _is_of_encoder(name: str) -> bool:
    return any(part.startswith("text_encoder") for part in parse_name(name).parts[:1])


class _Traced(Tensor):
    """A tensor that knows which modules of the file it is made of, through whatever is done with it.

    Attributes:
        modules: Their names.
    """

    modules: frozenset[str] = frozenset()

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """What the function gives for plain tensors, with the modules of all tensors that it was given."""
        with torch._C.DisableTorchFunctionSubclass():
            made = function(*args, **(kwargs or {}))
        given = [leaf.modules for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, _Traced)]
        modules = frozenset[str]().union(*given)
        return tree_map_only(Tensor, lambda tensor: _with(tensor, modules), made)


def _traced(tensor: Tensor, module: str | None) -> Tensor:
    return _with(tensor, frozenset() if module is None else frozenset({module}))


def _with(tensor: Tensor, modules: frozenset[str]) -> Tensor:
    own = tensor.as_subclass(_Traced)
    own.modules = modules
    return own


@lru_cache(maxsize=4)
def _layers_of(family: str) -> frozenset[str] | str:
    """Paths of the layers of a family's class, with and without the number of the block; why it cannot be made, if so."""
    model = _model(family)
    if isinstance(model, str):
        return model
    own = {
        name
        for name, layer in model.named_modules()
        if next(layer.parameters(recurse=False), None) is not None
    }
    return frozenset(own | {_of_any_block(name) for name in own})


@lru_cache(maxsize=4)
def _model(family: str) -> nn.Module | str:
    import diffusers

    classes = family_named(family).in_diffusers
    assert classes is not None
    kind = getattr(diffusers, classes.model, None)
    if kind is None:
        return f"the installed diffusers has no {classes.model}"
    with torch.device("meta"), _quiet():
        model: nn.Module = kind(**classes.config)
    return model


@lru_cache(maxsize=4)
def _layers_of_encoder(family: str, part: Part) -> frozenset[str]:
    """Paths of the layers of a family's text encoder, as its pipelines' loader names them; none if it takes no LoRA."""
    encoders = family_named(family).encoders.get(part, ())
    made = in_transformers(encoders[0], family) if encoders else None
    if made is None:
        return frozenset()
    import transformers

    config = getattr(transformers, made.config)(num_hidden_layers=made.layers)
    with torch.device("meta"), _quiet():
        model: nn.Module = getattr(transformers, made.model)(config)
    paths = frozenset(name for name, layer in model.named_modules() if isinstance(layer, nn.Linear))
    if hasattr(model, "text_model"):
        return paths
    return paths | {f"text_model.{path}" for path in paths}  # which diffusers strips for such a class


def _of_any_block(path: str) -> str:
    """A path without the number of its block: a file's model may have more blocks than the class by default."""
    return _BLOCK.sub("#", path, count=1)


class _Given(NamedTuple):
    """What a loader would put on the models of a pipeline, by their own keys.

    Attributes:
        denoiser: On the denoiser, with the component before each key.
        encoders: On each text encoder, by the component's name.
    """

    denoiser: dict[str, Tensor]
    encoders: dict[Part, dict[str, Tensor]]


def _given(family: Family, state: Mapping[str, Tensor]) -> _Given | str:
    """What the pipelines' loader would put on a pipeline; why it refuses the file, if so."""
    from diffusers import loaders
    from diffusers.utils import convert_unet_state_dict_to_peft

    classes = family.in_diffusers
    assert classes is not None
    mixin = getattr(loaders, classes.loader or "", None)
    if mixin is None:
        return f"the installed diffusers has no {classes.loader}"
    given = _Given({}, {})
    pipeline = _loading_into(mixin, given, family)
    try:
        with _quiet():
            pipeline.load_lora_weights(dict(state))
            own = given.denoiser
            if own and not any(
                mark in key for key in own for mark in (".lokr_", "lora_A")
            ):  # as a model's own `load_lora_adapter` renames them
                given = given._replace(denoiser=convert_unet_state_dict_to_peft(own))
    except Exception as error:  # noqa: BLE001 - whatever the loader raises, it takes nothing
        said = " ".join(str(error).split())[:_MOST_CHARACTERS]
        return f"its loader refuses the file ({type(error).__name__}: {said})"
    return given


def _loading_into(mixin: type, given: _Given, family: Family) -> Any:
    """A pipeline that only has the loader's methods, and keeps what it would put on its models.

    Widths are those of the file: whether they are the model's is for who has the model.
    """
    from diffusers.utils import convert_state_dict_to_diffusers, convert_state_dict_to_peft

    def keep(cls: Any, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        given.denoiser.update(state_dict)

    def keep_of_encoder(cls: Any, state_dict: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> None:
        part = kwargs.get("prefix") or cls.text_encoder_name
        own = {
            key.removeprefix(f"{part}."): tensor
            for key, tensor in state_dict.items()
            if key.startswith(f"{part}.")
        }
        given.encoders[part] = convert_state_dict_to_peft(convert_state_dict_to_diffusers(own)) if own else {}

    def drop(cls: Any, *args: Any, **kwargs: Any) -> None: ...

    def as_given(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return kwargs.get("lora_state_dict", kwargs.get("state_dict", args[-1] if args else None))

    def same_widths(cls: Any, *args: Any, **kwargs: Any) -> bool:
        return False

    own = {
        "load_lora_into_transformer": classmethod(keep),
        "load_lora_into_unet": classmethod(keep),
        "load_lora_into_text_encoder": classmethod(keep_of_encoder),
        "_load_norm_into_transformer": classmethod(drop),
        "_maybe_expand_transformer_param_shape_or_error_": classmethod(same_widths),
        "_maybe_expand_lora_state_dict": classmethod(as_given),
        "_maybe_expand_t2v_lora_for_i2v": classmethod(as_given),
        family.component: _model(family.name),
        "text_encoder": None,
        "text_encoder_2": None,
        "connectors": None,
        "lora_scale": 1.0,
    }
    return type("_Loading", (mixin,), own)()


def _changed(given: Mapping[str, Tensor], layers: frozenset[str], start: str) -> dict[str, frozenset[str]]:
    """The layers of the class that a state dict changes, and the modules that each is made of."""
    roles: dict[str, int] = {}
    modules: dict[str, frozenset[str]] = {}
    for key, tensor in given.items():
        path, ending = key.removeprefix(start), _ENDING.search(key)
        if ending is None or not key.startswith(start):
            continue
        layer = path.removesuffix(ending[0])
        if layer not in layers and _of_any_block(layer) not in layers:
            continue
        roles[layer] = roles.get(layer, 0) + 1
        modules[layer] = modules.get(layer, frozenset()) | getattr(tensor, "modules", frozenset())
    return {layer: modules[layer] for layer, count in roles.items() if count > 1 and modules[layer]}


@contextmanager
def _quiet() -> Iterator[None]:
    """Nothing of what diffusers says of a file is for the user of this check."""
    import warnings

    from diffusers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(verbosity)
