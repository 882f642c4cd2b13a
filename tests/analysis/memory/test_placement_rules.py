from collections.abc import Callable

import pytest
from tests.analysis.faulty_runs import component, pipeline, stage, steps, weights

from sigmascope.records.run import Finding

Found = Callable[..., dict[str, Finding]]
TEN_STEPS = stage("denoising", 10.0, steps=steps([1.0] * 10))


def test_a_model_on_the_cpu_beside_a_free_gpu_is_told(found: Found) -> None:
    pipe = pipeline(transformer=component("denoiser", module=weights(device="cpu")))
    finding = found(pipe=pipe)["placement.cpu_while_accelerator_free"]
    assert 'pipe.to("cuda")' in (finding.advice or "")
    assert "placement.cpu_while_accelerator_free" not in found(pipe=pipe, accelerators=())
    assert "placement.cpu_while_accelerator_free" not in found(pipe=pipeline())


def test_an_offloaded_model_is_on_the_cpu_rightly(found: Found) -> None:
    part = component("denoiser", module=weights(device="cpu", gib=60), offload="model")
    assert not found(pipe=pipeline(transformer=part))


@pytest.mark.parametrize(("kind", "gib", "severity"), [
    ("sequential", 60, "warning"), ("group", 60, "info"), ("group", 8, "warning"),
])  # fmt: skip
def test_weights_that_move_each_step_are_reckoned(found: Found, kind: str, gib: int, severity: str) -> None:
    part = component("denoiser", module=weights(device="cpu", gib=gib), offload=kind)
    finding = found(TEN_STEPS, pipe=pipeline(transformer=part))["placement.weights_moved_every_step"]
    assert finding.severity == severity
    assert finding.evidence["moved_mb"] == pytest.approx(10 * gib * 1024)


def test_offloading_what_fits_is_told(found: Found) -> None:
    small = component("denoiser", module=weights(gib=10), offload="model")
    large = component("denoiser", module=weights(gib=39), offload="model")
    assert "placement.offloaded_though_it_fits" in found(pipe=pipeline(transformer=small))
    assert "placement.offloaded_though_it_fits" not in found(pipe=pipeline(transformer=large))


def test_a_model_that_is_loaded_for_each_image_is_told_with_the_time_it_costs(found: Found) -> None:
    loads = [
        stage("model_loading", 3.0, at=10.0 * index, modules={"text_encoder": weights("T5EncoderModel")})
        for index in range(4)
    ]
    finding = found(*loads)["placement.loaded_again"]
    assert finding.evidence == {"class": "T5EncoderModel", "times": 4, "gain_seconds": 9.0}
    assert "placement.loaded_again" not in found(loads[0])
