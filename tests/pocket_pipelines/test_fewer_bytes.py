"""Over a whole sampling with guidance, statistics and a fit give nearer pictures than a fixed rank of the same bytes."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch
from PIL import Image
from tests.pocket_pipelines import KINDS, load_pocket, prompts, save_pocket

from sigmascope.checkpoints import open_checkpoint
from sigmascope.lbm.images import psnr
from sigmascope.lora.apply import attach_lora
from sigmascope.lora.budget import Budget
from sigmascope.lora.extract import ExtractOptions, extract_lora
from sigmascope.lora.fingerprint import denoiser_fingerprint
from sigmascope.lora.fit import FitOptions
from sigmascope.lora.reader import load_lora
from sigmascope.pipeline.pipeline_statistics import fit_saved_pipeline_lora, pipeline_statistics

pytestmark = pytest.mark.slow
CALL: dict[str, Any] = {"num_inference_steps": 20, "guidance_scale": 3.0}
CALIBRATION, SCORED = 16, 8


class FineTune:
    """A pocket pipeline's base and tuned, statistics of the tuned, and its pictures of prompts that these never saw."""

    def __init__(self, kind: str, folder: Path) -> None:
        self.kind, self.folder = kind, folder
        self.base, self.tuned = (save_pocket(kind, look, folder / look) for look in ("base", "tuned"))
        self.statistics = folder / "statistics.safetensors"
        self.pipeline = load_pocket(kind, "base")
        tuned = load_pocket(kind, "tuned")
        self.truth = painted(tuned)
        with open_checkpoint(self.tuned) as checkpoint:
            fingerprint = denoiser_fingerprint(checkpoint)
        texts = prompts(held_out=False)[:CALIBRATION]
        pipeline_statistics(tuned, texts, call=CALL, seed=1, fingerprint=fingerprint).save(self.statistics)

    def extract(self, options: ExtractOptions) -> Path:
        target = self.folder / "lora.safetensors"
        extract_lora(self.base, self.tuned, target, options)
        return target

    def score(self, lora: Path) -> tuple[int, float]:
        """The bytes of a LoRA, and the mean PSNR of its pictures in dB."""
        with attach_lora(getattr(self.pipeline, KINDS[self.kind]), load_lora(lora)):
            made = painted(self.pipeline)
        scores = [psnr(picture, truth) for picture, truth in zip(made, self.truth, strict=True)]
        return lora.stat().st_size, mean(scores)


def painted(pipeline: Any) -> list[Image.Image]:
    texts = prompts(held_out=True)[:SCORED]
    generators = [torch.Generator().manual_seed(number) for number in range(len(texts))]
    made: list[Image.Image] = pipeline(list(texts), generator=generators, **CALL).images
    return made


@pytest.fixture(scope="module", params=list(KINDS))
def fine_tune(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> FineTune:
    return FineTune(str(request.param), tmp_path_factory.mktemp("fine-tune"))


@pytest.mark.parametrize("rank", [2, 8])
def test_statistics_give_nearer_pictures_than_a_fixed_rank_of_the_same_bytes(
    fine_tune: FineTune, rank: int
) -> None:
    size, fixed = fine_tune.score(fine_tune.extract(ExtractOptions(rank=rank, conv_rank=rank)))
    options = ExtractOptions(budget=Budget(max_bytes=size), statistics=fine_tune.statistics)
    size_by_statistics, by_statistics = fine_tune.score(fine_tune.extract(options))
    assert size_by_statistics <= size
    assert by_statistics > fixed


def test_a_fit_on_random_words_alone_gives_pictures_2_db_nearer_than_a_fixed_rank(
    fine_tune: FineTune,
) -> None:
    size, fixed = fine_tune.score(fine_tune.extract(ExtractOptions(rank=4, conv_rank=4)))
    # What a fit writes into the header takes bytes of the same budget.
    lora = fine_tune.extract(ExtractOptions(budget=Budget(max_bytes=size - 512)))
    target = fine_tune.folder / "fitted.safetensors"
    fitted = fit_saved_pipeline_lora(
        fine_tune.base,
        fine_tune.tuned,
        lora,
        target,
        CALIBRATION,
        FitOptions(steps=120, gradient_accumulation_steps=1),
        call=CALL,
        batch_size=4,
    )
    assert fitted.is_nearer
    size_of_fitted, by_fit = fine_tune.score(target)
    assert size_of_fitted <= size
    assert by_fit > fixed + 2.0
