"""Values of every kind, as packs of nodes hand them on: none of them takes an instrument off, or costs a record."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.integrations.comfyui.conftest import Watch
from tests.integrations.comfyui.host import Blocker, Host, Node

from sigmascope.records.serialization import load_run
from sigmascope.reports.html import to_html


class Refusing:
    """Has nothing, and says so to whoever asks."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(f"no {name}")

    def __bool__(self) -> bool:
        raise RuntimeError("no truth")

    def __len__(self) -> int:
        raise RuntimeError("no length")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("no equals")

    def __repr__(self) -> str:
        raise RuntimeError("no words")

    __hash__ = object.__hash__


class Foreign(torch.Tensor):
    """A tensor of a library that knows none of the functions that look at it."""

    @classmethod
    def __torch_function__(cls, function: Any, kinds: Any, given: Any = (), named: Any = None) -> Any:
        if function.__name__ in ("aminmax", "detach"):
            return NotImplemented
        return torch.Tensor.__torch_function__(function, kinds, given, named or {})  # type: ignore[no-untyped-call]


class NestedTensor:
    """Several tensors in one, as the latent of a video with its sound is."""

    is_nested = True

    def __init__(self) -> None:
        self.tensors = [torch.randn(1, 16, 2, 4, 4), torch.randn(1, 8, 16)]

    @property
    def shape(self) -> Any:
        return self.tensors[0].shape


class Slots:
    __slots__ = ()


def circle() -> Any:
    made: dict[str, Any] = {}
    made["itself"] = made
    return made


VALUES: dict[str, Any] = {
    "none": None,
    "text": "flux-dev",
    "number": 3,
    "truth": True,
    "big": 10**400,
    "nan": float("nan"),
    "list": [1, 2],
    "empty": [],
    "tuple": (),
    "dict": {"samples": "no tensor"},
    "circle": circle(),
    "slots": Slots(),
    "refusing": Refusing(),
    "blocker": Blocker(),
    "class": Slots,
    "scalar": torch.tensor(1.0),
    "no numbers": torch.zeros(1, 0, 4, 4),
    "sparse": {"samples": torch.eye(3).to_sparse()},
    "complex": torch.randn(2, dtype=torch.complex64),
    "meta": torch.zeros(2, device="meta"),
    "foreign": {"samples": torch.randn(1, 4, 8, 8).as_subclass(Foreign)},
    "pair": {"samples": NestedTensor()},
    "bytes": b"\x00",
    "half a model": SimpleNamespace(patches=None, model=None, patcher=None),
    "model of odd patches": SimpleNamespace(patches={"a": None}, model=3, clone=None),
}
INPUTS = (
    "model", "clip", "vae", "samples", "latent", "latent_image", "sigmas", "sampler", "guider", "noise", "sampler_name",
    "scheduler", "steps", "cfg", "seed", "denoise", "start_at_step", "text", "lora_name", "strength_model", "pixels",
)  # fmt: skip
KINDS = ("MODEL", "CLIP", "VAE", "LATENT", "IMAGE", "CONDITIONING", "HOOKS", "SIGMAS")


@pytest.mark.parametrize(
    "inputs",
    [INPUTS, ("model", "clip", "lora_name"), ("clip", "text"), ("samples", "vae"), ("lora_name",)],
    ids=lambda inputs: "+".join(inputs[:3]),
)
def test_no_value_of_a_node_takes_anything_off(
    watch: Watch, host: Host, tmp_path: Path, inputs: tuple[str, ...]
) -> None:
    def take(which: str, **given: Any) -> Any:
        host.module("comfy.model_management").load_models_gpu([VALUES[which]])
        return (VALUES[which],) * len(KINDS)

    host.nodes |= {
        "Give": Node(("*",), lambda which: (VALUES[which],)),
        "Take": Node(KINDS, take),
        "Hook": Node(("MODEL", "HOOKS"), lambda which, **given: (VALUES[which],) * 2),
        "End": Node((), lambda **given: ()),
    }
    graph: dict[str, Any] = {}
    for which in VALUES:
        links: dict[str, Any] = {name: [f"{which} 1", 0] for name in inputs}
        named = links | ({"lora_name": "x.safetensors"} if "lora_name" in inputs else {})
        ends = {kind: [f"{which} 3", at] for at, kind in enumerate(KINDS)}
        kinds = {"Give": {}, "Take": links, "Take too": named, "Hook": named, "End": ends}
        for number, (kind, given) in enumerate(kinds.items(), 1):
            more = {} if kind == "End" else {"which": which}
            graph[f"{which} {number}"] = {"class_type": kind.partition(" ")[0], "inputs": {**given, **more}}
    watched = watch()
    run = watched.run(graph)
    assert watched.off() == {}
    assert {node["id"] for node in run.facts["comfyui"]["nodes"]} == graph.keys()
    (file,) = tmp_path.glob("sigmascope-prompt-*.json")
    assert to_html(load_run(file))
