"""NaN and Inf in what a VAE makes: never a success, and mended where half precision is to blame."""

import copy
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.pipeline.sabotage import state_of
from torch import Tensor, nn

from sigmascope import decode_latents, encode_latents
from sigmascope.errors import NonFiniteError
from sigmascope.pipeline import encode_decode as attempts
from sigmascope.pipeline.model_state import Ram
from sigmascope.records.latents import EncodingRecord, findings_of_record

if TYPE_CHECKING:
    from tests.pipeline.conftest import Sample

OVERFLOWING = 2e5
"""What makes weights of 0.2 sum up to more than float16's 65,504 while each stays below."""


def overflowing(vae: Any) -> tuple[Any, Any]:
    """A VAE whose first layers overflow in float16, and the same weights in float32."""
    scaled = copy.deepcopy(vae)
    for layer in (scaled.encoder.conv_in, scaled.decoder.conv_in):
        layer.weight.data *= OVERFLOWING * 0.19 / layer.weight.abs().max()
    half = scaled.half()
    assert all(weight.isfinite().all() for weight in half.parameters())
    return half, copy.deepcopy(half).float()


def ends(record: EncodingRecord) -> list[tuple[str, str]]:
    return [(attempt.name, attempt.outcome) for attempt in record.attempts]


@torch.no_grad()
def test_what_overflows_in_float16_is_encoded_in_float32(kl: "Sample") -> None:
    half, single = overflowing(kl.vae)
    assert half.encode(kl.pixels.half()).latent_dist.mode().isnan().any()
    expected = single.encode(kl.pixels).latent_dist.mode()
    before = state_of(half)
    latent, record = encode_latents(half, kl.pixels)
    assert torch.equal(latent, expected.half())
    assert expected.isfinite().all()
    assert ends(record) == [("direct", "failed"), ("cpu", "succeeded")]
    assert state_of(half) == before


@torch.no_grad()
def test_what_overflows_in_float16_is_decoded_in_float32(kl: "Sample") -> None:
    half, single = overflowing(kl.vae)
    latents = torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0))
    assert not half.decode(latents.half()).sample.isfinite().all()
    pictures, record = decode_latents(half, latents)
    assert torch.equal(pictures, single.decode(latents).sample.half())
    assert ends(record) == [("direct", "failed"), ("cpu", "succeeded")]


def test_the_record_says_that_it_overflowed_and_what_came_of_it(kl: "Sample") -> None:
    _, record = encode_latents(overflowing(kl.vae)[0], kl.pixels)
    first = record.attempts[0]
    assert first.error_type == "NonFiniteError"
    assert "NaN among the 256 elements of the latents" in str(first.reason)
    assert "the VAE overflows in float16. Use bfloat16 or float32." in str(first.reason)
    (finding,) = [one for one in findings_of_record(record) if one.id == "vae_fallback"]
    assert finding.message == (
        "Direct VAE Encoding gave NaN or Inf: the output comes from CPU Fallback Encoding, in float32."
    )
    assert finding.advice == "Use the VAE in float32, or in bfloat16 if it overflows in float16."


def test_tiles_are_not_tried_and_the_cpu_only_if_it_may_be(kl: "Sample") -> None:
    half, _ = overflowing(kl.vae)
    with pytest.raises(NonFiniteError, match=r'name "cpu" in strategies=') as raised:
        encode_latents(half, kl.pixels, strategies=("direct", "tiled"))
    assert ends(raised.value.record) == [("direct", "failed")]
    assert raised.value.record.success is False


def test_the_cpu_is_tried_again_in_float32_where_it_overflowed_itself(kl: "Sample") -> None:
    half, _ = overflowing(kl.vae)
    latent, record = encode_latents(half, kl.pixels, strategies="cpu")
    assert latent.isfinite().all()
    assert ends(record) == [("cpu", "failed"), ("cpu", "succeeded")]


