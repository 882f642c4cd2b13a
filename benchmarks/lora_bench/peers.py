"""The usual ways to extract a LoRA, written anew from what the tools of the field do, and ours.

Each takes a base, a tuned model and a target, as the tool does, and is timed from before it opens the files until
the LoRA is written. All of them write native names, so that one measurement serves them all.
"""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file, save_file
from torch import Tensor

from lora_bench.pairs import is_layer, shape_classes

PRECISIONS = {"float": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_CLAMP_QUANTILE = 0.99
_LOWRANK_ITERATIONS = 7


@dataclass(frozen=True)
class Job:
    """What every peer is asked for.

    Attributes:
        base, tuned, save_to: The files.
        rank: Of Linear layers.
        conv_rank: Of convolutions; the peers give it to kernels above 1×1 only, ours to all.
        precision: `float`, `fp16` or `bf16`.
        device: Where to decompose; its start is part of the time.
        sample: Decompose only this many layers of each shape and reckon the others' time from them; 0: all.
    """

    base: Path
    tuned: Path
    save_to: Path
    rank: int = 32
    conv_rank: int = 16
    precision: str = "fp16"
    device: str = "cpu"
    sample: int = 0


@dataclass(frozen=True)
class PeerRun:
    """One extraction.

    Attributes:
        seconds: Of the whole job; reckoned from the sample where there is one.
        layer_seconds: Of each decomposition; empty where the job does not tell.
        reckoned: Whether most of `seconds` is reckoned.
    """

    seconds: float
    layer_seconds: dict[str, float]
    reckoned: bool = False


Factors = tuple[Float[Tensor, "m r"], Float[Tensor, "r n"]]
Decompose = Callable[[Float[Tensor, "m n"], int], Factors]


def full_svd(job: Job) -> PeerRun:
    """The procedure of kohya-ss's `extract_lora_from_models`.

    Both models are loaded whole; the differences of all layers are formed in the models' dtype and kept in
    float32; each is decomposed with all of U and V, cut to the rank, and both factors are clamped to ± the 0.99
    quantile of their values.
    """
    return _extract(job, _full_svd_factors, all_changes_first=True)


def svd_lowrank(job: Job) -> PeerRun:
    """KJNodes' `svd_lowrank` setting: `torch.svd_lowrank` with q = rank and 7 iterations, layer by layer.

    Two things are kinder than the tool: convolutions are flattened, so that they are not lost, and the clamp that
    it has on by default, which costs what it costs in `full_svd`, is left out.
    """
    return _extract(job, _lowrank_factors, all_changes_first=False)


def ours(job: Job) -> PeerRun:
    """`sigmascope lora extract`: it also measures the true error of every layer that it stores."""
    from sigmascope.lora.extract import ExtractOptions, extract_lora

    options = ExtractOptions(
        rank=job.rank,
        conv_rank=job.conv_rank,
        save_precision=job.precision,  # type: ignore[arg-type] # one of PRECISIONS
        device=job.device,
    )
    started = time.perf_counter()
    extract_lora(job.base, job.tuned, job.save_to, options)
    return PeerRun(time.perf_counter() - started, {})


def validation_seconds(base: Path, tuned: Path, lora: Path) -> float:
    """How long `sigmascope lora validate` takes for a LoRA."""
    from sigmascope.lora.validate import validate_lora

    started = time.perf_counter()
    validate_lora(base, tuned, lora)
    return time.perf_counter() - started


PEERS: dict[str, Callable[[Job], PeerRun]] = {"ours": ours, "svd_lowrank": svd_lowrank, "full_svd": full_svd}


def peer_rank(shape: tuple[int, ...], rank: int, conv_rank: int) -> int:
    """The rank that the peers take: never above either channel count, however large the kernel."""
    wanted = conv_rank if math.prod(shape[2:]) > 1 else rank
    return min(wanted, shape[0], shape[1])


def _full_svd_factors(matrix: Float[Tensor, "m n"], rank: int) -> Factors:
    u, sigma, vh = torch.linalg.svd(matrix, full_matrices=True)
    up, down = u[:, :rank] * sigma[:rank], vh[:rank]
    limit = float(torch.cat([up.flatten(), down.flatten()]).quantile(_CLAMP_QUANTILE))
    return up.clamp(-limit, limit), down.clamp(-limit, limit)


def _lowrank_factors(matrix: Float[Tensor, "m n"], rank: int) -> Factors:
    u, sigma, v = torch.svd_lowrank(matrix, q=rank, niter=_LOWRANK_ITERATIONS)
    return u * sigma, v.T


def _extract(job: Job, decompose: Decompose, *, all_changes_first: bool) -> PeerRun:
    torch.manual_seed(0)
    started = time.perf_counter()
    base, tuned = load_file(job.base), load_file(job.tuned)
    shapes = {name: tuple(tensor.shape) for name, tensor in base.items() if is_layer(name, tensor.shape)}
    measured = _sampled(shapes, job.sample)

    def change(name: str) -> Tensor:
        difference: Tensor = tuned[name] - base[name]
        return difference.float().to(job.device)

    held = {name: change(name) for name in shapes} if all_changes_first else {}
    lora: dict[str, Tensor] = {}
    layer_seconds: dict[str, float] = {}
    for name in measured:
        begun = time.perf_counter()
        delta = held[name] if all_changes_first else change(name)
        factors = decompose(delta.flatten(1), peer_rank(shapes[name], job.rank, job.conv_rank))
        lora |= native_tensors(name, shapes[name], factors, PRECISIONS[job.precision])
        layer_seconds[name] = time.perf_counter() - begun
    save_file(lora, job.save_to)
    run = PeerRun(time.perf_counter() - started, layer_seconds)
    if len(measured) == len(shapes):
        return run
    around = run.seconds - sum(layer_seconds.values())
    return replace(run, seconds=around + reckoned_seconds(layer_seconds, shapes), reckoned=True)


def _sampled(shapes: Mapping[str, tuple[int, ...]], count: int) -> list[str]:
    if count == 0:
        return list(shapes)
    return [name for names in shape_classes(shapes).values() for name in names[:count]]


def reckoned_seconds(layer_seconds: Mapping[str, float], shapes: Mapping[str, tuple[int, ...]]) -> float:
    """What all layers would take: of each shape the mean of those measured, times how many there are.

    Args:
        layer_seconds: By key of the weight; at least one of each shape.
        shapes: Of the whole model; tensors that are no layers are passed over.
    """
    total = 0.0
    for names in shape_classes(shapes).values():
        known = [layer_seconds[name] for name in names if name in layer_seconds]
        total += len(names) * sum(known) / len(known)
    return total


def native_tensors(
    name: str, shape: tuple[int, ...], factors: Factors, dtype: torch.dtype
) -> dict[str, Tensor]:
    """A layer's factors under native names, alpha = rank.

    Args:
        name: Key of the weight.
        shape: Of the weight.
        factors: B (out, r) and A (r, in·kh·kw).
        dtype: Of the stored factors.
    """
    up, down = factors
    rank, stem = down.shape[0], name.removesuffix(".weight")
    return {
        f"{stem}.lora_up.weight": up.reshape(shape[0], rank, *(1 for _ in shape[2:]))
        .to("cpu", dtype)
        .contiguous(),
        f"{stem}.lora_down.weight": down.reshape(rank, *shape[1:]).to("cpu", dtype).contiguous(),
        f"{stem}.alpha": torch.tensor(float(rank)),
    }
