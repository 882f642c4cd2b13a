import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.lbm.training.tiny_run import tiny_settings
from torch import Tensor, nn

from sigmascope.errors import ConfigError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.training.objective import Objective, PixelLoss, cropped, generators_for

FACTOR = 2


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_a_crop_is_one_place_of_latent_picture_and_mask() -> None:
    rows, columns = torch.meshgrid(torch.arange(12.0), torch.arange(10.0), indexing="ij")
    place = rows * 100 + columns
    latents = place[None, None].expand(5, 4, 12, 10)
    pixels = place.repeat_interleave(FACTOR, 0).repeat_interleave(FACTOR, 1)[None, None]
    target, mask = pixels.expand(5, 3, 24, 20), pixels.expand(5, 1, 24, 20)
    cuts = cropped(latents, target, mask, 8, FACTOR, generators_for(0, 0, range(5), "crop"))
    assert [tuple(cut.shape) for cut in cuts if cut is not None] == [(5, 4, 4, 4), (5, 3, 8, 8), (5, 1, 8, 8)]
    enlarged = cuts[0][:, :1].repeat_interleave(FACTOR, 2).repeat_interleave(FACTOR, 3)
    for cut in cuts[1:]:
        assert cut is not None
        assert torch.equal(cut[:, :1], enlarged)
    corners = cuts[0][:, 0, 0, 0].tolist()
    assert len(set(corners)) > 1


def test_a_crop_does_not_depend_on_the_batch() -> None:
    latents, target = random(4, 4, 12, 10), random(4, 3, 24, 20)
    whole = cropped(latents, target, None, 8, FACTOR, generators_for(0, 0, range(4), "crop"))
    part = cropped(latents[2:], target[2:], None, 8, FACTOR, generators_for(0, 0, (2, 3), "crop"))
    assert torch.equal(whole[0][2:], part[0])
    assert torch.equal(whole[1][2:], part[1])
    assert whole[2] is None


def test_a_picture_smaller_than_the_crop_is_taken_whole() -> None:
    latents, target = random(1, 4, 4, 6), random(1, 3, 8, 12)
    cut = cropped(latents, target, None, 64, FACTOR, generators_for(0, 0, (0,), "crop"))
    assert torch.equal(cut[0], latents)
    assert torch.equal(cut[1], target)


def test_a_crop_costs_the_crop_only(tiny_model: LbmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, ...]] = []
    decode = tiny_model.vae.decode

    def watched(latents: Tensor, **options: Any) -> Tensor:
        sizes.append(tuple(latents.shape))
        return decode(latents, **options)

    monkeypatch.setattr(tiny_model.vae, "decode", watched)
    loss = PixelLoss("l2", crop=16)
    loss(
        tiny_model.vae, random(2, 4, 32, 32), random(2, 3, 64, 64), None, generators_for(0, 0, (0, 1), "crop")
    )
    assert sizes == [(2, 4, 8, 8)]


def test_the_gradient_goes_through_the_decoder(tiny_model: LbmModel) -> None:
    latents = random(1, 4, 8, 8).requires_grad_()
    target, direction = random(1, 3, 16, 16, seed=1), random(1, 4, 8, 8, seed=2)
    loss = PixelLoss("l2")

    def value(at: Tensor) -> Tensor:
        return loss(tiny_model.vae, at, target, None, []).sum()

    (gradient,) = torch.autograd.grad(value(latents), latents)
    step = 1e-2
    with torch.no_grad():
        slope = (value(latents + step * direction) - value(latents - step * direction)) / (2 * step)
    assert float((gradient * direction).sum()) == pytest.approx(float(slope), rel=0.02)


def test_tiles_give_value_and_gradient_of_the_whole_away_from_seams(tiny_model: LbmModel) -> None:
    latents, target = random(1, 4, 24, 24).requires_grad_(), random(1, 3, 48, 48, seed=1)
    direct, tiled = (
        PixelLoss("l1", tile_size=size)(tiny_model.vae, latents, target, None, []).sum()
        for size in (None, 24)
    )
    assert tiled.item() == pytest.approx(direct.item(), rel=0.05)
    (gradient,) = torch.autograd.grad(tiled, latents)
    assert (gradient.abs().amax(dim=1) > 0).all()


