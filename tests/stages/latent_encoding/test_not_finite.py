"""NaN and Inf in an output: what the analysis and its summary say, with and without statistics."""

import io
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor

import sigmascope
from sigmascope.errors import NonFiniteError
from sigmascope.records.latents import VaeFacts
from sigmascope.stages import latent_encoding


class Pooling:
    """A VAE of pictures with a factor of 4."""

    def encode(self, pixels: Tensor) -> Tensor:
        return torch.nn.functional.avg_pool2d(pixels, 4)

    def decode(self, latents: Tensor) -> Tensor:
        return latents.repeat_interleave(4, -1).repeat_interleave(4, -2)


def broken(*shape: int) -> Tensor:
    """One NaN and two Inf."""
    tensor = torch.zeros(shape)
    tensor.view(-1)[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return tensor


def analysed(latent: Tensor, **options: Any) -> Any:
    baseline = sigmascope.capture_latent_generation_baseline(Pooling(), torch.rand(1, 3, 32, 32))
    return sigmascope.analyze_latent_generation_results(
        baseline, latent, 1.0, "Direct VAE Encoding", **options
    )


def printed(analysis: Any) -> str:
    out = io.StringIO()
    sigmascope.print_latent_generation_analysis_summary(analysis, Console(file=out, width=80))
    return out.getvalue()


@pytest.mark.parametrize("statistics", [None, False, True])
def test_nan_is_counted_whether_or_not_statistics_are_read(statistics: bool | None) -> None:
    analysis = analysed(broken(1, 3, 8, 8), statistics=statistics)
    assert analysis["encoding_success"] is False
    assert analysis["latent_analysis"]["status"] == "not_finite"
    (finding,) = [one for one in analysis["findings"] if one["id"] == "latent_not_finite"]
    assert finding["evidence"] == {"NaN": 1, "Inf": 2, "elements": 192}
    assert analysis["validation"]["output"]["passed"] is False


def test_without_statistics_the_range_stays_unread() -> None:
    values = analysed(torch.rand(1, 3, 8, 8), statistics=False)["latent_analysis"]
    assert (values["statistics"]["nan_count"], values["statistics"]["inf_count"]) == (0, 0)
    assert values["statistics"]["min"] is None
    assert values["unavailable"]["min"] == "not asked for"
    assert "nan_count" not in values["unavailable"]


def test_the_summary_contradicts_itself_nowhere() -> None:
    shown = printed(analysed(broken(1, 3, 8, 8), statistics=False))
    assert "❌ VAE Encoding Success: NO" in shown
    assert "❌ Status: NOT_FINITE" in shown
    assert "✅" not in shown
    assert "SUCCESS" not in shown
    assert "the result holds 1 NaN and 2 Inf" in shown


def test_a_named_strategy_that_gave_nan_did_not_succeed() -> None:
    analysis = analysed(broken(1, 3, 8, 8))
    assert [one["outcome"] for one in analysis["strategies"]] == ["failed"]
    assert "vae_fallback" not in {one["id"] for one in analysis["findings"]}


def test_the_analysis_of_an_error_says_what_it_says() -> None:
    pixels = torch.rand(1, 3, 32, 32)
    pixels[0, 0, 0, 0] = torch.nan
    baseline = sigmascope.capture_latent_generation_baseline(Pooling(), pixels)
    with pytest.raises(NonFiniteError) as raised:
        sigmascope.encode_latents(Pooling(), pixels)
    error: Any = raised.value
    analysis = sigmascope.analyze_latent_generation_results(
        baseline, None, None, None, record=error.record, error=error
    )
    assert analysis["encoding_success"] is False
    (finding,) = [one for one in analysis["findings"] if one["id"] == "vae_failed"]
    assert "1 NaN among the 192 elements of the latents" in finding["message"]
    assert "hold 1 NaN. Repair the pictures" in finding["message"]
    assert "✅" not in printed(analysis)


def test_what_the_decoding_knows_of_its_pictures_needs_no_second_look() -> None:
    latent = torch.rand(1, 3, 8, 8)
    baseline = sigmascope.capture_latent_decoding_baseline(Pooling(), latent)
    pictures, record = sigmascope.decode_latents(Pooling(), latent)
    analysis = sigmascope.analyze_latent_decoding_results(baseline, pictures, record=record, statistics=False)
    assert analysis["pictures"]["nan_count"] == 0
    assert not any("pictures were not looked at" in note for note in analysis["validation"]["notes"])


def test_the_latent_by_itself_is_counted_too() -> None:
    facts = VaeFacts("Pooling", 3, 3, 4)
    found = sigmascope._analyze_latent_output(broken(1, 3, 8, 8), 1, 32, 32, vae=facts, statistics=False)
    assert (found["status"], found["statistics"]["nan_count"]) == ("not_finite", 1)  # type: ignore[index]


def test_who_may_not_wait_leaves_an_accelerators_latent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    read = []

    def count_not_finite(judged: Any, latent: Tensor) -> Any:
        read.append(latent.device.type)
        return judged

    monkeypatch.setattr(latent_encoding, "count_not_finite", count_not_finite)
    elsewhere = torch.zeros(1, 3, 8, 8, device="meta")
    analysed(elsewhere, may_wait=False)
    assert read == []
    analysed(elsewhere)
    analysed(torch.zeros(1, 3, 8, 8), may_wait=False)
    assert read == ["meta", "cpu"]
