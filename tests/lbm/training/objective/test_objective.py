from typing import Any

import numpy as np
import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from diffusers.models.autoencoders.vae import DiagonalGaussianDistribution
from numpy.typing import NDArray
from PIL import Image
from scipy import stats
from tests.lbm.training.tiny_run import batch_of, new_model, randomised, tiny_settings
from torch import Tensor

from sigmascope.errors import ConfigError
from sigmascope.lbm.model import LbmModel
from sigmascope.lbm.samples import Batch
from sigmascope.lbm.training.lora_layers import inject_lora
from sigmascope.lbm.training.objective import Objective, draw_bridge, generators_for
from sigmascope.lbm.training.settings import TrainSettings

Array = NDArray[np.float64]
SIDE = 32
FACTOR = 2
"""Of the tiny VAE."""


def valid(count: int) -> Tensor:
    """Masks that leave more of one sample than of another; the first sample is whole."""
    mask = torch.ones(count, 1, SIDE, SIDE)
    for index in range(1, count):
        mask[index, :, : 4 * index + 3] = 0
    return mask


def double(tensor: Tensor) -> Array:
    values: Array = tensor.detach().numpy().astype(np.float64)
    return values


def drawn_latents(model: LbmModel, batch: Batch, settings: TrainSettings, *more: Tensor) -> list[Tensor]:
    """Latents of source, target, and further pictures, drawn by diffusers' own posterior."""
    generators = generators_for(settings.seed, batch.epoch, batch.numbers, "posterior")
    latents = []
    for pictures in (batch.target, batch.source, *more):
        with torch.no_grad():
            parameters = model.vae.vae_model.encode(pictures).latent_dist.parameters
        draws = [
            DiagonalGaussianDistribution(one[None]).sample(generator)
            for one, generator in zip(parameters, generators, strict=True)
        ]
        latents.append((torch.cat(draws) - 0.25) * 0.5)
    target, source, *others = latents
    return [source, target, *others]


