"""A pipeline with the LoRA that is made for it, loaded under the eyes of a monitor."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.families.family import FAMILIES
from tests.families.loras import State, lora_state, parts_of, write
from tests.families.pipelines import generate, make_pipeline
from torch import Tensor

from sigmascope import ModelLoadingMonitor


@dataclass(frozen=True)
class Styled:
    """A pipeline, the LoRA for it, and what was seen while it was loaded."""

    family: str
    pipeline: Any
    state: State
    path: Path
    monitor: ModelLoadingMonitor
    baseline: dict[str, Any]
    bare_image: Tensor

    @property
    def denoiser(self) -> Any:
        return getattr(self.pipeline, FAMILIES[self.family].denoiser)

    @property
    def encoders(self) -> dict[str, Any]:
        return {name: getattr(self.pipeline, name) for name in FAMILIES[self.family].lora_encoders}

    def analysis(self) -> dict[str, Any]:
        """What became of the models since before the LoRA."""
        return self.monitor.analyze_lora_application_results(
            self.baseline, self.denoiser, self.encoders, self.pipeline
        )

    def weight(self, module: str) -> Tensor:
        """The weight now, by itself: of a layer of PEFT that of the layer inside."""
        part, _, name = module.partition(".")
        found: Tensor = getattr(self.pipeline, part).get_submodule(name).weight
        return found.detach()

    def delta(self, module: str) -> Tensor:
        """ΔW by hand, up · down."""
        down, up = (self.state[f"{module}.lora_{end}.weight"].double() for end in "AB")
        return (up.flatten(1) @ down.flatten(1)).reshape(up.shape[0], *down.shape[1:])


_BARE_IMAGES: dict[str, Tensor] = {}
"""What each family's pipeline makes without any LoRA; every one of them makes the same."""


def styled(family: str, folder: Path, *, leave_out: tuple[str, ...] = ()) -> Styled:
    """Load a LoRA under the eyes of a monitor; `leave_out` says of which modules it has no factors."""
    pipeline = make_pipeline(family)
    state = lora_state(pipeline, parts_of(family))
    state = {key: value for key, value in state.items() if not any(mark in key for mark in leave_out)}
    path = write(state, folder / f"{family}.safetensors")
    monitor = ModelLoadingMonitor()
    if family not in _BARE_IMAGES:
        _BARE_IMAGES[family] = generate(pipeline, family)
    found = Styled(family, pipeline, state, path, monitor, {}, _BARE_IMAGES[family])
    found.baseline.update(monitor.capture_lora_baseline(found.denoiser, found.encoders, path))
    monitor.start_monitoring("lora_application")
    pipeline.load_lora_weights(str(path), adapter_name="style")
    monitor.end_monitoring("lora_application", found.denoiser, "UNet")
    return found
