from collections.abc import Callable

import pytest
from tests.analysis.faulty_runs import GIB, component, pipeline, weights

from sigmascope.records.run import AcceleratorFacts, Finding

Found = Callable[..., dict[str, Finding]]


@pytest.mark.parametrize(
    ("capability", "dtype"), [("8.0", "bfloat16"), ("7.5", "float16"), (None, "bfloat16")]
)
def test_float32_weights_on_a_gpu_say_what_half_would_save(
    found: Found, capability: str | None, dtype: str
) -> None:
    gpu = AcceleratorFacts("cuda:0", "a GPU", 40 * GIB, None, capability)
    module = weights(gib=4, dtype="float32")
    pipe = pipeline(transformer=component("denoiser", module=module))
    finding = found(pipe=pipe, accelerators=(gpu,))["precision.float32_on_accelerator"]
    assert finding.evidence["saved_mb"] == 2048.0
    assert f"torch_dtype=torch.{dtype}" in (finding.advice or "")


def test_float32_on_the_cpu_or_half_on_a_gpu_is_no_fault(found: Found) -> None:
    on_cpu = component("denoiser", module=weights(dtype="float32", device="cpu"))
    assert "precision.float32_on_accelerator" not in found(pipe=pipeline(transformer=on_cpu))
    assert "precision.float32_on_accelerator" not in found(pipe=pipeline())


@pytest.mark.parametrize(("force_upcast", "severity"), [(True, "info"), (False, "warning")])
def test_a_float32_vae_beside_a_half_denoiser_is_a_slip_unless_it_is_meant(
    found: Found, force_upcast: bool, severity: str
) -> None:
    vae = component("vae", module=weights(dtype="float32"), config={"force_upcast": force_upcast})
    pipe = pipeline(transformer=component("denoiser"), vae=vae)
    assert found(pipe=pipe)["precision.float32_vae"].severity == severity


def test_a_float32_vae_in_a_float32_pipeline_is_no_slip(found: Found) -> None:
    both = weights(dtype="float32")
    pipe = pipeline(transformer=component("denoiser", module=both), vae=component("vae", module=both))
    assert "precision.float32_vae" not in found(pipe=pipe)


@pytest.mark.parametrize(
    ("architecture", "channels_last", "device", "is_said"),
    [("UNet", False, "cuda:0", True), ("UNet", True, "cuda:0", False), ("MMDiT", False, "cuda:0", False),
     ("UNet", False, "mps:0", False), ("UNet", None, "cuda:0", False)],
)  # fmt: skip
def test_only_a_unet_on_cuda_is_told_of_channels_last(
    found: Found, architecture: str, channels_last: bool | None, device: str, is_said: bool
) -> None:
    unet = component("denoiser", module=weights(device=device), channels_last=channels_last)
    findings = found(pipe=pipeline(architecture=architecture, unet=unet))
    assert ("precision.not_channels_last" in findings) is is_said
