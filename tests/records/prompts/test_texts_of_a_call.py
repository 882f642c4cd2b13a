"""Every text of a call is a prompt below "full", but for words that are the pipeline's own; so are names of two letters."""

import html
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.pipeline.bench.pipelines import TinyPipeline
from torch import Tensor

import sigmascope
from sigmascope.records.prompts import prompt_sha256, quoting, redactor, texts_of_call
from sigmascope.records.run import Run
from sigmascope.records.serialization import run_to_json

LYRICS, PHRASE = "Kestrel Vorpal over the marsh", "a Brillig heron"
SECRETS = (*LYRICS.split()[:2], "Brillig", "李明")


class Singer(TinyPipeline):
    """Called as the pipelines for music and for places in pictures are: ACE-Step's and GLIGEN's."""

    def __call__(  # type: ignore[override]
        self, prompt: str = "", lyrics: str = "", gligen_phrases: Any = (), output_type: str = "pt",
        cross_attention_kwargs: Any = None, transcription: str | None = None, eta: float = 0.0,
    ) -> list[Tensor]:  # fmt: skip
        return super().__call__(prompt, num_inference_steps=2)


def sung(prompts: Any = "full", lyrics: str = LYRICS) -> Run:
    singer = Singer()
    with sigmascope.watch(singer, prompts=prompts, sample_hz=None) as watch:
        singer(
            "a song",
            lyrics,
            [PHRASE, "x"],
            cross_attention_kwargs={"gligen": {"phrases": [PHRASE]}},
            transcription="李明",
        )
    recorded: Run = watch.record()
    return recorded


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_no_text_of_a_call_is_in_a_private_record(privacy: Any) -> None:
    kept = run_to_json(sung(privacy))
    assert not [secret for secret in SECRETS if secret in kept or json.dumps(secret)[1:-1] in kept]
    assert (prompt_sha256(LYRICS) in kept) == (privacy == "hash")


@pytest.mark.parametrize("privacy", ["hash", "none"])
def test_no_text_of_a_call_is_in_a_private_report(privacy: Any, tmp_path: Path) -> None:
    runs = [sung(), sung(lyrics=f"{LYRICS} again")]
    for some in (runs[:1], runs):
        sigmascope.write_trace(some, tmp_path / "trace.json", prompts=privacy)
        shown = [sigmascope.to_html(some, prompts=privacy), sigmascope.to_markdown(some, prompts=privacy)]
        told = html.unescape("".join(shown)) + json.dumps(
            json.loads((tmp_path / "trace.json").read_text()), ensure_ascii=False
        )
        assert not [secret for secret in SECRETS if secret in told]


def test_a_report_of_an_earlier_record_is_as_private() -> None:
    """Which kept the texts among the recipe's arguments."""
    (stage,) = sung("hash").stages
    arguments = {
        "lyrics": LYRICS,
        "transcription": "李明",
        "output_type": "pt",
        "image": "6×4 RGB 0123456789abcdef",
    }
    earlier = replace(
        stage, facts={**stage.facts, "recipe": {**stage.facts["recipe"], "arguments": arguments}}
    )
    run = replace(sung("hash"), stages=(earlier,))
    told = html.unescape(sigmascope.to_html(run))
    assert not [secret for secret in SECRETS if secret in told]
    assert "6×4 RGB 0123456789abcdef" in told


def test_a_full_record_names_each_text_and_the_comparison_tells_them_apart() -> None:
    before, now = sung(), sung(lyrics="other words")
    prompts = before.stage("generation").facts["prompts"]
    assert {name: prompt["text"] for name, prompt in prompts.items()} == {
        "prompt": "a song", "lyrics": LYRICS, "gligen_phrases.0": PHRASE, "gligen_phrases.1": "x",
        "cross_attention_kwargs.0.0.0": PHRASE, "transcription": "李明",
    }  # fmt: skip
    assert before.stage("generation").facts["recipe"]["arguments"] == {"output_type": "pt", "eta": 0.0}
    assert "other words" in sigmascope.to_markdown([before, now], prompts="full")


def test_an_option_s_name_hides_no_text() -> None:
    assert texts_of_call({"output_type": "pil", "mode": "Kestrel over a marsh"}) == {
        "mode": "Kestrel over a marsh"
    }


@pytest.mark.parametrize(
    ("prompt", "note"),
    [("photo of 李明", "portrait of 李明"), ("李明的肖像", "明"), ("ภาพแมว", "แมว"), ("ねこの写真", "写真"), ("김수 초상", "김수"),
     ("KESTREL", "ｋｅｓｔｒｅｌ"), ("李明", "\\u674e\\u660e"), ("Größe", "GRÖSSE")],
)  # fmt: skip
def test_a_note_that_quotes_a_name_of_two_letters_is_not_kept(prompt: str, note: str, tmp_path: Path) -> None:
    assert quoting(prompt, "none")(note)
    path = tmp_path / "dump.safetensors"
    sigmascope.save_tensors(path, {"a": torch.ones(1)}, prompt=prompt, prompt_privacy="none", note=note)
    assert note not in str(sigmascope.load_tensors(path).metadata)


def test_a_note_without_a_word_of_the_prompt_is_kept(tmp_path: Path) -> None:
    assert not quoting("photo of 李明", "none")("step of 20, 猫")
    path = tmp_path / "dump.safetensors"
    sigmascope.save_tensors(
        path, {"a": torch.ones(1)}, prompt="photo of 李明", prompt_privacy="none", note="step 20"
    )
    assert "step 20" in str(sigmascope.load_tensors(path).metadata)


def test_a_short_prompt_without_spaces_is_found_inside_a_sentence() -> None:
    assert redactor("李明", "none")("李明的照片") == "<prompt>的照片"
