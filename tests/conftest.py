"""Fixtures that several rooms use."""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import gettempdir
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import save_file
from tests.comfy_shapes.checkout import VARIABLE, Checkout, why_not
from tests.order import pytest_collection_modifyitems
from tests.pretend_device import Kind, PretendedDevice, build_guard, pretend_device, why_none
from tests.require_gpu import pytest_make_collect_report, pytest_runtest_makereport, pytest_sessionstart
from tests.runtime_types import check_annotations
from tests.slow_files import pytest_ignore_collect, pytest_itemcollected
from tests.workers import pytest_xdist_auto_num_workers
from torch import Tensor

__all__ = [  # hooks
    "pytest_collection_modifyitems",
    "pytest_ignore_collect",
    "pytest_itemcollected",
    "pytest_make_collect_report",
    "pytest_runtest_makereport",
    "pytest_sessionstart",
    "pytest_xdist_auto_num_workers",
]

check_annotations()

# No test writes to the user's store: those that keep runs name a place of their own.
os.environ["SIGMASCOPE_KEEP"] = "0"
os.environ["SIGMASCOPE_STORE"] = str(Path(gettempdir(), f"sigmascope-tests-{os.getpid()}", "runs.db"))

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell's way with what it runs in the background
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # the programs that tests interrupt would inherit it

