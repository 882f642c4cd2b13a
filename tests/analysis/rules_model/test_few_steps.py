"""What tells that a model was distilled to few steps."""

import pytest

from sigmascope.analysis.rules_model import few_step_evidence
from sigmascope.records.run import ComponentFacts, JsonScalar, PipelineFacts


def pipeline(class_name: str, source: str | None = None, **config: JsonScalar) -> PipelineFacts:
    part = ComponentFacts(class_name=class_name, role="denoiser", config=config)
    return PipelineFacts(class_name="Pipeline", source=source, components={"transformer": part})


@pytest.mark.parametrize(("facts", "words"), [
    (pipeline("FluxTransformer2DModel", guidance_embeds=False), "guidance_embeds is False"),
    (pipeline("UNet2DConditionModel", time_cond_proj_dim=256), "time_cond_proj_dim"),
    (pipeline("UNet2DConditionModel", _name_or_path="stabilityai/sdxl-Turbo"), '"turbo" in transformer'),
    (pipeline("UNet2DConditionModel", "ByteDance/SDXL-Lightning"), '"lightning" in the pipeline'),
])  # fmt: skip
def test_a_distilled_model_is_known_by(facts: PipelineFacts, words: str) -> None:
    assert words in (few_step_evidence(facts) or "")


@pytest.mark.parametrize("facts", [
    pipeline("FluxTransformer2DModel", "black-forest-labs/FLUX.1-dev", guidance_embeds=True),
    pipeline("UNet2DConditionModel", time_cond_proj_dim=None, _name_or_path=None),
    PipelineFacts(class_name="Pipeline"),
])  # fmt: skip
def test_nothing_says_so_of_others(facts: PipelineFacts) -> None:
    assert few_step_evidence(facts) is None
