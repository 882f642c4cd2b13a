"""A host of ComfyUI's shape that fails and quotes its prompt leaves no word of it in a private record."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.comfy_shapes.versions import CLIP
from tests.monitor.fragments import FRAGMENTS, QuotingError, host_calling, told

import sigmascope
from sigmascope import WorkflowMonitor
from sigmascope.monitor import Recorder

PRIVACIES = pytest.mark.parametrize("privacy", ["hash", "none"])
COND = torch.ones(1, 77, 8)


class Tokenizer:
    """As ComfyUI's, and it fails."""

    def __init__(self, fragment: str) -> None:
        self.tokenize_with_weights = host_calling(fragment)


def workflow(fragment: str, privacy: Any) -> WorkflowMonitor:
    """A text encoding, a LoRA and a VAE that fail, with all that a host may hand over quoting the fragment."""
    monitor = WorkflowMonitor(prompt_privacy=privacy, sample_hz=None, verbose=False)
    clip: Any = CLIP.__new__(CLIP)
    clip.tokenizer = Tokenizer(fragment)
    baseline = monitor.capture_text_encoding_baseline(None, clip)
    errors = []
    for name in ("text_encoding", "lora_application", "latent_encoding"):
        monitor.start_monitoring(name)
        with pytest.raises(QuotingError) as caught, monitor.recorder.stage("node"):
            host_calling(fragment)()
        monitor.end_monitoring(name, error=caught.value)
        errors.append(caught.value)
    beside = {"note": fragment, "tokens": [5, 6, 7], "strength": 0.5, fragment: 1.0}
    monitor.analyze_text_encoding_results(
        baseline, [[COND, beside]], [[COND, {}]], FRAGMENT_OWNER, None, None, error=errors[0]
    )
    monitor.analyze_lora_application_results(None, None, None, None, error=errors[1])
    monitor.analyze_latent_generation_results(None, None, error=f"the host said {fragment}")
    return monitor


FRAGMENT_OWNER = "Kestrel Vorpal gliding over a marsh"


@pytest.mark.parametrize(
    ("kind", "privacy"), [*((kind, "hash") for kind in FRAGMENTS), (next(iter(FRAGMENTS)), "none")]
)
def test_no_fragment_of_a_prompt_stays(
    kind: str, privacy: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monitor = workflow(FRAGMENTS[kind], privacy)
    monitor.print_comprehensive_summary()
    shown = capsys.readouterr().out + repr(monitor.analyses)
    assert FRAGMENTS[kind] not in told(monitor.run(), tmp_path) + shown


def test_numbers_beside_a_private_prompt_stay() -> None:
    monitor = workflow("Kestrel", "hash")
    metadata = monitor.analyses["text_encoding"]["positive_conditioning"]["metadata"]
    assert metadata["strength"] == 0.5
    assert metadata["note"] == "<text>"
    assert metadata["tokens"] == "<text>"


def test_a_full_record_keeps_all_of_it() -> None:
    analyses = workflow("Kestrel", "full").analyses
    assert "Kestrel" in str(analyses["latent_encoding"]["error"])
    assert analyses["text_encoding"]["positive_conditioning"]["metadata"]["note"] == "Kestrel"


def test_what_is_known_of_an_error_is_kept_without_its_words() -> None:
    words = "CUDA out of memory. Tried to allocate 2.50 GiB for Kestrel. GPU 0 has 512.00 MiB free."
    recorder = Recorder(sample_hz=None, keeps_words=False)
    with pytest.raises(RuntimeError), recorder.stage("denoising"):
        raise RuntimeError(words)
    stage = recorder.run().stage("denoising")
    assert stage.error is not None
    assert stage.error.startswith("RuntimeError: out of memory, 2.5 GB asked for, 512 MB free (")
    assert "Kestrel" not in repr(stage)


def test_a_recorder_inside_of_a_private_one_is_private_too() -> None:
    outer, inner = (Recorder(sample_hz=None, keeps_words=kept) for kept in (False, True))

    def work() -> None:
        with outer.stage("outer") as stage:
            stage.take_in_others()
            with inner.stage("inner"):
                raise ValueError("Kestrel")

    with pytest.raises(ValueError, match="Kestrel"):
        work()
    assert "Kestrel" not in repr([outer.run(), inner.run()])


@PRIVACIES
def test_a_vae_s_error_is_as_private(privacy: Any, tmp_path: Path) -> None:
    class Vae(torch.nn.Module):
        def encode(self, pixels: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room for Kestrel")

        def decode(self, latents: torch.Tensor) -> torch.Tensor:
            raise MemoryError("no room for Kestrel")

    monitor = WorkflowMonitor(prompt_privacy=privacy, sample_hz=None, verbose=False)
    monitor.start_monitoring("latent_decoding")
    with pytest.raises(sigmascope.errors.EveryStrategyFailedError) as caught:
        sigmascope.decode_latents(Vae(), torch.zeros(1, 4, 8, 8), strategies=("direct",))
    monitor.end_monitoring("latent_decoding", error=caught.value)
    monitor.analyze_latent_decoding_results(None, None)
    assert "Kestrel" not in told(monitor.run(), tmp_path)
    assert "out of memory" in told(monitor.run(), tmp_path)
