"""The model of the page: base and LoRA result of one picture, each made once and kept."""

import gc
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch

from sigmascope.errors import SigmascopeError
from sigmascope.lbm.infer import translate_image
from sigmascope.lbm.serving.models import ServedModel
from sigmascope.lbm.serving.pictures import Picture, as_png
from sigmascope.lbm.serving.recent import Recent
from sigmascope.lbm.serving.timings import timings
from sigmascope.lbm.serving.wishes import Wish, wished_size
from sigmascope.monitor import Recorder
from sigmascope.records.serialization import run_to_json

SAMPLES_PER_SECOND: Final = 10.0
"""How often memory is looked at between the steps."""

Report = Callable[[str, int, int], None]
"""Told (what is made: "base" or "result", steps done, steps in all); may raise to stop the work."""


@dataclass(frozen=True, slots=True)
class Made:
    """A picture that was made, with the record of making it."""

    id: str
    scale: float
    png: bytes
    run_json: str
    timings: dict[str, Any]

    def summary(self, *, kept: bool) -> dict[str, Any]:
        """What the page is told; picture and record are fetched by the id. `kept`: it was made before."""
        return {"id": self.id, "scale": self.scale, "kept": kept, "timings": self.timings}


class Translator:
    """Makes base and result for one request after another. Not for several threads at once.

    At scale 0 a LoRA changes nothing, to the bit, so the base's picture is the one at scale 0.

    Args:
        served: Model and LoRA.
        kept: Where results stay for those who ask again or fetch them.
    """

    def __init__(self, served: ServedModel, kept: Recent[Made]) -> None:
        self._served = served
        self._kept = kept
        self._by_key = Recent[str](limit_bytes=10_000)  # a thousand names of results, each counted as ten

    def translate(self, picture: Picture, wish: Wish, report: Report) -> dict[str, Any]:
        """Make what is asked for, and nothing that is still kept.

        Args:
            picture: The one that the wish names.
            wish: What to make.
            report: Told before the work and after each step.

        Returns:
            `base` and `result` (None without a LoRA), as `Made.summary` gives them, and `dormant_modules`:
            how many of the LoRA's modules never ran.

        Raises:
            SigmascopeError: The request does not fit into memory, or the result holds NaN.
        """
        lora = self._served.lora
        return {
            "base": self._once(picture, wish, 0.0, "base", report),
            "result": None if lora is None else self._once(picture, wish, wish.scale, "result", report),
            "dormant_modules": 0 if lora is None else len(lora.dormant),
        }

    def _once(self, picture: Picture, wish: Wish, scale: float, what: str, report: Report) -> dict[str, Any]:
        key = wish.key(scale)
        made = self._kept.get(self._by_key.get(key) or "")
        if made is not None:
            return made.summary(kept=True)
        report(what, 0, wish.steps)
        try:
            made = self._make(picture, wish, scale, lambda done, total, _: report(what, done, total))
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise _out_of_memory(error) from None  # the traceback would keep the tensors alive
        self._kept.put(made.id, made, len(made.png) + len(made.run_json))
        self._by_key.put(key, made.id, size_bytes=10)
        return made.summary(kept=False)

    def _make(
        self, picture: Picture, wish: Wish, scale: float, progress: Callable[[int, int, str], None]
    ) -> Made:
        served = self._served
        recorder = Recorder(name="lbm serve", sample_hz=SAMPLES_PER_SECOND)
        recorder.fact("base_model", served.base_name)
        with recorder:
            if served.lora is not None:
                with recorder.stage("lora_application") as stage:
                    served.lora.scale = scale
                    stage.fact("lora", served.lora_name)
                    stage.fact("scale", scale)
                    stage.fact("mode", "hot")
                    stage.fact("applied_modules", len(served.lora.applied))
            result = translate_image(
                served.model,
                picture.image,
                num_inference_steps=wish.steps,
                seed=wish.seed,
                size=wished_size(wish),
                resolution=served.resolution if wish.size == "bucket" else None,
                tile_size=served.tile_size,
                progress=progress,
            )
        run = recorder.run()
        return Made(uuid.uuid4().hex, scale, as_png(result), run_to_json(run), timings(run))


def _out_of_memory(error: BaseException) -> SigmascopeError:
    device = "memory" if isinstance(error, MemoryError) else "the accelerator's memory"
    gc.collect()
    if torch.accelerator.is_available():
        torch.accelerator.empty_cache()
    return SigmascopeError(
        f"The request does not fit into {device}.",
        hint="Choose a smaller size, or start the server with --tile_size 512.",
    )
