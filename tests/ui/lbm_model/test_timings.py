from sigmascope.records.memory import AcceleratorPeak, PeakMemory
from sigmascope.records.run import Run, Stage, Steps
from sigmascope.ui.lbm_model import timings

MIB = 1024**2


def run(*stages: Stage) -> Run:
    return Run(id="r", name="lbm serve", started_at="2026-01-01T00:00:00+00:00", seconds=2.5, stages=stages)


def test_seconds_steps_and_peaks_are_the_record_s() -> None:
    encoding = Stage("latent_encoding", 0.0, 0.5, peak=PeakMemory(rss_bytes=300 * MIB))
    steps = Steps(started=(0.0, 1.0), seconds=(1.0, 0.75))
    denoising = Stage("denoising", 0.5, 1.75, steps=steps, peak=PeakMemory(rss_bytes=500 * MIB))
    told = timings(run(encoding, denoising))
    assert (told["seconds"], told["peak_rss_mib"], told["peak_gpu_mib"]) == (2.5, 500.0, None)
    assert [stage["name"] for stage in told["stages"]] == ["latent_encoding", "denoising"]
    assert told["stages"][1]["steps"] == [1.0, 0.75]
    assert told["stages"][0]["peak_rss_mib"] == 300.0


def test_an_accelerator_s_peak_is_that_of_the_busiest() -> None:
    peak = PeakMemory(
        rss_bytes=None,
        accelerators=(AcceleratorPeak("cuda:0", 10 * MIB), AcceleratorPeak("cuda:1", 70 * MIB)),
    )
    told = timings(run(Stage("denoising", 0.0, 1.0, peak=peak)))
    assert told["peak_gpu_mib"] == 70.0
    assert told["stages"][0]["peak_gpu_mib"] == 70.0
    assert told["stages"][0]["peak_rss_mib"] is None


def test_what_was_not_measured_is_none() -> None:
    told = timings(run(Stage("denoising", 0.0, 1.0)))
    assert (told["peak_rss_mib"], told["stages"][0]["peak_rss_mib"]) == (None, None)