def test_a_latent_that_float16_cannot_hold_stays_in_float32() -> None:
    vae = Narrow(torch.float16)
    nn.init.constant_(vae.scale.weight, 1)
    latent, _ = encode_latents(vae, torch.ones(1, 3, 16, 16), strategies=("direct", "cpu"))
    assert torch.equal(latent, torch.full((1, 1, 2, 2), 3 * 8 * 8 * 1000.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_weight_that_is_nan_is_named(kl: "Sample", dtype: torch.dtype) -> None:
    broken = copy.deepcopy(kl.vae).to(dtype)
    broken.encoder.conv_in.weight.data[0, 0, 0, 0] = torch.nan
    with pytest.raises(NonFiniteError, match=r"encoder\.conv_in\.weight \(1 NaN\)") as raised:
        encode_latents(broken, kl.pixels)
    assert not isinstance(raised.value, MemoryError)
    assert ends(raised.value.record) == [("direct", "failed")]
    (finding,) = findings_of_record(raised.value.record)
    assert (finding.id, finding.severity, finding.advice) == ("vae_failed", "error", None)
    assert "Load the VAE again, or another file." in finding.message


def test_a_broken_weight_of_the_other_half_is_no_failure(kl: "Sample") -> None:
    broken = copy.deepcopy(kl.vae)
    broken.decoder.conv_in.weight.data[0, 0, 0, 0] = torch.nan
    assert encode_latents(broken, kl.pixels)[1].success
    with pytest.raises(NonFiniteError, match=r"of the pictures: .*decoder\.conv_in\.weight"):
        decode_latents(broken, kl.latent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_one_pixel_that_is_nan_is_named_and_nothing_else_is_tried(kl: "Sample", dtype: torch.dtype) -> None:
    pixels = kl.pixels.clone()
    pixels[0, 1, 5, 7] = torch.nan
    with pytest.raises(NonFiniteError, match="the pictures given to it hold 1 NaN") as raised:
        encode_latents(copy.deepcopy(kl.vae).to(dtype), pixels)
    assert ends(raised.value.record) == [("direct", "failed")]


def test_a_latent_that_is_infinite_is_named(kl: "Sample") -> None:
    latents = kl.latent.clone()
    latents[0, 0, 0, :2] = torch.inf
    with pytest.raises(NonFiniteError, match="the latents given to it hold 2 Inf"):
        decode_latents(kl.vae, latents)


class Narrow(nn.Module):
    """Sums 8×8 pixels times 1,000, then takes a ten-thousandth: the sum overflows in float16 above 0.34 a pixel."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.sums = nn.Conv2d(3, 1, 8, stride=8, bias=False, dtype=dtype)
        self.scale = nn.Conv2d(1, 1, 1, bias=False, dtype=dtype)
        nn.init.constant_(self.sums.weight, 1000)
        nn.init.constant_(self.scale.weight, 2.0**-13)

    def encode(self, pixels: Tensor) -> Tensor:
        made: Tensor = self.scale(self.sums(pixels))
        return made


def test_one_bad_tile_of_several_is_a_failed_attempt() -> None:
    pixels = torch.full((1, 3, 96, 96), 0.125)
    pixels[..., :8, :8] = 8.0
    latent, record = encode_latents(
        Narrow(torch.float16), pixels, strategies=("tiled", "cpu"), tile=32, overlap=0
    )
    assert ends(record) == [("tiled", "failed"), ("cpu", "succeeded")]
    assert "1 Inf among the 144 elements" in str(record.attempts[0].reason)
    expected = torch.full((1, 1, 12, 12), 0.125 * 192 * 1000 / 8192)
    expected[..., 0, 0] = 8 * 192 * 1000 / 8192
    torch.testing.assert_close(latent, expected.half(), rtol=1e-3, atol=0)


def test_a_float32_vae_that_makes_nan_of_good_pictures_is_not_tried_again() -> None:
    class Roots:
        def encode(self, pixels: Tensor) -> Tensor:
            return torch.nn.functional.avg_pool2d(pixels, 8).sqrt()

    with pytest.raises(NonFiniteError, match="range that this VAE was trained on") as raised:
        encode_latents(Roots(), torch.full((1, 3, 16, 16), -0.5))
    assert "12 NaN among the 12 elements" in str(raised.value)
    assert ends(raised.value.record) == [("direct", "failed")]


def test_a_stand_in_that_was_asked_for_is_given_after_nan(kl: "Sample") -> None:
    pixels = kl.pixels.clone()
    pixels[0, 0, 0, 0] = torch.nan
    latent, record = encode_latents(kl.vae, pixels, dummy=True)
    assert not latent.any()
    assert record.dummy
    assert ends(record) == [("direct", "failed"), ("dummy", "succeeded")]


def test_a_draw_that_overflowed_leaves_the_generator_as_it_was(kl: "Sample") -> None:
    half, single = overflowing(kl.vae)
    generator, again = (torch.Generator().manual_seed(3) for _ in range(2))
    latent, _ = encode_latents(half, kl.pixels, sample=True, generator=generator)
    with torch.no_grad():
        expected = single.encode(kl.pixels).latent_dist.sample(generator=again)
    assert torch.equal(latent, expected.half())


@pytest.mark.parametrize("predict", [False, True])
def test_float32_is_refused_where_ram_cannot_hold_it_and_tiles_are_not_tried(
    kl: "Sample", predict: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, single = overflowing(kl.vae)
    weights = sum(one.nbytes for one in single.parameters())
    monkeypatch.setattr(attempts, "free_ram", lambda: Ram(weights - 1))
    with pytest.raises(NonFiniteError, match="the VAE overflows in float16") as raised:
        encode_latents(half, kl.pixels, predict=predict)
    assert ends(raised.value.record) == [("direct", "failed"), ("cpu", "skipped")]
    assert "MB" in str(raised.value.record.attempts[1].reason)
