from sigmascope.checkpoints.safetensors import (
    FileEntry,
    aligned_order,
    encoded_header,
    estimated_header_bytes,
    padded,
)


def test_tensors_of_odd_size_come_last_by_falling_element_size() -> None:
    entries = [
        FileEntry("byte", "U8", (3,)),
        FileEntry("half", "BF16", (3,)),
        FileEntry("whole", "BF16", (4,)),
        FileEntry("float", "F32", (1,)),
        FileEntry("double", "F64", (1,)),
    ]
    assert [entry.name for entry in aligned_order(entries)] == ["whole", "double", "float", "half", "byte"]


def test_offsets_follow_from_the_order() -> None:
    header = encoded_header([FileEntry("a", "F32", (2,)), FileEntry("b", "U8", (3,))], {"k": "v"})
    assert header == (
        b'{"__metadata__":{"k":"v"},"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},'
        b'"b":{"dtype":"U8","shape":[3],"data_offsets":[8,11]}}'
    )


def test_the_estimate_leaves_room_for_large_shapes_at_the_end_of_a_terabyte() -> None:
    names = [f"denoiser.up_blocks.{number}.weight" for number in range(100)]
    entries = [
        FileEntry("x", "U8", (10**12,)),
        *(FileEntry(name, "F8_E4M3FNUZ", (999_999,) * 4) for name in names),
    ]
    small = [FileEntry(name, "F8_E4M3FNUZ", (9999,) * 4) for name in names]
    assert len(encoded_header(small, {})) < estimated_header_bytes(names, {})
    assert len(encoded_header(entries[:1], {})) < estimated_header_bytes(["x"], {})


def test_sizes_are_rounded_up_to_eight() -> None:
    assert [padded(size) for size in (0, 1, 8, 9)] == [0, 8, 8, 16]
