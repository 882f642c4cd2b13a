"""Layouts in words."""

_NAMES = {3: ("batch", "tokens", "width"), 2: ("tokens", "width")}
_CLIP_WINDOW = 77


def axis_name(axis: int, dims: int) -> str:
    """What an axis of a conditioning of that many axes usually is, else its number."""
    names = _NAMES.get(dims)
    return names[axis] if names else f"axis {axis}"


def repeat_words(small: str, large: str, times: int, axis: str, *, each: bool) -> str:
    """`A repeated 2 times along the batch to fit B`."""
    how = f"each item of {small}" if each else small
    return f"{how} repeated {times} times along {_the(axis)} to fit {large}"


def range_words(size_a: int, size_b: int, offset: int, axis: int, dims: int) -> str:
    """Which part of the larger tensor's axis the smaller one's is set against."""
    small, large, length, whole = (
        ("A", "B", size_a, size_b) if size_a < size_b else ("B", "A", size_b, size_a)
    )
    name = axis_name(axis, dims)
    if offset == 0:
        where = f"the first {length} of the {whole}"
    elif offset == whole - length:
        where = f"the last {length} of the {whole}"
    else:
        where = f"{offset} to {offset + length - 1} of the {whole}"
    windows = ""
    if name == "tokens" and length % _CLIP_WINDOW == 0 and whole % _CLIP_WINDOW == 0:
        windows = f" ({length // _CLIP_WINDOW} against {whole // _CLIP_WINDOW} windows of {_CLIP_WINDOW})"
    return f"{small} set against {where} in {large}'s {name}{windows}"


def order_words(order: tuple[int, ...]) -> str:
    """How the axes are reordered."""
    moved = [place for place, axis in enumerate(order) if place != axis]
    return f"axes {moved[0]} and {moved[1]} swapped" if len(moved) == 2 else f"axes in the order {order}"


def _the(name: str) -> str:
    return name if name.startswith("axis") else f"the {name}"
