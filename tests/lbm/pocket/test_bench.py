import pytest
import torch

from sigmascope.errors import ConfigError
from sigmascope.lbm.pocket.demo import PocketSubject
from sigmascope.pipeline.bench import BenchOptions, run_benchmark
from sigmascope.records.performance import BenchCase, Made


@pytest.fixture(scope="module")
def subject() -> PocketSubject:
    return PocketSubject.load(dtype=torch.float32, device=torch.device("cpu"))


def test_it_is_measured_at_its_own_size_and_at_others(subject: PocketSubject) -> None:
    results = run_benchmark(subject, [BenchCase(), BenchCase(64, 32, steps=3)], BenchOptions(1, 0))
    assert [result.made for result in results] == [Made(1, 128, 128), Made(1, 64, 32)]
    assert [len(result.runs[0].stage("denoising").steps) for result in results] == [2, 3]


def test_its_stages_are_told_apart(subject: PocketSubject) -> None:
    (result,) = run_benchmark(subject, [BenchCase(64, 64)], BenchOptions(1, 0))
    assert result.summary is not None
    assert list(result.summary.stages) == ["latent_encoding", "denoising", "latent_decoding"]


@pytest.mark.parametrize(
    ("case", "flag"), [(BenchCase(batch=2), "--batch"), (BenchCase(frames=5), "--frames")]
)
def test_what_it_cannot_make_is_refused(subject: PocketSubject, case: BenchCase, flag: str) -> None:
    with pytest.raises(ConfigError, match=flag):
        run_benchmark(subject, [case])
