"""Facts about a model or a pipeline, whatever it is wrapped in: its size, architecture, components, modules and tensors.

Nothing of the model is called to find them. `Module.modules`, `parameters` and `state_dict` run the host's code where a
class has its own: PEFT's layer around `nn.MultiheadAttention` registers its weights anew each time one of them is
called.

`module_facts` counts what one model holds. `pipeline_facts` has beside the components which processors and backends
compute the denoisers' attention, and how each model was set up to run (offloading, casting, compiling, memory format).
`detect_architecture` tells the kind of a denoiser by its modules' names.
"""

import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import FunctionType
from typing import Any, Final, Literal

import torch
from torch import Tensor, nn

from sigmascope.files import short_path
from sigmascope.probes.module_tree import ModuleTree, once_a_look, registered, tree_of
from sigmascope.probes.reading import PROBE_ERRORS, Reading, attempt, describe, reasons
from sigmascope.probes.tensors import places_of
from sigmascope.records.run import (
    AttentionFacts,
    ComponentFacts,
    JsonScalar,
    ModuleFacts,
    Offload,
    PipelineFacts,
    Role,
)
from sigmascope.units import counted

_INNER_NAMES = ("model", "cond_stage_model", "first_stage_model", "patcher")
"""Where ComfyUI's wrappers (ModelPatcher, CLIP, VAE) and others keep the module."""
_COMPILED, _REPLICATED = "_orig_mod", "module"
_REPLICATING = ("DataParallel", "DistributedDataParallel", "FullyShardedDataParallel")
_MOST_WRAPPERS = 8
_COUNTS = ("parameters", "trainable_parameters", "nbytes", "training")

# Architectures, told by the names of modules.
ArchitectureKind = Literal["MMDiT", "DiT", "UNet"]
_DENOISERS: Final = ("transformer", "unet", "transformer_2", "denoiser", "prior", "decoder")
"""Where pipelines keep what denoises, the usual ones first."""

# Of both streams of a joint block, as diffusers and the code of FLUX, SD3, AuraFlow and HiDream call them.
_JOINT_PROJECTION: Final = "add_q_proj"
_JOINT_PAIRS: Final = (
    ("img_attn", "txt_attn"),
    ("x_block", "context_block"),
    ("w1q", "w2q"),
    ("to_q", "to_q_t"),
)
_ROOT = r"(?:(?:diffusion_model|model|module|base_model|denoiser|unet)\.)*"
_DOWN: Final = re.compile(rf"{_ROOT}(?:down_blocks|input_blocks)\.\d+$")
_UP: Final = re.compile(rf"{_ROOT}(?:up_blocks|output_blocks)\.\d+$")
_BLOCK: Final = re.compile(
    r"(.*(?:blocks?|layers)\.\d+)\.(?:attn\w*|self_attn|cross_attn|attention\w*|mixer)$"
)
_IN_LEVEL: Final = re.compile(r"(?:^|\.)(?:down_blocks|input_blocks)\.")
"""Where a UNet, or a ControlNet as half of one, has its transformers."""
_TIME: Final = re.compile(
    r"(?:^|[._])(?:time|timestep|t_embed|t_block|adaln|ada_ln|adaLN|sigma_embed|condition_embed)"
)
_PLAIN_WHILE_MERGED: Final = ("in_proj_weight", "weight")
"""Of attention, what PEFT keeps as plain attributes while an adapter is merged into it."""
_MOST_KEYS = 50
"""Of each group of keys so many are named."""
_KEY_GROUPS = ("missing_keys", "unexpected_keys", "mismatched_keys")
_MOST_CONFIG = 60
_LONGEST_TEXT: Final = 200
_SOURCE = "_name_or_path"
_ROLES: Final[tuple[tuple[str, Role], ...]] = (
    ("text_encoder", "text_encoder"),
    ("image_encoder", "image_encoder"),
    ("vae", "vae"),
    ("vqvae", "vae"),
    ("vqgan", "vae"),
    ("movq", "vae"),
    ("tokenizer", "tokenizer"),
    ("scheduler", "scheduler"),
    ("controlnet", "other"),
    ("motion_adapter", "other"),  # its blocks are put into the U-Net
)
_PRIOR_PREFIX: Final = "prior_"
"""Begins the names of what makes the image's embedding from the text, in pipelines that then decode it."""
DEFAULT_BACKEND = "default"

