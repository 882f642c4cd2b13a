"""What does not fit between two checkpoints, in words, with every name."""

from collections.abc import Sequence

from sigmascope.checkpoints import Checkpoint
from sigmascope.checkpoints.checkpoint import LEFT_OUT_REASON
from sigmascope.records.finding import Finding

_NAMED = 3


def counted(number: int, noun: str) -> str:
    """`1 tensor`, `2 tensors`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def named(keys: Sequence[str]) -> str:
    """The first few names, and how many more there are."""
    more = f" and {len(keys) - _NAMED} more" if len(keys) > _NAMED else ""
    return ", ".join(keys[:_NAMED]) + more


def missing_keys(lacking: Checkpoint, having: Checkpoint, keys: Sequence[str]) -> Finding:
    """Keys of one side that the other lacks, left out."""
    return Finding(
        id="lora.missing_keys",
        severity="warning",
        message=f"{lacking.path} lacks {counted(len(keys), 'tensor')} that {having.path} has; left out: {named(keys)}.",
        evidence={"tensors": len(keys), "lacking": str(lacking.path), "keys": " ".join(keys)},
        advice="Check that both are complete checkpoints of the same architecture.",
    )


def unread_keys(checkpoint: Checkpoint) -> list[Finding]:
    """Keys that a file holds and that cannot be compared: types that PyTorch lacks, keys that no index names."""
    keys = [key for key, reason in checkpoint.skipped.items() if reason != LEFT_OUT_REASON]
    if not keys:
        return []
    return [
        Finding(
            id="lora.unread_keys",
            severity="warning",
            message=f"{checkpoint.path} holds {counted(len(keys), 'tensor')} that are not compared: {named(keys)} "
            f"({checkpoint.skipped[keys[0]]}).",
            evidence={"tensors": len(keys), "file": str(checkpoint.path), "keys": " ".join(keys)},
            advice="Convert them to a common type, or repair the index, if they belong to the model.",
        )
    ]


def changed_shapes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str]) -> Finding:
    """Tensors whose shapes differ, left out."""
    first = f"{keys[0]} is {base.info(keys[0]).shape} in the base and {tuned.info(keys[0]).shape} in the tuned model"
    return Finding(
        id="lora.shapes_changed",
        severity="warning",
        message=f"{counted(len(keys), 'tensor')} changed shape ({first}); left out: {named(keys)}.",
        evidence={"tensors": len(keys), "keys": " ".join(keys)},
        advice="A LoRA cannot change a shape: take these tensors from the tuned model.",
    )


def integers(equal: Sequence[str], changed: Sequence[str]) -> list[Finding]:
    """Integer and boolean tensors: equal ones, and those that differ and are left out."""
    findings = []
    if equal:
        findings.append(
            Finding(
                id="lora.integer_tensors",
                severity="info",
                message=f"{counted(len(equal), 'integer tensor')} equal in both: {named(equal)}.",
                evidence={"tensors": len(equal), "keys": " ".join(equal)},
            )
        )
    if changed:
        findings.append(
            Finding(
                id="lora.integer_tensors_changed",
                severity="warning",
                message=f"{counted(len(changed), 'integer tensor')} changed; left out: {named(changed)}.",
                evidence={"tensors": len(changed), "keys": " ".join(changed)},
                advice="A LoRA holds no integers: take these tensors from the tuned model.",
            )
        )
    return findings


def mixed_dtypes(base: Checkpoint, tuned: Checkpoint, keys: Sequence[str], *, skipped: bool) -> Finding:
    """Tensors that the two store in different dtypes."""
    first = keys[0]
    dtypes = [str(side.info(first).dtype).removeprefix("torch.") for side in (base, tuned)]
    effect = f"left out: {named(keys)}" if skipped else "the change holds the rounding of the narrower one"
    return Finding(
        id="lora.mixed_dtypes",
        severity="warning",
        message=f"The models store {counted(len(keys), 'tensor')} in different dtypes ({first}: {dtypes[0]} in "
        f"the base, {dtypes[1]} in the tuned model): {effect}.",
        evidence={
            "tensors": len(keys),
            "key": first,
            "base_dtype": dtypes[0],
            "tuned_dtype": dtypes[1],
            "keys": " ".join(keys),
        },
        advice="Extract from two checkpoints of one dtype when you have them.",
    )


def dequantised(side: Checkpoint, role: str, keys: Sequence[str]) -> Finding:
    """Tensors that were quantised in the file and are compared as the numbers that they stand for."""
    how = ", ".join(dict.fromkeys(side.dequantised[key] for key in keys))
    return Finding(
        id="lora.dequantised",
        severity="warning",
        message=f"{counted(len(keys), 'tensor')} of the {role} {'is' if len(keys) == 1 else 'are'} quantised "
        f"({how}) and dequantised here, so the change holds the quantisation's rounding.",
        evidence={"tensors": len(keys), "side": role, "how": how, "keys": " ".join(keys)},
        advice="Use the checkpoint that it was quantised from when you have it.",
    )
