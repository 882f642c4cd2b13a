"""The usual ways to extract, written anew, and how they are run."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from lora_bench.accuracy import layer_ratios, stored_errors
from lora_bench.children import in_child
from lora_bench.limits import cached_share, read_all
from lora_bench.optimum import ensure_optimum
from lora_bench.pairs import Recipe, ensure_pair, pair_files
from lora_bench.peers import PEERS, Job, peer_rank, reckoned_seconds
from lora_bench.spectra import Spectrum

SHAPES = {
    "denoiser.conv_in.weight": (16, 4, 3, 3),
    "denoiser.a.weight": (48, 40),
    "denoiser.b.weight": (48, 40),
    "denoiser.shortcut.weight": (32, 24, 1, 1),
    "denoiser.conv.weight": (24, 16, 3, 3),
    "denoiser.a.bias": (48,),
}
RANKS = {"denoiser.conv_in": 4, "denoiser.a": 6, "denoiser.b": 6, "denoiser.shortcut": 6, "denoiser.conv": 5}
LARGE = 200_000_000


@pytest.fixture
def job(tmp_path: Path) -> Job:
    ensure_pair(tmp_path, Recipe(Spectrum(exact=3)), SHAPES)
    base, tuned = pair_files(tmp_path)
    return Job(base, tuned, tmp_path / "lora.safetensors", rank=6, conv_rank=5, precision="float")


def ratios(job: Job) -> dict[str, float]:
    folder = job.base.parent
    return layer_ratios(stored_errors(folder, job.save_to), ensure_optimum(folder))


@pytest.mark.parametrize("peer", ["svd_lowrank", "full_svd"])
def test_a_peer_covers_every_layer_at_its_own_rank(job: Job, peer: str) -> None:
    PEERS[peer](job)
    errors = stored_errors(job.base.parent, job.save_to)
    assert {layer: stored.rank for layer, stored in errors.items()} == RANKS


def test_ours_covers_every_layer_and_is_at_the_optimum(job: Job) -> None:
    PEERS["ours"](job)
    measured = ratios(job)
    assert measured.keys() == RANKS.keys()
    assert max(measured.values()) < 1.001


def test_svd_lowrank_finds_a_planted_low_rank(job: Job) -> None:
    """Three singular values above the rounding of bf16 are found; the rounding itself is not its fault."""
    PEERS["svd_lowrank"](job)
    assert max(ratios(job).values()) < 1.1


def test_what_the_full_svd_loses_is_its_clamp(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    PEERS["full_svd"](job)
    clamped = ratios(job)
    monkeypatch.setattr(torch.Tensor, "clamp", lambda tensor, low, high: tensor)
    PEERS["full_svd"](job)
    assert max(ratios(job).values()) < 1.0005  # the difference is formed in bf16, as the tool does
    assert min(clamped.values()) > 1.001


def test_the_clamp_holds_one_value_in_a_hundred(job: Job) -> None:
    PEERS["full_svd"](job)
    lora = load_file(job.save_to)
    up, down = lora["denoiser.a.lora_up.weight"], lora["denoiser.a.lora_down.weight"]
    values = torch.cat([up.flatten(), down.flatten()])
    # The quantile is of the signed values, so about one in a hundred meets it above, others below.
    share = float((values == values.max()).double().mean())
    assert share == pytest.approx(0.01, abs=0.005)
    assert float(values.min()) >= -float(values.max())


@pytest.mark.parametrize(
    ("shape", "rank"),
    [
        ((320, 4, 3, 3), 4),
        ((4, 320, 3, 3), 4),
        ((640, 320, 3, 3), 16),
        ((640, 320, 1, 1), 32),
        ((640, 20), 20),
    ],
)
def test_peers_cap_the_rank_at_the_channels(shape: tuple[int, ...], rank: int) -> None:
    assert peer_rank(shape, 32, 16) == rank


def test_a_sample_decomposes_one_layer_of_each_shape(job: Job) -> None:
    run = PEERS["full_svd"](replace(job, sample=1))
    assert run.reckoned
    assert run.layer_seconds.keys() == {f"{layer}.weight" for layer in RANKS if layer != "denoiser.b"}


def test_without_a_sample_nothing_is_reckoned(job: Job) -> None:
    assert not PEERS["full_svd"](job).reckoned


def test_time_is_reckoned_by_how_often_a_shape_occurs() -> None:
    shapes = {**SHAPES, "denoiser.c.weight": (48, 40)}
    measured = {
        "denoiser.conv_in.weight": 1.0,
        "denoiser.a.weight": 2.0,
        "denoiser.b.weight": 4.0,
        "denoiser.shortcut.weight": 0.5,
        "denoiser.conv.weight": 0.25,
    }
    assert reckoned_seconds(measured, shapes) == 1.0 + 3 * 3.0 + 0.5 + 0.25


@pytest.mark.slow
def test_a_child_gives_its_result_and_its_own_peak_of_memory() -> None:
    held = b"x" * LARGE  # by this process, and no part of the child's peak
    small = in_child(abs, -7)
    large = in_child(eval, f"len(b'x' * {LARGE})")
    assert (small.value, large.value) == (7, LARGE)
    assert large.peak_bytes - small.peak_bytes == pytest.approx(LARGE, rel=0.05)
    assert small.peak_bytes < len(held)


def test_an_exception_in_a_child_comes_over() -> None:
    with pytest.raises(ZeroDivisionError):
        in_child(divmod, 1, 0)


def test_a_file_just_read_is_in_memory(job: Job) -> None:
    read_all([job.base])
    assert cached_share([job.base]) in (1.0, None)