@pytest.mark.parametrize("kind", ["l1", "l2"])
@pytest.mark.parametrize(("reduction", "elements"), [("all", 3 * 16 * 16), ("valid", 3 * 6 * 5)])
def test_what_is_not_valid_does_not_count(
    kind: Any, reduction: Any, elements: int, tiny_model: LbmModel
) -> None:
    latents, target = random(2, 4, 8, 8), random(2, 3, 16, 16, seed=1)
    mask = torch.zeros(2, 1, 16, 16)
    mask[:, :, 4:10, 2:7] = 1
    with torch.no_grad():
        decoded = tiny_model.vae.decode(latents).clamp(-1, 1)
    difference = (decoded - target)[:, :, 4:10, 2:7].double()
    values = difference.abs() if kind == "l1" else difference.square()
    other = torch.where(mask.bool(), target, torch.full_like(target, 9.0))
    for picture in (target, other):
        loss = PixelLoss(kind, reduction=reduction)
        ours = loss(tiny_model.vae, latents, picture, mask, []).detach()
        torch.testing.assert_close(ours.double(), values.sum(dim=(1, 2, 3)) / elements, rtol=1e-5, atol=1e-6)


def test_the_decoded_picture_is_clamped(tiny_model: LbmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    decoded = torch.tensor([-3.0, -0.5, 0.25, 4.0]).reshape(1, 1, 2, 2).repeat(1, 3, 1, 1).requires_grad_()
    monkeypatch.setattr(tiny_model.vae, "decode", lambda latents, **options: decoded)
    loss = PixelLoss("l1")(tiny_model.vae, random(1, 4, 1, 1), torch.zeros(1, 3, 2, 2), None, [])
    assert loss.tolist() == [(1 + 0.5 + 0.25 + 1) / 4]
    (gradient,) = torch.autograd.grad(loss.sum(), decoded)
    assert (gradient[0, 0] * 12).tolist() == [[0.0, -1.0], [1.0, 0.0]]


def test_without_the_lpips_package_the_error_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lpips", None)
    settings = tiny_settings(pixel_loss_weight=1.0, pixel_loss_type="lpips")
    with pytest.raises(ConfigError, match=r"pip install lpips.*pixel_loss_type"):
        Objective(settings)
    Objective(tiny_settings(pixel_loss_weight=0.0, pixel_loss_type="lpips"))


class Perceptual(nn.Module):
    """Like lpips' class: a distance for each pixel, which looks one pixel to each side, or their mean."""

    def __init__(self, net: str, spatial: bool, verbose: bool) -> None:
        super().__init__()
        assert (net, verbose) == ("vgg", False)
        self.spatial = spatial
        self.around = nn.Conv2d(3, 1, 3, padding=1, bias=False)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        features: Tensor = self.around(first) - self.around(second)
        distances = features.square()
        return distances if self.spatial else distances.mean(dim=(2, 3), keepdim=True)


@pytest.fixture(autouse=True)
def lpips_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    package: Any = ModuleType("lpips")
    package.LPIPS = Perceptual
    monkeypatch.setitem(sys.modules, "lpips", package)


@pytest.mark.parametrize("reduction", ["all", "valid"])
def test_lpips_is_averaged_for_each_sample(reduction: Any, tiny_model: LbmModel) -> None:
    perceptual = PixelLoss("lpips", reduction=reduction)
    latents, target = random(2, 4, 8, 8).requires_grad_(), random(2, 3, 16, 16, seed=1)
    values = perceptual(tiny_model.vae, latents, target, None, [])
    assert values.shape == (2,)
    (gradient,) = torch.autograd.grad(values.sum(), latents)
    assert gradient.abs().max() > 0
    network = perceptual._lpips
    assert network is not None
    assert not network.training
    assert not any(parameter.requires_grad for parameter in network.parameters())


def test_lpips_over_valid_pixels_sees_nothing_else() -> None:
    perceptual = PixelLoss("lpips", reduction="valid")
    target, mask = random(1, 3, 16, 16), torch.ones(1, 1, 16, 16)
    mask[..., 8:] = 0
    decoded = target.clone()
    decoded[..., 8:] += 5.0
    assert float(perceptual.compare(decoded, target, mask)) == 0.0
    assert float(perceptual.compare(decoded, target, None)) > 0.0


def test_lpips_over_all_pixels_compares_both_pictures_blacked_out_where_not_valid() -> None:
    perceptual = PixelLoss("lpips", reduction="all")
    network = perceptual._lpips
    assert network is not None
    decoded, target, mask = random(2, 3, 16, 16), random(2, 3, 16, 16, seed=1), torch.ones(2, 1, 16, 16)
    mask[..., 8:] = 0
    expected = [
        network(one[None] * mask[:1], two[None] * mask[:1]).mean()
        for one, two in zip(decoded, target, strict=True)
    ]
    torch.testing.assert_close(perceptual.compare(decoded, target, mask), torch.stack(expected))