def by_hand(model: LbmModel, batch: Batch, **keys: Any) -> tuple[Array, Array, Array]:
    """x(σ), its point's σ, and the loss of each sample, in float64 from the equations of SPEC section 7."""
    settings = tiny_settings(**keys)
    z_source, z_target = map(double, drawn_latents(model, batch, settings))
    generators = generators_for(settings.seed, batch.epoch, batch.numbers, "bridge")
    drawn_sigmas, drawn_noise = draw_bridge(generators, z_source.shape[1:], settings.lbm)
    sigmas, noise = double(drawn_sigmas), double(drawn_noise)
    x_t, losses = np.empty_like(z_source), []
    for index, sigma in enumerate(sigmas):
        s = settings.bridge_noise_sigma
        x_t[index] = (
            sigma * z_source[index]
            + (1 - sigma) * z_target[index]
            + s * np.sqrt(sigma * (1 - sigma)) * noise[index]
        )
        with torch.no_grad():
            point = torch.from_numpy(x_t[index : index + 1]).float()
            predicted = double(model(point, drawn_sigmas[index : index + 1]))[0]
            z_hat = torch.from_numpy(x_t[index] - sigma * predicted)[None].float()
            decoded = double(model.vae.decode(z_hat))[0].clip(-1, 1)
        loss = 0.0
        pixels = np.ones((SIDE, SIDE)) if batch.mask is None else double(batch.mask)[index, 0]
        latents = pixels.reshape(SIDE // FACTOR, FACTOR, SIDE // FACTOR, FACTOR).min(axis=(1, 3))
        for weight, difference, mask, kind in (
            (settings.latent_loss_weight, predicted - (z_source - z_target)[index], latents, settings.latent_loss_type),
            (settings.pixel_loss_weight, decoded - double(batch.target)[index], pixels, settings.pixel_loss_type),
        ):  # fmt: skip
            values = np.abs(difference) if kind == "l1" else difference**2
            of = mask.sum() * len(values) if settings.mask_reduction == "valid" else values.size
            loss += weight * (values * mask).sum() / of
        losses.append(loss)
    return x_t, sigmas, np.array(losses)


@pytest.mark.parametrize(
    "keys",
    [
        {"latent_loss_type": "l2"},
        {"latent_loss_type": "l1", "timestep_sampling": "uniform", "bridge_noise_sigma": 0.3},
        {"pixel_loss_type": "l1", "pixel_loss_weight": 2.0, "timestep_sampling": "log_normal"},
        {"pixel_loss_type": "l2", "pixel_loss_weight": 10.0, "latent_loss_weight": 0.5, "seed": 3},
        {"pixel_loss_type": "l2", "pixel_loss_weight": 1.0, "latent_loss_weight": 0.0},
        {"pixel_loss_type": "l1", "pixel_loss_weight": 1.0, "mask_reduction": "valid"},
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_loss_and_point_are_those_worked_by_hand(
    keys: dict[str, Any], masked: bool, tiny_model: LbmModel
) -> None:
    batch = batch_of(3, SIDE, epoch=2, mask=valid(3) if masked else None)
    objective = Objective(tiny_settings(**keys))
    x_t, sigmas, losses = by_hand(tiny_model, batch, **keys)
    point = objective.bridge_point(tiny_model, batch)
    terms = objective.loss(tiny_model, batch)
    np.testing.assert_allclose(double(point.x_t), x_t, rtol=1e-5, atol=1e-6)
    np.testing.assert_array_equal(double(terms.sigmas), sigmas)
    np.testing.assert_allclose(double(terms.per_sample), losses, rtol=1e-4)
    assert float(terms.total) == pytest.approx(losses.mean(), rel=1e-4)


@pytest.mark.parametrize("timestep", [1, 250, 333, 1000])
def test_point_and_timestep_are_those_of_diffusers_scheduler(timestep: int, tiny_model: LbmModel) -> None:
    settings = tiny_settings(selected_timesteps=[timestep], prob=[1.0], bridge_noise_sigma=0.0)
    batch = batch_of(2, SIDE)
    scheduler = FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000)
    position = int((scheduler.timesteps == timestep).nonzero())
    seen: list[Tensor] = []
    watch = tiny_model.denoiser.register_forward_pre_hook(lambda module, args: seen.append(args[1]))
    with torch.no_grad():
        terms = Objective(settings).loss(tiny_model, batch)
    z_source, z_target = drawn_latents(tiny_model, batch, settings)
    watch.remove()
    point = Objective(settings).bridge_point(tiny_model, batch)
    theirs = scheduler.scale_noise(z_target, scheduler.timesteps[position].expand(2), noise=z_source)
    torch.testing.assert_close(point.x_t, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(terms.sigmas, scheduler.sigmas[position].expand(2))
    torch.testing.assert_close(seen[0], scheduler.timesteps[position].expand(2))
    # One step of theirs from there to σ = 0 lands on our estimate of the target.
    scheduler.set_timesteps(sigmas=[timestep / 1000])
    with torch.no_grad():
        velocity = tiny_model(point.x_t, terms.sigmas)
    landed = scheduler.step(velocity, scheduler.timesteps[0], point.x_t).prev_sample
    torch.testing.assert_close(landed, point.x_t - timestep / 1000 * velocity, rtol=1e-5, atol=1e-6)


def test_the_first_timestep_is_the_source(tiny_model: LbmModel) -> None:
    settings = tiny_settings(selected_timesteps=[1000], prob=[1.0], bridge_noise_sigma=5.0)
    batch = batch_of(2, SIDE)
    z_source, _ = drawn_latents(tiny_model, batch, settings)
    torch.testing.assert_close(Objective(settings).bridge_point(tiny_model, batch).x_t, z_source)


def test_latents_are_drawn_anew_for_each_sample_and_epoch(tiny_model: LbmModel) -> None:
    objective = Objective(tiny_settings(selected_timesteps=[1000], prob=[1.0]))
    picture = torch.zeros(200, 3, 4, 4)
    batches = [Batch(picture, picture, tuple(range(200)), ("a",) * 200, epoch=epoch) for epoch in (0, 1)]
    posterior = tiny_model.vae.vae_model.encode(picture[:1]).latent_dist
    first, second = (
        (objective.bridge_point(tiny_model, batch).x_t / 0.5 + 0.25 - posterior.mean) / posterior.std
        for batch in batches
    )
    assert stats.kstest(first.flatten().numpy(), "norm").pvalue > 0.01
    assert abs(np.corrcoef(first.flatten(), second.flatten())[0, 1]) < 0.05


@pytest.mark.parametrize(
    "keys",
    [{}, {"latent_loss_weight": 0.0, "pixel_loss_weight": 1.0, "pixel_loss_type": "l1", "pixel_crop": 16}],
)
def test_two_parts_give_the_gradient_of_the_whole(keys: dict[str, Any]) -> None:
    model, settings = new_model(), tiny_settings(trainable_lora_modules=["attn1", "conv_out"], **keys)
    trainable = inject_lora(model, settings)
    randomised(trainable.parameters())
    parameters = [parameter for _, parameter in trainable.parameters()]
    objective, mask = Objective(settings), valid(4)
    whole = objective.loss(model, batch_of(4, SIDE, mask=mask))
    expected = torch.autograd.grad(whole.total, parameters)
    parts = [
        objective.loss(model, batch_of(size, SIDE, first=first, mask=mask[first : first + size]))
        for first, size in ((0, 3), (3, 1))
    ]
    summed = (3 * parts[0].total + parts[1].total) / 4
    for ours, theirs in zip(torch.autograd.grad(summed, parameters), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(torch.cat([part.sigmas for part in parts]), whole.sigmas)


def test_draws_follow_from_seed_epoch_and_number(tiny_model: LbmModel) -> None:
    objective = Objective(tiny_settings(timestep_sampling="uniform"))
    first, second = (objective.bridge_point(tiny_model, batch_of(2, SIDE)) for _ in range(2))
    assert torch.equal(first.x_t, second.x_t)
    later = objective.bridge_point(tiny_model, batch_of(2, SIDE, epoch=1))
    assert not torch.equal(first.sigmas, later.sigmas)
    reseeded = Objective(tiny_settings(timestep_sampling="uniform", seed=1))
    assert not torch.equal(first.sigmas, reseeded.bridge_point(tiny_model, batch_of(2, SIDE)).sigmas)


def test_what_has_no_weight_is_not_worked_out(tiny_model: LbmModel, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **kwargs: object) -> Tensor:
        raise AssertionError("decoded")

    monkeypatch.setattr(tiny_model.vae, "decode", refuse)
    terms = Objective(tiny_settings()).loss(tiny_model, batch_of(1, SIDE))
    assert terms.pixel is None
    assert terms.latent is not None
    settings = tiny_settings(pixel_loss_weight=1.0, pixel_loss_type="l2")
    with pytest.raises(AssertionError, match="decoded"):
        Objective(settings).loss(tiny_model, batch_of(1, SIDE))


def test_only_what_is_trained_gets_a_gradient() -> None:
    model = new_model()
    settings = tiny_settings(
        trainable_lora_modules=["conv_out"],
        latent_loss_weight=0,
        pixel_loss_weight=1.0,
        pixel_loss_type="l2",
    )
    trainable = inject_lora(model, settings)
    randomised(trainable.parameters())
    torch.autograd.backward(Objective(settings).loss(model, batch_of(1, SIDE)).total)
    with_gradient = {id(p) for p in model.parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert with_gradient == {id(p) for _, p in trainable.parameters()}


def test_a_sample_without_a_valid_pixel_weighs_nothing(tiny_model: LbmModel) -> None:
    mask = torch.stack([torch.ones(1, SIDE, SIDE), torch.zeros(1, SIDE, SIDE)])
    settings = tiny_settings(pixel_loss_weight=1.0, pixel_loss_type="l1")
    terms = Objective(settings).loss(tiny_model, batch_of(2, SIDE, mask=mask))
    assert terms.per_sample[1] == 0
    assert float(terms.total) == pytest.approx(float(terms.per_sample[0]) / 2)


def test_the_vae_keeps_its_dtype_under_autocast(tiny_model: LbmModel) -> None:
    settings = tiny_settings(pixel_loss_weight=1.0, pixel_loss_type="l2")
    seen: dict[str, torch.dtype] = {}
    vae, denoiser = tiny_model.vae.vae_model, tiny_model.denoiser
    layers = {"encoder": vae.encoder.conv_in, "decoder": vae.decoder.conv_in, "denoiser": denoiser.conv_in}
    handles = [
        layer.register_forward_hook(lambda module, args, out, name=name: seen.__setitem__(name, out.dtype))
        for name, layer in layers.items()
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        terms = Objective(settings).loss(tiny_model, batch_of(1, SIDE))
    for handle in handles:
        handle.remove()
    assert seen == {"encoder": torch.float32, "decoder": torch.float32, "denoiser": torch.bfloat16}
    assert terms.total.dtype == torch.float32


def test_conditioning_is_masks_then_drawn_images() -> None:
    keys: dict[str, Any] = {
        "unet_input_channels": 9,
        "conditioning_images_keys": ["depth"],
        "conditioning_masks_keys": ["region"],
    }
    model, settings = new_model(**keys), tiny_settings(**keys)
    objective = Objective(settings)
    depth = torch.rand(2, 3, SIDE, SIDE)
    region = torch.rand(2, 1, SIDE, SIDE)
    batch = batch_of(2, SIDE, conditioning_images={"depth": depth}, conditioning_masks={"region": region})
    conditioning = objective.bridge_point(model, batch).conditioning
    assert conditioning is not None
    # Pillow's bilinear filter is the antialiased one of torchvision's `resize`, with which LBM scales its masks.
    small = (SIDE // FACTOR, SIDE // FACTOR)
    resized = [
        np.asarray(Image.fromarray(one[0].numpy()).resize(small, Image.Resampling.BILINEAR)) for one in region
    ]
    np.testing.assert_allclose(conditioning[:, 0].numpy(), np.stack(resized), atol=1e-6)
    *_, drawn = drawn_latents(model, batch, settings, depth)
    torch.testing.assert_close(conditioning[:, 1:], drawn)
    as_inferred = objective.conditioning(model, batch, torch.zeros(2, 4, *small))
    assert as_inferred is not None
    assert torch.equal(as_inferred[:, 1:], model.vae.encode(depth))
    assert objective.loss(model, batch).total.isfinite()
    with pytest.raises(ConfigError, match="the batch has no depth"):
        objective.loss(model, batch_of(2, SIDE))