# Hooks of diffusers and accelerate.
_CASTING, GROUP_OFFLOADING = "layerwise_casting", "group_offloading"
_MODEL_OFFLOAD_HOOK = "CpuOffload"


def module_facts(module: object) -> ModuleFacts:
    """Class, parameters, bytes, dtypes and devices of a model. Never raises.

    Parameters that share their memory count once. `nbytes`, `dtypes` and `devices` include buffers; the
    latter two count elements.

    Args:
        module: An `nn.Module`; a wrapper that holds one (ComfyUI's patchers, a compiled or replicated
            module); a pipeline with `components` (diffusers), whose modules are taken together; or a
            mapping of names to modules. For anything else, only the class and the reason.
    """
    class_name = type(module).__name__
    try:
        modules = _modules_of(module)
        if not modules:
            return _nothing_known(class_name, f"{class_name} has no module in a known place")
        if len(modules) > 1 or modules[0] is module or isinstance(module, Mapping) or components_of(module):
            return _counted(modules, class_name, None)
        return _counted(modules, type(modules[0]).__name__, class_name)
    except PROBE_ERRORS as error:
        return _nothing_known(class_name, describe(error))


def _modules_of(thing: object) -> list[nn.Module]:
    """The modules that a thing is made of: one, for anything but a pipeline or a mapping."""
    parts = thing if isinstance(thing, Mapping) else components_of(thing)
    if parts:
        return [part for part in parts.values() if isinstance(part, nn.Module)]
    inner = unwrap(thing)
    return [] if inner is None else [inner]


def _nothing_known(class_name: str, reason: str) -> ModuleFacts:
    return ModuleFacts(class_name, unavailable=dict.fromkeys(_COUNTS, reason))


def _counted(modules: Sequence[nn.Module], class_name: str, wrapper_class_name: str | None) -> ModuleFacts:
    """What modules hold that may share tensors."""
    held = [tensor for module in modules for tensor in _parameters(module)]
    of_buffers = [tensor for module in modules for tensor in _buffers(module)]
    places = places_of([*held, *of_buffers])
    parameters = dict(zip(places, held, strict=False))
    buffers = dict(zip(places[len(held) :], of_buffers, strict=True))
    tensors = list((parameters | buffers).values())
    dtypes, devices = Counter[str](), Counter[str]()
    for kind, elements in _elements_by(tensors, _DTYPE).items():
        dtypes[str(kind).removeprefix("torch.")] += elements
    for place, elements in _elements_by(tensors, _DEVICE).items():
        devices[str(place)] += elements
    return ModuleFacts(
        class_name,
        sum(parameter.numel() for parameter in parameters.values()),
        sum(parameter.numel() for parameter in parameters.values() if parameter.requires_grad),
        sum(tensor.numel() * tensor.element_size() for tensor in tensors),
        dict(dtypes),
        dict(devices),
        any(module.training for module in modules),
        wrapper_class_name=wrapper_class_name,
    )


_DTYPE, _DEVICE = attrgetter("dtype"), attrgetter("device")


def _elements_by(tensors: Iterable[Tensor], what: Callable[[Tensor], object]) -> Counter[object]:
    counts = Counter[object]()
    for tensor in tensors:
        counts[what(tensor)] += tensor.numel()
    return counts


