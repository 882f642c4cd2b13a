import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.lbm.devices import resolve_device, resolve_dtype


class FakeAccelerators:
    """Two devices of a kind, as `torch.accelerator` shows them."""

    def __init__(self, kind: str | None) -> None:
        self.kind = kind

    def is_available(self) -> bool:
        return self.kind is not None

    def current_accelerator(self) -> torch.device | None:
        return None if self.kind is None else torch.device(self.kind)

    def device_count(self) -> int:
        return 0 if self.kind is None else 2


@pytest.fixture(params=[None, "cuda", "mps"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str | None:
    found: str | None = request.param
    monkeypatch.setattr(torch, "accelerator", FakeAccelerators(found))
    return found


def test_auto_takes_the_accelerator_else_the_cpu(kind: str | None) -> None:
    assert resolve_device("auto") == torch.device(kind or "cpu")


def test_cpu_is_always_there(kind: str | None) -> None:
    assert resolve_device("cpu") == torch.device("cpu")


@pytest.mark.parametrize("name", ["cuda", "cuda:1"])
def test_named_accelerator_must_be_there(name: str, kind: str | None) -> None:
    if kind == "cuda":
        assert resolve_device(name) == torch.device(name)
    else:
        with pytest.raises(ConfigError, match=f"there is no {name} on this machine"):
            resolve_device(name)


def test_index_beyond_the_last_device_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", FakeAccelerators("cuda"))
    with pytest.raises(ConfigError, match="there is no cuda:2"):
        resolve_device("cuda:2")


def test_unknown_device_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"^--device: 'toaster' is not a device"):
        resolve_device("toaster")


def test_the_key_of_a_file_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "accelerator", FakeAccelerators(None))
    with pytest.raises(ConfigError, match=r"^device: there is no cuda on this machine") as caught:
        resolve_device("cuda", "device")
    assert caught.value.hint == "Use device: auto."


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("float32", torch.float32),
        ("fp32", torch.float32),
        ("bf16", torch.bfloat16),
        ("torch.bfloat16", torch.bfloat16),
        ("FP16", torch.float16),
    ],
)
def test_dtype_has_its_usual_names(name: str, dtype: torch.dtype) -> None:
    assert resolve_dtype(name) == dtype


def test_other_dtypes_are_an_error() -> None:
    with pytest.raises(ConfigError, match="--torch_dtype: expected one of float32"):
        resolve_dtype("int8")
