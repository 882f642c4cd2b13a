"""Results as text of at most 80 columns, and as JSON values."""

from dataclasses import asdict
from statistics import mean
from typing import Any

from lora_bench.accuracy import class_ratios, layer_ratios
from lora_bench.limits import PRODUCTS
from lora_bench.pairs import Shapes, shape_classes
from lora_bench.peers import reckoned_seconds
from lora_bench.run import PairResult, PeerResult

_GB = 1e9


def time_table(result: PairResult) -> str:
    """Wall time, its ratio to ours, memory, and error over optimum of each peer."""
    ours = {peer.name: peer.seconds for peer in result.peers}.get("ours")
    lines = [f"{'':14}{'wall s':>10}{'x ours':>9}{'peak GB':>9}{'layers':>8}{'mean':>10}{'worst':>10}"]
    for peer in result.peers:
        ratio = f"{peer.seconds / ours:9.2f}" if ours else f"{'':9}"
        wall = f"{peer.seconds:.2f}{'*' if peer.reckoned else ' '}"
        lines.append(f"{peer.name:14}{wall:>10}{ratio}{peer.peak_bytes / _GB:9.2f}{_accuracy(peer, result)}")
    for dtype in result.limits.product_seconds:
        seconds = result.limits.lower_limit(dtype)
        ratio = f"{seconds / ours:9.2f}" if ours else ""
        lines.append(f"{f'limit {dtype}':14.14}{seconds:9.2f} {ratio}")
    notes = ["mean, worst: ‖ΔW − BA‖ over the least that the rank allows, in float64"]
    if any(peer.reckoned for peer in result.peers):
        notes.append("* reckoned from a sample of each shape; its errors are of that sample")
    return "\n".join([*lines, *notes])


def _accuracy(peer: PeerResult, result: PairResult) -> str:
    ratios = layer_ratios(peer.errors, result.optimum).values()
    if not ratios:
        return ""
    return f"{len(peer.errors):8}{mean(ratios):10.5f}{max(ratios):10.5f}"


def limit_lines(result: PairResult) -> str:
    """What the limit is made of, and how much of both files was in memory."""
    limits = result.limits
    rate = limits.read_bytes / limits.read_seconds / _GB
    lines = [
        f"read both files once: {limits.read_seconds:.2f} s ({limits.read_bytes / _GB:.2f} GB at {rate:.1f} GB/s)",
        f"form every ΔW in float32: {limits.subtract_seconds:.2f} s",
    ]
    for dtype, seconds in limits.product_seconds.items():
        flops = limits.product_flop / seconds / _GB
        lines.append(
            f"one product of every ΔW in {dtype}: {seconds:.3f} s "
            f"({limits.product_flop / _GB:.1f} GFLOP at {flops:.0f} GFLOP/s)"
        )
    lines.append(f"limit = read + form + {PRODUCTS} products")
    if result.validation_seconds is not None:
        once = limits.read_seconds + limits.subtract_seconds + limits.product_seconds["float32"]
        factor = result.validation_seconds / once
        lines.append(
            f"validate {result.validation_seconds:.2f} s = {factor:.2f} x (read + form + a float32 product)"
        )
    known = [f"{peer.name} {peer.cached:.0%}" for peer in result.peers if peer.cached is not None]
    if known:
        lines.append(f"files in memory before: {'; '.join(known)}")
    lines.append(f"the optimum's own rounding: at most {result.optimum.uncertainty:.0e} of it (energy)")
    return "\n".join(lines)


def class_table(result: PairResult) -> str:
    """Mean and worst error over optimum in each shape, the commonest first."""
    peers = [peer for peer in result.peers if peer.errors]
    counts = {shape: len(names) for shape, names in shape_classes(result.shapes).items()}
    rows = {
        peer.name: {row.shape: row for row in class_ratios(peer.errors, result.optimum)} for peer in peers
    }
    lines = [
        f"{'shape':18}{'layers':>6}" + "".join(f"{name:>18}" for name in rows),
        f"{'':24}" + "".join(f"{'mean':>9}{'worst':>9}" for _ in rows),
    ]
    for shape, count in sorted(counts.items(), key=lambda item: -item[1]):
        cells = ""
        for classes in rows.values():
            row = classes.get(shape)
            known = row is not None and row.mean is not None and row.worst is not None
            cells += f"{row.mean:9.5f}{row.worst:9.5f}" if row and known else f"{'-':>9}{'-':>9}"
        lines.append(f"{'x'.join(map(str, shape)):18}{count:6}{cells}")
    lines.append("-: not run, or the rank holds the whole change and leaves nothing to compare")
    return "\n".join(lines)


def whole_model_line(result: PairResult, whole: Shapes) -> str | None:
    """What decomposing all layers of the whole model would take, from the time of each shape.

    Args:
        result: Of a pair.
        whole: Shapes of the whole model.

    Returns:
        None when the pair has all of its layers, or lacks one of its shapes.
    """
    classes, here = shape_classes(whole), shape_classes(result.shapes)
    total = sum(map(len, classes.values()))
    if sum(map(len, here.values())) >= total or not classes.keys() <= here.keys():
        return None
    parts = []
    for peer in result.peers:
        seconds = peer.runs[-1].value.layer_seconds
        if not seconds:
            continue
        by_class = {names[0]: _mean_of(here[shape], seconds) for shape, names in classes.items()}
        parts.append(f"{peer.name} {reckoned_seconds(by_class, whole):.0f} s")
    return (
        f"all {total} layers of the whole model, decompositions only: {', '.join(parts)}" if parts else None
    )


def _mean_of(names: list[str], seconds: dict[str, float]) -> float:
    return mean(seconds[name] for name in names if name in seconds)


def as_json(result: PairResult) -> dict[str, Any]:
    """Everything but the single layers of the optimum."""
    peers = [
        {
            "name": peer.name,
            "seconds": peer.seconds,
            "runs": [run.value.seconds for run in peer.runs],
            "reckoned": peer.reckoned,
            "peak_bytes": peer.peak_bytes,
            "cached": peer.cached,
            "ratios": layer_ratios(peer.errors, result.optimum),
            "classes": [asdict(row) for row in class_ratios(peer.errors, result.optimum)],
        }
        for peer in result.peers
    ]
    limits = asdict(result.limits) | {"products": PRODUCTS}
    limits["lower_limit_seconds"] = {
        dtype: result.limits.lower_limit(dtype) for dtype in result.limits.product_seconds
    }
    return {
        "pair": result.name,
        "layers": sum(map(len, shape_classes(result.shapes).values())),
        "peers": peers,
        "limits": limits,
        "validation_seconds": result.validation_seconds,
        "optimum_uncertainty": result.optimum.uncertainty,
    }