def pipeline_facts(pipeline: object) -> PipelineFacts:
    """Components, architecture, attention and set-up of a pipeline. Never raises.

    Args:
        pipeline: What has `components` (diffusers), a mapping of names to components, or a denoiser alone.
    """
    class_name = type(pipeline).__name__
    named_parts = attempt(lambda: _parts(pipeline))
    parts = named_parts.value or {}
    architecture = detect_architecture(pipeline)
    unavailable = {} if named_parts.reason is None else {"components": named_parts.reason}
    if architecture.value is None:
        unavailable["architecture"] = architecture.reason or "unknown"
    readings = {
        name: attempt(lambda name=name, part=part: _component(name, part))  # type: ignore[misc]
        for name, part in parts.items()
    }
    unavailable |= {f"components.{name}": reason for name, reason in reasons(readings).items()}
    components = {name: reading.value for name, reading in readings.items() if reading.value is not None}
    return PipelineFacts(
        class_name=class_name,
        architecture=None if architecture.value is None else architecture.value.kind,
        architecture_evidence=None if architecture.value is None else architecture.value.evidence,
        components=components,
        attention=attention_facts(_denoisers(pipeline)),
        source=attempt(lambda: _source(pipeline)).value,
        unavailable=unavailable,
    )


def _parts(pipeline: object) -> dict[str, object]:
    parts = pipeline if isinstance(pipeline, Mapping) else components_of(pipeline)
    if parts:
        return {str(name): part for name, part in parts.items() if part is not None}
    return {"denoiser": pipeline}


def _component(name: str, part: object) -> ComponentFacts:
    module = part if isinstance(part, nn.Module) else unwrap(part)
    role = _role(name, part)
    if module is None:
        return ComponentFacts(role, type(part).__name__, config=_config(part))
    switches = {
        which: bool(value) if isinstance(value := getattr(module, f"use_{which}", None), bool) else None
        for which in ("tiling", "slicing")
    }
    return ComponentFacts(
        role,
        type(module).__name__,
        module=module_facts(module),
        config=_config(module),
        offload=offload_of(module),
        compiled=is_compiled(part) or is_compiled(module),
        layerwise_casting=layerwise_casting(module),
        channels_last=channels_last(module),
        tiling=switches["tiling"],
        slicing=switches["slicing"],
    )


def _role(name: str, part: object) -> Role:
    if name.endswith("_scheduler"):
        return "scheduler"
    for beginning, role in _ROLES:
        if name.removeprefix(_PRIOR_PREFIX).startswith(beginning):
            return role
    return "denoiser" if detect_architecture(part).value is not None else "other"


def _config(part: object) -> dict[str, JsonScalar]:
    config = getattr(part, "config", None)
    if not isinstance(config, Mapping):
        to_dict = getattr(config, "to_dict", None)
        config = to_dict() if callable(to_dict) else {}
    return dict(_scalars(config)) if isinstance(config, Mapping) else {}


def _scalars(config: Mapping[object, object]) -> Iterator[tuple[str, JsonScalar]]:
    kept = 0
    for name, value in config.items():
        if value is None or isinstance(value, bool | int | float | str):
            if isinstance(value, str):
                value = (short_path(value) if name == _SOURCE else value)[:_LONGEST_TEXT]
            yield str(name), value
            kept += 1
        if kept == _MOST_CONFIG:
            return


def _denoisers(pipeline: object) -> list[nn.Module]:
    found = attempt(
        lambda: [module for denoiser in denoisers_of(pipeline) if (module := unwrap(denoiser)) is not None]
    )
    return found.value or []


def _source(pipeline: object) -> str | None:
    """`_name_or_path`, which diffusers keeps in the configuration."""
    config = getattr(pipeline, "config", None)
    source = config.get(_SOURCE) if isinstance(config, Mapping) else None
    return short_path(source) if isinstance(source, str) and source else None


