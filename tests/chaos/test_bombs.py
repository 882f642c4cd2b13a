"""Every bomb of `bombs_made` ends in an error of ours, or in a sound reading, with little memory and soon."""

import sys
from pathlib import Path

import pytest
from tests.chaos.bombs_made import BOMBS, Outcome, measured

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and limits on memory"),
]

MOST_SECONDS = 2  # of the process's own
MOST_BYTES = 320 << 20
MOST_CHARACTERS = 10_000
LAYER = "down_blocks.0.attentions.0.proj_in"
READ = {  # nothing that they declare has to be there: norms come from factors, other figures from headers
    *(
        f"lora_{kind}_{command}"
        for kind in ("tucker", "rank", "plain")
        for command in ("inspect", "resize", "compare")
    ),
    *(f"lora_odd_cores_{command}" for command in ("inspect", "resize", "compare")),
    *(f"lora_{kind}_validate" for kind in ("loha", "cores", "odd_cores", "lokr", "tucker", "rank", "plain")),
    *("lora_loha_inspect", "lora_cores_inspect", "lora_lokr_inspect", "gguf_array", "dump_index"),
}
SAYS = {
    "png_pixels": "60000×60000; SIGMASCOPE_MAX_PIXELS allows",
    "png_warned": "12000×10000; SIGMASCOPE_MAX_PIXELS allows",
    "gif_frames": "SIGMASCOPE_MAX_PIXELS",
    "tiff_tile": "60000×60000; SIGMASCOPE_MAX_PIXELS allows",
    "torch_large_pickle": "'archive/data.pkl' takes 2 GB; the limit for a member that is not a tensor is 64 MB",
    "torch_large_record": "'archive/byteorder' takes 1 GB",
    "torch_many_members": "its list of members takes 57.22 MB",
    "torch_overlapping": "overlap",
    "torch_declared_storage": "the storage '0' declares 4398046511104 bytes",
    "torch_legacy_storage": "the storage '0' declares 274877906944 bytes",
    "torch_expanded": "_rebuild_device_tensor_from_cpu_tensor is called for 8589934",
    "torch_bytearray": "builtins.bytearray is called for 300000000 values",
    "torch_storage_made": "torch.storage.UntypedStorage is called for 17179869184 values",
    "torch_repeated_text": "_codecs.encode is called",
    "torch_wide_key": "a key of its dictionaries is nested",
    "torch_deep_key": "its pickle has more than 600,000 steps",
    "torch_wide_error": "a tuple is called",
    "torch_many_objects": "its pickle has more than 600,000 steps",
    "header_wide": "it has 7,000,000 values",
    "run_giant": "8 GB",
    "yaml_giant": "4 GB",
    "yaml_aliases": "with its aliases expanded it has more than 100,000 values",
    "yaml_merges": "with its aliases expanded it has more than 100,000 values",
    "yaml_integer": "a number has 600,001 digits",
    "lora_loha_resize": LAYER,
    "lora_lokr_resize": LAYER,
    "lora_loha_compare": f"{LAYER}: its tensors declare a weight (131072, 131072)",
    "lora_loha_bake": LAYER,
    "lora_cores_resize": LAYER,
    "lora_cores_compare": LAYER,
    "lora_cores_bake": LAYER,
    "lora_plain_merge": LAYER,
}


def test_every_bomb_is_refused_soon_and_with_little_memory(tmp_path: Path) -> None:
    outcomes = measured(tmp_path)
    assert list(outcomes) == [bomb.kind for bomb in BOMBS]
    assert {kind: outcome for kind, outcome in outcomes.items() if not _is_harmless(outcome)} == {}


def _is_harmless(outcome: Outcome) -> bool:
    is_told = outcome.ours or (outcome.error is None and outcome.kind in READ)
    is_cheap = outcome.seconds < MOST_SECONDS and outcome.peak_bytes < MOST_BYTES
    is_clean = outcome.warned == outcome.left == () and outcome.characters < MOST_CHARACTERS
    return is_told and is_cheap and is_clean and SAYS.get(outcome.kind, "") in outcome.message
