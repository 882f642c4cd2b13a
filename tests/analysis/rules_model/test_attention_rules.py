from collections.abc import Callable

import pytest
from tests.analysis.faulty_runs import pipeline
from tests.families import make_pipeline

from sigmascope.probes.models import pipeline_facts
from sigmascope.records.run import AttentionFacts, Finding

Found = Callable[..., dict[str, Finding]]


def test_a_plain_processor_in_a_joint_block_is_an_error(found: Found) -> None:
    from diffusers.models.attention_processor import AttnProcessor2_0

    pipe = make_pipeline("sd3")
    assert "attention.plain_processor_in_joint_blocks" not in found(pipe=pipeline_facts(pipe))
    pipe.transformer.transformer_blocks[0].attn.processor = AttnProcessor2_0()
    finding = found(pipe=pipeline_facts(pipe))["attention.plain_processor_in_joint_blocks"]
    assert finding.severity == "error"
    assert finding.evidence == {"blocks": 1, "processors": "AttnProcessor2_0"}
    with pytest.raises((ValueError, RuntimeError)):  # what the finding foretells
        pipe("a fox", num_inference_steps=1, height=32, width=32, max_sequence_length=32)


def test_the_same_processor_in_a_unet_is_right(found: Found) -> None:
    assert not found(pipe=pipeline_facts(make_pipeline("sd15")), accelerators=())


def test_eager_attention_is_named(found: Found) -> None:
    pipe = make_pipeline("sd15")
    assert "attention.eager" not in found(pipe=pipeline_facts(pipe))
    pipe.enable_attention_slicing(1)
    finding = found(pipe=pipeline_facts(pipe))["attention.eager"]
    assert finding.evidence["processors"] == "SlicedAttnProcessor"


def test_eager_attention_is_counted(found: Found) -> None:
    attention = AttentionFacts({"AttnProcessor": 16, "AttnProcessor2_0": 16})
    assert found(pipe=pipeline(attention=attention))["attention.eager"].evidence["modules"] == 16