def attention_facts(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    """Processors of the attention modules that have one, as diffusers' do. Never raises."""
    return attempt(lambda: _count_processors(denoisers)).value or AttentionFacts()


def _count_processors(denoisers: Iterable[nn.Module]) -> AttentionFacts:
    plain, joint, backends = Counter[str](), Counter[str](), Counter[str]()
    for denoiser in denoisers:
        tree = tree_of(denoiser)
        for place, processor in tree.having("processor"):
            module = tree.modules[place]
            name = type(processor).__name__
            plain[name] += 1
            joint[name] += isinstance(getattr(module, "add_q_proj", None), nn.Module)
            chosen = getattr(processor, "_attention_backend", None)
            backends[DEFAULT_BACKEND if chosen is None else str(getattr(chosen, "value", chosen))] += 1
    return AttentionFacts(
        dict(plain), {name: count for name, count in joint.items() if count}, dict(backends)
    )


def offload_of(module: nn.Module) -> Offload | None:
    """Which offloading moves a model's weights, by the hooks of accelerate and diffusers on it.

    Returns:
        "model": the whole model moves when it is called; "sequential": each leaf does; "group": groups of
        layers do; None: nothing moves.
    """
    if _has_hook(module, GROUP_OFFLOADING):
        return "group"
    if type(getattr(module, "_hf_hook", None)).__name__ == _MODEL_OFFLOAD_HOOK:
        return "model"
    if any(getattr(hook, "offload", False) is True for _, hook in tree_of(module).having("_hf_hook")):
        return "sequential"
    return None


def _has_hook(module: nn.Module, name: str) -> bool:
    registries = tree_of(module).having("_diffusers_hook")
    return any(name in key for _, registry in registries for key in (getattr(registry, "hooks", None) or ()))


def layerwise_casting(module: nn.Module) -> bool:
    """Whether diffusers stores the weights in a narrower type than it computes in."""
    return _has_hook(module, _CASTING)


def is_compiled(module: object) -> bool:
    """Whether torch.compile has been applied to a module, or to a part of it."""
    if not isinstance(module, nn.Module):
        return False
    tree = tree_of(module)
    return (
        bool(tree.of_class(lambda kind: kind.__name__ == "OptimizedModule"))
        or any(own.get("_compiled_call_impl") is not None for own in tree.own)
        or any(_is_compiled_function(own["forward"]) for own in tree.own if "forward" in own)
        or any(_is_compiled_function(vars(module).get(way)) for way in ("encode", "decode"))
    )


def _is_compiled_function(held: object) -> bool:
    """Whether it is what torch.compile made of a method, as in `vae.decode = torch.compile(vae.decode)`."""
    while isinstance(held, FunctionType):
        if "_torchdynamo_orig_callable" in vars(held):
            return True
        held = vars(held).get("__wrapped__")
    return False


def channels_last(module: nn.Module) -> bool | None:
    """Whether most of its convolution weights are in channels-last format.

    1×1 kernels have both formats at once and do not count; None if there are no others.
    """
    kernels = [p for p in _parameters(module) if p.dim() == 4 and p.shape[1] > 1 and max(p.shape[2:]) > 1]
    last = sum(kernel.is_contiguous(memory_format=torch.channels_last) for kernel in kernels)
    return None if not kernels else 2 * last > len(kernels)


def _parameters(module: nn.Module) -> list[Tensor]:
    tree = tree_of(module)
    holders = (place for place, own in enumerate(tree.own) if own.get("_parameters"))
    places = {*attention_layers(tree), *holders}
    return [parameter for place in sorted(places) for _, parameter in own_parameters(tree.modules[place])]


def _buffers(module: nn.Module) -> list[Tensor]:
    tree = tree_of(module)
    holders = (part for part, own in zip(tree.modules, tree.own, strict=True) if own.get("_buffers"))
    return [buffer for part in holders for _, buffer in own_buffers(part)]


@dataclass(frozen=True, slots=True)
class Architecture:
    """What a denoiser is, and by which modules.

    Attributes:
        kind: MMDiT: blocks in which text and image each have projections of their own and attend jointly (SD3,
            FLUX, Qwen-Image). DiT: a transformer that attends to the text across, or has all in one stream (WAN,
            PixArt). UNet: convolutions down and up again.
        evidence: The modules that decided, in words.
    """

    kind: ArchitectureKind
    evidence: str


def detect_architecture(model: object) -> Reading[Architecture]:
    """Which kind of denoiser a model is. Never raises.

    Args:
        model: A module, what wraps one (ComfyUI's ModelPatcher, a compiled or replicated module), or a pipeline,
            whose denoiser is looked at.

    Returns:
        The architecture, or None and why it is not known: a VAE or a text encoder is not a denoiser.
    """
    return attempt(lambda: _architecture_of(model))


def _architecture_of(model: object) -> Architecture:
    for candidate in denoisers_of(model):
        module = unwrap(candidate)
        architecture = None if module is None else _classify(module)
        if architecture is not None:
            return architecture
    raise LookupError(f"{type(model).__name__} has no denoiser of a known kind")


def _classify(module: nn.Module) -> Architecture | None:
    tree = tree_of(module)
    return tree.derive("architecture", lambda: _of_names(tree.names))


def _of_names(own_names: Iterable[str]) -> Architecture | None:
    names = [name.replace("_orig_mod.", "") for name in own_names]
    joint = _joint_blocks(names)
    blocks = {found[1] for name in names if (found := _BLOCK.fullmatch(name))}
    is_levelled = any(_IN_LEVEL.search(name) for name in blocks)
    levels = {name for name in names if _DOWN.match(name) or _UP.match(name)}
    has_time = any(_TIME.search(name) for name in names)
    if joint:
        evidence = f"{counted(len(joint), 'block')} with separate projections for text and image, such as {min(joint)}"
        return Architecture("MMDiT", evidence)
    if any(_DOWN.match(name) for name in levels) and any(_UP.match(name) for name in levels):
        return Architecture("UNet", f"{counted(len(levels), 'block')} down and up again")
    if blocks and has_time and not is_levelled:
        evidence = (
            f"{len(blocks)} attention blocks without joint projections, and an embedding of the timestep"
        )
        return Architecture("DiT", evidence)
    return None


def _joint_blocks(names: Iterable[str]) -> set[str]:
    """Paths of the modules in which two streams are projected apart and attend together."""
    children: dict[str, set[str]] = {}
    for name in names:
        parent, _, last = name.rpartition(".")
        children.setdefault(parent, set()).add(last)
    return {
        parent
        for parent, held in children.items()
        if _JOINT_PROJECTION in held or any(held.issuperset(pair) for pair in _JOINT_PAIRS)
    }


def denoisers_of(model: object) -> list[object]:
    """The components of a pipeline that may denoise, the usual ones first; a model that is not a pipeline itself."""
    parts = model if isinstance(model, Mapping) else components_of(model)
    if not parts:
        return [model]
    return [parts[name] for name in _DENOISERS if parts.get(name) is not None]


def components_of(thing: object) -> Mapping[str, object]:
    """The components of a pipeline; empty for anything else."""
    if isinstance(thing, nn.Module):
        return {}
    components = once_a_look("components", thing, lambda: getattr(thing, "components", None))
    return components if isinstance(components, Mapping) else {}


def loadable_parts(pipeline: object) -> dict[str, nn.Module]:
    """The components that a pipeline's own LoRA loader loads into, by name, as it says itself."""
    names = getattr(pipeline, "_lora_loadable_modules", ())
    components = components_of(pipeline)
    return {name: part for name in names if isinstance(part := components.get(name), nn.Module)}


def unwrap(thing: object, depth: int = 0) -> nn.Module | None:
    """Follow wrappers to the module that holds the weights."""
    if isinstance(thing, nn.Module):
        inner = _module_in_module(thing)
        return thing if inner is None else unwrap(inner, depth)
    if depth == _MOST_WRAPPERS:
        return None
    for name in _INNER_NAMES:
        held = getattr(thing, name, None)
        module = None if held is None or _is_method(held) else unwrap(held, depth + 1)
        if module is not None:
            return module
    return None


def _module_in_module(module: nn.Module) -> nn.Module | None:
    """What torch.compile or data parallelism put a wrapper around."""
    inner = getattr(module, _COMPILED, None)
    if inner is None and type(module).__name__ in _REPLICATING:
        inner = getattr(module, _REPLICATED, None)
    return inner if isinstance(inner, nn.Module) else None


def _is_method(thing: object) -> bool:
    return callable(thing) and not isinstance(thing, nn.Module)


def named_modules_in(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each module with its dotted name, the model itself first under ""; one that occurs twice is given once."""
    tree = tree_of(module)
    return zip(tree.names, tree.modules, strict=True)


def modules_in(module: nn.Module) -> Iterator[nn.Module]:
    """Each module of a model, itself first, as `named_modules_in`."""
    return iter(tree_of(module).modules)


ATTENTION_LAYERS: Final = (nn.MultiheadAttention, nn.modules.linear.NonDynamicallyQuantizableLinear)
"""Layers whose parameters PEFT takes out of the register while it merges."""


def attention_layers(tree: ModuleTree) -> list[int]:
    """Where those are."""
    return tree.derive(
        "attention layers", lambda: tree.of_class(lambda kind: issubclass(kind, ATTENTION_LAYERS))
    )


def tensors_at(tree: ModuleTree, places: Sequence[int]) -> Iterator[tuple[int, str, Tensor]]:
    """What modules have themselves of a state dict: where in `places` the module is, the tensor's own name, and the tensor."""
    taken_out = {*attention_layers(tree)}
    having = tree.with_tensors(places)
    if taken_out:
        having = sorted({*having, *(at for at, place in enumerate(places) if place in taken_out)})
    for at in having:
        place = places[at]
        own = tree.own[place]
        if place in taken_out:
            for name, tensor in own_parameters(tree.modules[place]):
                yield at, name, tensor
        else:
            for name, tensor in own["_parameters"].items():
                if isinstance(tensor, Tensor):
                    yield at, name, tensor
        if own.get("_buffers"):
            for name, tensor in own_buffers(tree.modules[place], transient=False):
                yield at, name, tensor


def own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a module itself, by name, and those of attention that PEFT has taken out of the register."""
    parameters = registered(module, "_parameters")
    for name, parameter in parameters.items():
        if isinstance(parameter, Tensor):
            yield name, parameter
    if isinstance(module, ATTENTION_LAYERS):
        for name in _PLAIN_WHILE_MERGED:
            plain = vars(module).get(name)
            if name not in parameters and isinstance(plain, Tensor):
                yield name, plain


def own_buffers(module: nn.Module, *, transient: bool = True) -> Iterator[tuple[str, Tensor]]:
    """The buffers of a module itself, by name; without `transient` only those that a state dict has."""
    left_out = () if transient else vars(module).get("_non_persistent_buffers_set") or ()
    for name, buffer in registered(module, "_buffers").items():
        if isinstance(buffer, Tensor) and name not in left_out:
            yield name, buffer


def children_of(module: nn.Module) -> dict[str, nn.Module]:
    """The modules right inside a module, by name."""
    held = registered(module, "_modules")
    return {name: child for name, child in held.items() if isinstance(child, nn.Module)} if held else {}


def file_facts(files: object) -> dict[str, Any]:
    """Names, format and size of the files of a model's weights; nothing where there are none."""
    paths = [Path(file) for file in _several(files) if isinstance(file, str | os.PathLike)]
    sizes = [path.stat().st_size for path in paths if path.is_file()]
    if not sizes:
        return {}
    formats = sorted({path.suffix.removeprefix(".") for path in paths})
    return {
        "files": [path.name for path in paths],
        "folder": short_path(paths[0].parent),
        "format": "+".join(formats),
        "size_mb": sum(sizes) / 2**20,
    }


def _several(files: object) -> list[object]:
    if isinstance(files, str | os.PathLike):
        return [files]
    return list(files) if isinstance(files, list | tuple) else []


def key_facts(result: object) -> dict[str, Any]:
    """The keys that were missing from the file, that the model does not have, or that have another shape.

    Args:
        result: What the library's loader gives: an object or a tuple (model, missing, unexpected, mismatched, …).
    """
    keys_by_group = (
        result[0] if isinstance(result, tuple) and result and hasattr(result[0], _KEY_GROUPS[0]) else result
    )
    if isinstance(keys_by_group, tuple) and len(keys_by_group) >= 4:
        groups: dict[str, Any] = dict(zip(_KEY_GROUPS, keys_by_group[1:4], strict=True))
    else:
        groups = {name: getattr(keys_by_group, name, None) for name in _KEY_GROUPS}
    facts: dict[str, Any] = {}
    for name, keys in groups.items():
        if isinstance(keys, Iterable):
            named = sorted(str(key[0]) if isinstance(key, tuple) else str(key) for key in keys)
            facts |= {name: named[:_MOST_KEYS], f"num_{name}": len(named)}
    return facts
