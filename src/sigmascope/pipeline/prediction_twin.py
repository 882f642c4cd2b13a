"""A VAE's twin: the same layers without weights, on the meta device, to be run in its stead.

The VAE itself is never called, and nothing about it changes.
"""

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from sigmascope.pipeline.prediction_live import counted
from sigmascope.pipeline.vaes.outputs import decoded, encoded
from sigmascope.pipeline.weights_in_ram import tensors_on
from sigmascope.records.strategies import Direction
from sigmascope.stages.latents.vae_facts import inner_vae

_META = torch.device("meta")
Switch = tuple[str, bool | int | float]


class NoTwinError(Exception):
    """Why a VAE cannot be run without its weights."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What a twin held at its highest, what went in apart, and what came out.

    Attributes:
        tensor_bytes: All tensors.
        peak_bytes: With the workspace of convolutions.
        output_shape: Of the latent, of the parameters of its distribution, or of the pictures.
        output_itemsize: Bytes of one of its elements.
        result_shape: Of the latent or the pictures, once the distribution's mode is taken.
    """

    tensor_bytes: int
    peak_bytes: int
    output_shape: tuple[int, ...]
    output_itemsize: int
    result_shape: tuple[int, ...]


def dry_run(
    vae: object, shape: tuple[int, ...], direction: Direction, dtype: torch.dtype | None = None
) -> DryRun:
    """Encode or decode with a twin of the VAE, and count the bytes.

    Args:
        vae: A module, or what holds one: ComfyUI's VAE, a pipeline.
        shape: Of what goes in.
        direction: Whether to encode or to decode.
        dtype: Of the weights and of what goes in; None: the VAE's own.

    Raises:
        NoTwinError: It cannot be rebuilt, or its twin cannot be run.
    """
    module = _module_of(vae)
    wanted = dtype or _dtype_of(module)
    try:
        if hasattr(type(module), "from_config"):
            return _of_recipe(_recipe(module), shape, direction, wanted)
        return _run(_cast(_copied(module), wanted), shape, direction, wanted)
    except Exception as error:  # a stranger's model may raise anything
        raise NoTwinError(
            f"its layers could not be run without weights: {type(error).__name__}: {error}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Recipe:
    kind: type
    described: str
    switches: tuple[Switch, ...]
    config: Mapping[str, Any] = field(compare=False)


def _recipe(module: Any) -> _Recipe:
    config: dict[str, Any] = dict(module.config)
    return _Recipe(type(module), repr(config), _switches(module), config)


@lru_cache(maxsize=256)
def _of_recipe(recipe: _Recipe, shape: tuple[int, ...], direction: Direction, dtype: torch.dtype) -> DryRun:
    kind: Any = recipe.kind
    with _META:
        twin: nn.Module = kind.from_config(dict(recipe.config))
    own = vars(twin)
    own.update((name, value) for name, value in recipe.switches if name in own)
    return _run(_cast(twin, dtype), shape, direction, dtype)


def _run(twin: Any, shape: tuple[int, ...], direction: Direction, dtype: torch.dtype) -> DryRun:
    frames = _streamed_frames(twin, shape, direction)
    if frames is not None:
        few, more = (_run(twin, (*shape[:2], count, *shape[3:]), direction, dtype) for count in frames)
        return _continued(few, more, (shape[2] - frames[0]) // (frames[1] - frames[0]))
    twin.eval()
    if getattr(twin, "use_tiling", False):
        twin.use_tiling = False  # tiles are cut by `pipeline.tiling`
    source = torch.empty(shape, dtype=dtype, device=_META)
    if direction == "encoding":
        found = counted(lambda: twin.encode(source))
        output = encoded(found.result)
        made, result = output.tensor, output.latent(sample=False, generator=None)
    else:
        found = counted(lambda: twin.decode(source, **_frame_count(twin, shape)))
        made = result = decoded(found.result)
    sizes = tuple(made.shape), made.element_size(), tuple(result.shape)
    return DryRun(found.tensor_bytes, found.peak_bytes, *sizes)


def _streamed_frames(twin: Any, shape: tuple[int, ...], direction: Direction) -> tuple[int, int] | None:
    """Two numbers of frames from which any higher one follows, of causal VAEs that work chunk by chunk.

    Each further chunk of theirs (WAN's are 4 frames, 1 of the latent) adds its input and output to the peak and
    nothing else, as the caches of features are full after three.
    """
    if len(shape) != 5 or not hasattr(twin, "clear_cache"):
        return None
    few, step = (9, 4) if direction == "encoding" else (4, 1)
    whole_chunks = (shape[2] - few) % step == 0
    return (few, few + step) if shape[2] > few + step and whole_chunks else None


def _continued(few: DryRun, more: DryRun, steps: int) -> DryRun:
    """The straight line through two dry runs, at `steps` times their distance."""

    def shape(first: tuple[int, ...], second: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(a + steps * (b - a) for a, b in zip(first, second, strict=True))

    return DryRun(
        few.tensor_bytes + steps * (more.tensor_bytes - few.tensor_bytes),
        few.peak_bytes + steps * (more.peak_bytes - few.peak_bytes),
        shape(few.output_shape, more.output_shape),
        few.output_itemsize,
        shape(few.result_shape, more.result_shape),
    )


def _module_of(vae: object) -> nn.Module:
    inner = inner_vae(vae)
    module = inner if isinstance(inner, nn.Module) else getattr(inner, "first_stage_model", None)
    if not isinstance(module, nn.Module):
        raise NoTwinError(f"{type(vae).__name__} is no module whose layers could be counted")
    return module


def _dtype_of(module: nn.Module) -> torch.dtype:
    return next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)


def _switches(module: nn.Module) -> tuple[Switch, ...]:
    """Slicing and the like, which are attributes and not in the config."""
    own = ((name, value) for name, value in vars(module).items() if name != "training")
    return tuple((name, value) for name, value in own if isinstance(value, bool | int | float))


def _copied(module: nn.Module) -> nn.Module:
    """Its layers, without its weights and without what anybody has put on them, who is not to be told of this run."""
    tensors = (one for part in module.modules() for one in tensors_on(part))
    memo: dict[int, Any] = {id(one): _without_content(one) for one in tensors}
    twin = copy.deepcopy(module, memo)
    for part in twin.modules():
        part._forward_hooks.clear()
        part._forward_pre_hooks.clear()
        _as_its_class_has_it(part)
    return twin


def _as_its_class_has_it(part: nn.Module) -> None:
    """Without functions in the places of its methods: they may belong to the VAE itself."""
    own = vars(part)
    for name in [name for name, value in own.items() if callable(value) and hasattr(type(part), name)]:
        del own[name]


def _without_content(weight: Tensor) -> Tensor:
    empty = torch.empty_like(weight, device=_META, requires_grad=False)
    return nn.Parameter(empty, requires_grad=False) if isinstance(weight, nn.Parameter) else empty


def _cast(twin: nn.Module, dtype: torch.dtype) -> nn.Module:
    """To a dtype throughout: a class's own `.to` may have ideas of what stays in float32."""
    apply: Callable[[Callable[[Tensor], Tensor]], nn.Module] = twin._apply
    return apply(lambda tensor: tensor.to(_META, dtype if tensor.is_floating_point() else tensor.dtype))


def _frame_count(twin: Any, shape: tuple[int, ...]) -> dict[str, int]:
    """Decoders that mix the pictures of a batch must be told how many belong together."""
    return {"num_frames": shape[0]} if "num_frames" in inspect.signature(twin.decode).parameters else {}
