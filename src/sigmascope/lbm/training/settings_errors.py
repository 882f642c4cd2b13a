"""Settings that are each right and cannot be together, as pure functions that give one line for each."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from sigmascope.errors import ConfigError
from sigmascope.lbm.training.optimizers import check_optimizer, check_schedule

if TYPE_CHECKING:
    from sigmascope.lbm.training.settings import TrainSettings


def impossible_combinations(settings: "TrainSettings") -> list[str]:
    """Say what cannot be together, one line for each, naming the keys and what to do."""
    return [
        *_what_is_trained(settings),
        *_what_is_minimised(settings),
        *_how_it_is_optimised(settings),
        *_sizes(settings),
        *_where_it_runs(settings),
        *_what_is_written(settings),
    ]


def partial_pairs(given: Mapping[str, Any]) -> list[str]:
    """Say which half of `selected_timesteps` and `prob` is given without the other.

    They are looked at as the user wrote them: a default for the missing half would go with it by chance only.
    """
    pair = ("selected_timesteps", "prob")
    written = [key for key in pair if given.get(key) is not None]
    if len(written) != 1:
        return []
    missing = next(key for key in pair if key not in written)
    return [f"{written[0]}: needs {missing} beside it"]


def _what_is_trained(settings: "TrainSettings") -> list[str]:
    ranks = [key for key in ("rank", "conv_rank", "alpha") if getattr(settings, key) is not None]
    if settings.full_finetune:
        return _full_finetune(settings, ranks)
    if settings.trainable_lora_modules == ():
        return ["trainable_lora_modules: an empty list trains nothing; leave it out to train every module"]
    if settings.lora_weights_path is not None:
        if not ranks:
            return []
        named = ", ".join(ranks)
        return [f"lora_weights_path: its own ranks and alphas are taken over; leave out {named}"]
    if settings.rank is None:
        return [
            "rank: give a rank to start a LoRA, lora_weights_path to continue one, or full_finetune: true"
        ]
    return []


def _full_finetune(settings: "TrainSettings", ranks: list[str]) -> list[str]:
    of_lora = [*ranks]
    of_lora += ["lora_weights_path"] if settings.lora_weights_path is not None else []
    of_lora += ["trainable_lora_modules"] if settings.trainable_lora_modules is not None else []
    wrong = []
    if of_lora:
        wrong.append(f"full_finetune: trains the weights themselves, so leave out {', '.join(of_lora)}")
    others = [name for name in settings.output_formats if name != "native"]
    if others:
        wrong.append(
            f"full_finetune: writes a whole checkpoint, not a LoRA; leave {', '.join(others)} out of "
            "output_formats"
        )
    return wrong


def _what_is_minimised(settings: "TrainSettings") -> list[str]:
    if settings.source_key.lower() == settings.target_key.lower():
        return [f"target_key: it and source_key are both {settings.target_key}, so there is nothing to learn"]
    if settings.mask_key is not None:
        for key in ("source_key", "target_key"):
            if getattr(settings, key).lower() == settings.mask_key.lower():
                return [
                    f"mask_key: it and {key} are both {settings.mask_key}; name the mask's file, or leave it out"
                ]
    if settings.latent_loss_weight == 0 and settings.pixel_loss_weight == 0:
        return ["latent_loss_weight: it and pixel_loss_weight are both 0, so there is nothing to minimise"]
    return []


def _how_it_is_optimised(settings: "TrainSettings") -> list[str]:
    wrong = []
    checks: tuple[Callable[[], None], ...] = (
        lambda: check_optimizer(settings.optimizer, settings.optimizer_kwargs),
        lambda: check_schedule(settings.lr_scheduler, settings.warmup_steps, settings.lr_scheduler_kwargs),
    )
    for check in checks:
        try:
            check()
        except ConfigError as error:
            wrong.append(str(error).rstrip("."))
    return wrong


def _sizes(settings: "TrainSettings") -> list[str]:
    wrong = []
    factor = settings.factor
    if settings.image_size is not None and any(side < 1 or side % factor for side in settings.image_size):
        near = [max(round(side / factor), 1) * factor for side in settings.image_size]
        given = list(settings.image_size)
        wrong.append(f"image_size: expected multiples of {factor} for this model, got {given} (near: {near})")
    for key in ("pixel_crop", "pixel_tile_size"):
        side = getattr(settings, key)
        if side is not None and (side < settings.vae.factor or side % settings.vae.factor):
            wrong.append(f"{key}: expected a multiple of the VAE's {settings.vae.factor} pixels, got {side}")
    if settings.pixel_crop is not None and settings.pixel_tile_size is not None:
        wrong.append(
            "pixel_crop: the crop is decoded at once, so leave out pixel_tile_size (or the other way)"
        )
    return wrong


def _where_it_runs(settings: "TrainSettings") -> list[str]:
    wrong = []
    if settings.mixed_precision == "fp16" and settings.device.partition(":")[0] == "cpu":
        wrong.append("mixed_precision: fp16 needs an accelerator; use bf16 or no on device cpu")
    if settings.wandb_project is not None and settings.report_to not in (None, "wandb"):
        wrong.append(f"wandb_project: is for report_to: wandb, not {settings.report_to}")
    if min(settings.num_steps) < 1:
        wrong.append(f"num_steps: expected 1 or more, got {min(settings.num_steps)}")
    if settings.validation_interval is not None and settings.validation_shards is None:
        wrong.append("validation_interval: there are no validation_shards to validate on")
    return wrong


def _what_is_written(settings: "TrainSettings") -> list[str]:
    formats = settings.output_formats
    twice = [name for name in dict.fromkeys(formats) if formats.count(name) > 1]
    return [f"output_formats: names {', '.join(twice)} more than once; name each once"] if twice else []