State = dict[str, Tensor]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while modules are imported: millions of objects are made, and nearly all stay."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _little_garbage() -> None:
    """Leave what is imported out of the collections that the module's tests, and failures of memory, ask for."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _no_watch_goes_on() -> Generator[None, None, None]:
    """No thread that looks at a host's work outlasts the test that began it: the tests that come later share the process."""
    yield
    deadline = time.monotonic() + 5
    while (left := _looking()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert left == []


def _looking() -> list[str]:
    names = {f"sigmascope-{name}" for name in ("sampler", "stacks", "live", "keeper", "look-out")}
    return [thread.name for thread in threading.enumerate() if thread.name in names]


LAYER_SHAPES = {
    "denoiser.conv_in": (8, 4, 3, 3),
    "denoiser.time_embedding.linear_1": (16, 8),
    "denoiser.down_blocks.0.resnets.0.conv1": (8, 8, 3, 3),
    "denoiser.down_blocks.1.attentions.0.proj_in": (16, 16),
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q": (16, 16),
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.attn2.to_out.0": (16, 16),
    "denoiser.down_blocks.1.attentions.0.transformer_blocks.0.ff.net.2": (16, 40),
    "denoiser.mid_block.resnets.0.conv_shortcut": (16, 8, 1, 1),
    "denoiser.up_blocks.0.resnets.0.conv2": (16, 16, 3, 3),
    "denoiser.conv_out": (4, 8, 3, 3),
}
OTHER_SHAPES = {
    "denoiser.conv_in.bias": (8,),
    "denoiser.conv_norm_out.weight": (8,),
    "vae.vae_model.encoder.conv_in.weight": (8, 3, 3, 3),
}


@dataclass(frozen=True)
class ModelPair:
    """Two small checkpoints with an LBM model's names, on disk and in memory."""

    base: Path
    tuned: Path
    base_state: State
    tuned_state: State
    layers: tuple[str, ...] = tuple(LAYER_SHAPES)

    def delta(self, layer: str) -> Tensor:
        """The true change of a layer as a matrix, in float64."""
        key = f"{layer}.weight"
        return (self.tuned_state[key].double() - self.base_state[key].double()).flatten(1)


class MakePair(Protocol):
    def __call__(
        self,
        *,
        delta_rank: int | None = None,
        size: float = 0.05,
        dtype: torch.dtype = torch.float32,
        edit: Callable[[State, State], None] | None = None,
    ) -> ModelPair: ...


@pytest.fixture
def make_model_pair(tmp_path: Path) -> MakePair:
    """Write a base and a tuned checkpoint; every layer changes, by a matrix of `delta_rank` if given."""

    def make(
        *,
        delta_rank: int | None = None,
        size: float = 0.05,
        dtype: torch.dtype = torch.float32,
        edit: Callable[[State, State], None] | None = None,
    ) -> ModelPair:
        generator = torch.Generator().manual_seed(7)
        base = {
            name: torch.randn(shape, generator=generator, dtype=torch.float64)
            for name, shape in OTHER_SHAPES.items()
        }
        tuned = dict(base)
        for layer, shape in LAYER_SHAPES.items():
            weight = torch.randn(shape, generator=generator, dtype=torch.float64)
            change = torch.randn(weight.flatten(1).shape, generator=generator, dtype=torch.float64)
            if delta_rank is not None:
                left = torch.randn(shape[0], delta_rank, generator=generator, dtype=torch.float64)
                change = left @ torch.randn(
                    delta_rank, change.shape[1], generator=generator, dtype=torch.float64
                )
            base[f"{layer}.weight"] = weight
            tuned[f"{layer}.weight"] = weight + size * change.reshape(shape)
        base = {key: value.to(dtype).contiguous() for key, value in base.items()}
        tuned = {key: value.to(dtype).contiguous() for key, value in tuned.items()}
        base["num_iterations"], tuned["num_iterations"] = torch.tensor(0.0), torch.tensor(20_000.0)
        if edit is not None:
            edit(base, tuned)
        pair = ModelPair(tmp_path / "base.safetensors", tmp_path / "tuned.safetensors", base, tuned)
        save_file(base, pair.base)
        save_file(tuned, pair.tuned)
        return pair

    return make


BACKBONE_DENOISER = {
    "block_out_channels": [16, 32],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "layers_per_block": 1,
    "transformer_layers_per_block": 1,
    "attention_head_dim": 4,
    "norm_num_groups": 8,
}
BACKBONE_VAE = {"block_out_channels": [16, 16], "layers_per_block": 1, "norm_num_groups": 8}


@pytest.fixture
def backbone_config() -> dict[str, Any]:
    """An LBM on `backbone`, with a mask beside the latent: its first convolution is wider than the backbone's."""
    return {
        "vae_num_channels": 4,
        "unet_input_channels": 5,
        "conditioning_masks_keys": ["mask"],
        "denoiser": BACKBONE_DENOISER,
        "vae": BACKBONE_VAE,
    }


@pytest.fixture
def backbone(tmp_path: Path) -> Path:
    """A text-to-image model as diffusers saves it: text of width 24, and SDXL's added embedding."""
    from tests.sdxl_in_small import sdxl_models  # here, since diffusers takes seconds to import

    unet, vae = sdxl_models(BACKBONE_DENOISER, BACKBONE_VAE, text_width=24)
    unet.save_pretrained(tmp_path / "backbone" / "unet")
    vae.save_pretrained(tmp_path / "backbone" / "vae")
    return tmp_path / "backbone"


class Pretend(Protocol):
    def __call__(self, kind: Kind, *, backward: bool = False) -> AbstractContextManager[PretendedDevice]: ...


@pytest.fixture(scope="session")
def pretend(request: pytest.FixtureRequest) -> Pretend:
    """`with pretend("cuda") as device:` runs what is in it on an accelerator that is not there.

    `backward=True` carries gradients too.
    """
    reason = why_none()
    if reason is not None:
        pytest.skip(reason)
    cache = request.config.cache
    assert cache is not None
    return partial(pretend_device, guard=build_guard(cache.mkdir("pretended_device")))


@pytest.fixture
def pretended_cuda(pretend: Pretend) -> Generator[PretendedDevice, None, None]:
    """A test that runs on a pretended cuda:0."""
    with pretend("cuda") as device:
        yield device


@pytest.fixture
def pretended_mps(pretend: Pretend) -> Generator[PretendedDevice, None, None]:
    """A test that runs on a pretended mps:0, which has no float64."""
    with pretend("mps") as device:
        yield device


@pytest.fixture(scope="session")
def comfy() -> Checkout:
    """The real ComfyUI that `SIGMASCOPE_COMFYUI` names; where it names none, the test is skipped and says so."""
    reason = why_not()
    if reason is not None:
        pytest.skip(reason)
    return Checkout(Path(os.environ[VARIABLE]))


@pytest.fixture
def store_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the store of runs is to be; runs are kept there while the test lasts."""
    path = tmp_path / "data" / "runs.db"
    monkeypatch.setenv("SIGMASCOPE_STORE", str(path))
    monkeypatch.delenv("SIGMASCOPE_KEEP")
    monkeypatch.setattr("sigmascope.history.keeper.gettempdir", lambda: str(tmp_path / "tmp"))
    return path
