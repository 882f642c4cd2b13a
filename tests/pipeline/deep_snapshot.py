"""A pipeline's whole state as plain values, to be compared before and after: independent of the code under test."""

from typing import Any

import torch
from torch import Tensor, nn

_OWN = ("_parameters", "_buffers", "_modules")


def deep_snapshot(pipeline: Any) -> dict[str, Any]:
    """Weights bit for bit with dtype, device, strides and identity; attributes, processors, hooks; process flags."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    state: dict[str, Any] = {
        "matmul": torch.get_float32_matmul_precision(),
        "benchmark": torch.backends.cudnn.benchmark,
        "backend": str(_AttentionBackendRegistry._active_backend),
        "pipeline": _attributes(pipeline),
    }
    for component, model in pipeline.components.items():
        if isinstance(model, nn.Module):
            for path, part in model.named_modules(remove_duplicate=False):
                state[f"{component}.{path}"] = _part(part)
    return state


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same."""
    found = [
        f"{name}: {one.get(name)} != {other.get(name)}"
        for name in {**one, **other}
        if name not in one or name not in other
    ]
    for name in one.keys() & other.keys():
        if isinstance(one[name], dict):
            found += [f"{name}.{line}" for line in differences(one[name], other[name])]
        elif one[name] != other[name]:
            found.append(f"{name}: {one[name]!r} != {other[name]!r}")
    return sorted(found)


def _part(part: nn.Module) -> dict[str, Any]:
    tensors = {name: _tensor(held) for own in _OWN[:2] for name, held in vars(part)[own].items()}
    return {
        "class": type(part).__name__,
        "training": part.training,
        "children": str(list(part._modules)),
        "order": str(list(part._parameters) + list(part._buffers)),
        "attributes": _attributes(part),
        "tensors": tensors,
    }


def _tensor(held: Tensor | None) -> Any:
    if held is None:
        return None
    data = held.detach().contiguous().cpu()
    raw = data.reshape(-1).view(torch.uint8).numpy().tobytes()
    return (
        id(held),
        str(held.dtype),
        str(held.device),
        held.stride(),
        type(held).__name__,
        held.requires_grad,
        hash(raw),
    )


def _attributes(thing: object) -> dict[str, Any]:
    return {name: _value(held) for name, held in vars(thing).items() if name not in _OWN}


def _value(held: Any) -> Any:
    if type(held).__name__ == "HookRegistry":
        return str([(name, id(hook)) for name, hook in held.hooks.items()])
    if isinstance(held, dict | list | tuple | set):
        return f"{type(held).__name__} of {[_short(one) for one in held]}"
    return _short(held) if name_is_plain(held) else _with_state(held)


def _with_state(held: Any) -> Any:
    state = getattr(held, "__dict__", None)
    inner = {} if state is None or isinstance(held, nn.Module) else {n: _short(v) for n, v in state.items()}
    return (
        f"{type(held).__name__} {id(held)} {inner}"
        if type(held).__name__.endswith("Processor2_0") or "Processor" in type(held).__name__
        else f"{type(held).__name__} {id(held)}"
    )


def name_is_plain(held: Any) -> bool:
    return isinstance(held, str | int | float | bool | type(None) | torch.dtype | torch.device)


def _short(held: Any) -> str:
    return repr(held) if name_is_plain(held) else f"{type(held).__name__} {id(held)}"
