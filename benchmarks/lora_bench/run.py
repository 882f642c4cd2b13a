"""One pair, all peers: each in a process of its own, on the same files, one after the other."""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

from lora_bench.accuracy import LayerError, stored_errors
from lora_bench.children import Finished, in_child
from lora_bench.limits import Limits, cached_share, drop_from_cache, measure_limits, read_all
from lora_bench.optimum import RANKS, Optimum, ensure_optimum
from lora_bench.pairs import Recipe, Shapes, ensure_pair, pair_files
from lora_bench.peers import PEERS, Job, PeerRun, validation_seconds
from sigmascope.checkpoints import read_header

COLD = "ours, cold"


@dataclass(frozen=True)
class Settings:
    """What is compared, and how often the quick ones run.

    Attributes:
        peers: Names from `PEERS`.
        rank, conv_rank, precision, device: What each is asked for.
        sample: For the full SVD: layers of each shape that are really decomposed; 0: all.
        repeats: Runs of every peer but the full SVD, in turn; the median is shown.
    """

    peers: tuple[str, ...] = tuple(PEERS)
    rank: int = 32
    conv_rank: int = 16
    precision: str = "fp16"
    device: str = "cpu"
    sample: int = 0
    repeats: int = 3


@dataclass
class PeerResult:
    """A peer's runs on one pair.

    Attributes:
        name: Of the peer, or `COLD`.
        cached: Share of both files that was in memory before the latest run; None where the system does not say.
        runs: Each with its time and peak of memory.
        errors: What its LoRA leaves, by layer; empty when it was only timed.
    """

    name: str
    cached: float | None = None
    runs: list[Finished[PeerRun]] = field(default_factory=list)
    errors: dict[str, LayerError] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Median over the runs."""
        return median(run.value.seconds for run in self.runs)

    @property
    def peak_bytes(self) -> int:
        """The highest over the runs."""
        return max(run.peak_bytes for run in self.runs)

    @property
    def reckoned(self) -> bool:
        """Whether the time is reckoned from a sample of the layers."""
        return any(run.value.reckoned for run in self.runs)


@dataclass(frozen=True)
class PairResult:
    """Everything that was measured on one pair.

    Attributes:
        name: Of the spectrum, or the folder.
        shapes: Of all its tensors, by key.
        peers: In the order asked for; ours with nothing in the system's cache follows last.
        optimum: Of each layer.
        limits: What the machine allows.
        validation_seconds: Time to validate our LoRA; None without one.
    """

    name: str
    shapes: Shapes
    peers: tuple[PeerResult, ...]
    optimum: Optimum
    limits: Limits
    validation_seconds: float | None


def say(text: str) -> None:
    """Tell what is going on, beside the results."""
    print(text, file=sys.stderr, flush=True)


def make_pair(folder: Path, recipe: Recipe) -> None:
    """Make a pair where it is missing, in a process of its own."""
    say(f"{folder}: pair made where it is missing")
    in_child(ensure_pair, folder, recipe)


def run_pair(name: str, folder: Path, settings: Settings) -> PairResult:
    """Compare all peers on the pair in a folder."""
    files = pair_files(folder)
    shapes = {key: entry.shape for key, entry in read_header(files[0]).tensors.items()}
    with TemporaryDirectory(prefix="lora-extraction-") as scratch:
        job = Job(
            *files, Path(scratch), settings.rank, settings.conv_rank, settings.precision, settings.device
        )
        results = _time_peers(job, settings)
        validation = None
        if "ours" in settings.peers:
            results.append(_time_cold(job))
            read_all(files)
            validation = in_child(validation_seconds, *files, _target(job, "ours")).value
        say("limits of the machine")
        limits = in_child(measure_limits, files, shapes, job.rank, job.conv_rank, job.device).value
        say("optimum in float64: minutes at full size, kept beside the pair")
        optimum = in_child(ensure_optimum, folder, max(RANKS, settings.rank, settings.conv_rank)).value
        for result in results:
            if result.name in PEERS:
                result.errors = in_child(stored_errors, folder, _target(job, result.name)).value
    return PairResult(name, shapes, tuple(results), optimum, limits, validation)


def _time_peers(job: Job, settings: Settings) -> list[PeerResult]:
    """Run the quick ones in turn, so that all see the same machine; the slow one once, at the end."""
    results = {name: PeerResult(name) for name in settings.peers}
    for turn in range(settings.repeats):
        for name in sorted(settings.peers, key="full_svd".__eq__):
            if name != "full_svd":
                _add_run(results[name], name, job)
            elif turn == settings.repeats - 1:
                _add_run(results[name], name, replace(job, sample=settings.sample))
    return list(results.values())


def _time_cold(job: Job) -> PeerResult:
    result = PeerResult(COLD)
    drop_from_cache((job.base, job.tuned))
    _add_run(result, "ours", job, warm=False)
    return result


def _add_run(result: PeerResult, peer: str, job: Job, *, warm: bool = True) -> None:
    files = (job.base, job.tuned)
    if warm:
        read_all(files)
    result.cached = cached_share(files)
    target = _target(job, result.name)
    for old in target.parent.glob(f"{target.stem}*"):
        old.unlink()
    result.runs.append(in_child(PEERS[peer], replace(job, save_to=target)))
    say(f"{result.name}: {result.runs[-1].value.seconds:.2f} s")


def _target(job: Job, name: str) -> Path:
    """Where a peer's LoRA goes; until a peer runs, `save_to` is the folder for all of them."""
    return job.save_to / f"{name.replace(', ', '-')}.safetensors"
