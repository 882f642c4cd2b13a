"""Records built by hand, around the one fault that a test is about."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from tests.families import make_pipeline

from sigmascope.analysis.diagnostics import diagnose
from sigmascope.records.memory import (
    AcceleratorMemory,
    AcceleratorPeak,
    MemoryImpact,
    MemorySnapshot,
    PeakMemory,
)
from sigmascope.records.run import (
    AcceleratorFacts,
    AttentionFacts,
    CallFacts,
    ComponentFacts,
    Finding,
    HostFacts,
    ModuleFacts,
    PipelineFacts,
    Run,
    Stage,
    Steps,
)
from sigmascope.records.serialization import to_plain

GIB = 2**30
GPU = AcceleratorFacts("cuda:0", "NVIDIA A100", 40 * GIB, "550", "8.0")


def weights(
    class_name: str = "Model", *, gib: float = 4, dtype: str = "bfloat16", device: str = "cuda:0"
) -> ModuleFacts:
    size = 4 if dtype == "float32" else 2
    count = int(gib * GIB) // size
    return ModuleFacts(class_name, count, 0, int(gib * GIB), {dtype: count}, {device: count}, False)


def component(role: Any, class_name: str = "Model", **facts: Any) -> ComponentFacts:
    module = facts.pop("module", None) or weights(class_name)
    return ComponentFacts(role, class_name, module=module, **facts)


def pipeline(
    *, architecture: str = "MMDiT", attention: AttentionFacts | None = None, source: str | None = None,
    class_name: str = "FluxPipeline", **components: ComponentFacts,
) -> PipelineFacts:  # fmt: skip
    parts = components or {"transformer": component("denoiser"), "vae": component("vae")}
    return PipelineFacts(
        class_name, architecture, "", parts, attention or AttentionFacts({"FluxAttnProcessor": 57}), source
    )


def steps(seconds: list[float], gpu: Sequence[float | None] | None = None) -> Steps:
    started = [sum(seconds[:index], 0.0) for index in range(len(seconds))]
    return Steps(tuple(started), tuple(seconds), tuple(gpu or ()))


def stage(name: str, seconds: float = 1.0, *, at: float = 0.0, **rest: Any) -> Stage:
    return Stage(name, at, seconds, **rest)


def device_memory(
    baseline: int, current: int, peak: int | None = None, *, reserved: int | None = None
) -> dict[str, Any]:
    """`memory` and `peak` of a stage on one device, in bytes."""
    before = AcceleratorMemory("cuda:0", baseline, baseline, 40 * GIB)
    after = AcceleratorMemory("cuda:0", current, current if reserved is None else reserved, 40 * GIB)
    highest = max(baseline, current) if peak is None else peak
    return {
        "memory": MemoryImpact(
            MemorySnapshot(accelerators=(before,), current_device="cuda:0"),
            MemorySnapshot(accelerators=(after,), current_device="cuda:0"),
        ),
        "peak": PeakMemory(
            accelerators=(AcceleratorPeak("cuda:0", highest, 0.5, max(highest, reserved or 0), 0.5),)
        ),
    }


@pytest.fixture(scope="session")
def pipe() -> Any:
    """SD1.5, shared by all tests that leave it as it is."""
    return make_pipeline("sd15")


@pytest.fixture
def found() -> Callable[..., dict[str, Finding]]:
    """The findings of a run with these stages and facts, by their id."""

    def find(
        *stages: Stage, pipe: PipelineFacts | None = None, call: CallFacts | None = None,
        accelerators: tuple[AcceleratorFacts, ...] = (GPU,),
    ) -> dict[str, Finding]:  # fmt: skip
        facts = {
            name: to_plain(value) for name, value in (("pipeline", pipe), ("call", call)) if value is not None
        }
        run = Run(
            "id", "run", "2026-01-01T00:00:00+00:00", sum((one.seconds for one in stages), 0.0),
            host=HostFacts(accelerators=accelerators), stages=stages, facts=facts,
        )  # fmt: skip
        return {finding.id: finding for finding in diagnose(run)}

    return find
