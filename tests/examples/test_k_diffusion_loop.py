from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from tests.examples.loading import load

from sigmascope.monitor import Recorder


@pytest.fixture(scope="module")
def example() -> ModuleType:
    return load("k_diffusion_loop")


def test_sampling_ends_at_one_of_the_pictures(example: ModuleType) -> None:
    generator = torch.Generator().manual_seed(3)
    pictures = torch.rand(8, 3, 16, 16, generator=generator)
    sigmas = example.karras_sigmas(18)
    noise = torch.randn(4, 3, 16, 16, generator=generator) * sigmas[0]
    made = example.sample_heun(example.IdealDenoiser(pictures), noise, sigmas)
    assert torch.cdist(made.flatten(1), pictures.flatten(1)).min(dim=1).values.max() < 1e-3


def test_the_noise_levels_are_those_of_the_paper(example: ModuleType) -> None:
    # sigma_i = (80^(1/7) + i/(N-1) * (0.002^(1/7) - 80^(1/7)))^7; its middle of three is 2.5152 to four decimals
    sigmas = example.karras_sigmas(3, largest=80.0, smallest=0.002)
    assert sigmas.tolist() == pytest.approx([80.0, 2.5152, 0.002, 0.0], abs=1e-4)


def test_a_turn_of_the_loop_is_a_step(example: ModuleType) -> None:
    seen: list[dict[str, Any]] = []
    sigmas = example.karras_sigmas(6)
    with Recorder("sampling", sample_hz=None) as recorder:
        example.sample_heun(
            example.IdealDenoiser(torch.rand(2, 1, 4, 4)), torch.randn(1, 1, 4, 4), sigmas, seen.append
        )
    assert len(recorder.run().stage("denoising").steps) == len(seen) == 6


def test_it_prints_and_writes_a_trace(
    example: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    example.main()
    assert "18 ×" in capsys.readouterr().out
    assert (tmp_path / "k_diffusion_loop.trace.json").is_file()
