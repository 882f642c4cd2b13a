from collections.abc import Callable
from math import inf, nan
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from sigmascope.errors import CheckpointError, LoraFormatError, NonFiniteError
from sigmascope.lora import formats
from sigmascope.lora.decompose import factors_full_rank
from sigmascope.lora.factors import LoraFactors
from sigmascope.lora.file import LoraFile
from sigmascope.lora.reader import load_lora
from sigmascope.lora.writer import save_lora

MakeFactors = Callable[..., LoraFactors]

LINEAR = "denoiser.mid_block.attentions.0.proj_in"
CONV = "denoiser.conv_in"


@pytest.fixture
def lora(make_factors: MakeFactors) -> LoraFile:
    return LoraFile({LINEAR: make_factors((6, 5), rank=2), CONV: make_factors((6, 4, 3, 3), rank=3)})


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    """A file as another tool would write it."""
    return {
        f"{LINEAR}.lora_up.weight": torch.randn(6, 2),
        f"{LINEAR}.lora_down.weight": torch.randn(2, 5),
        f"{LINEAR}.alpha": torch.tensor(1.0),
    }


def test_a_lora_comes_back_from_its_file_bit_for_bit(lora: LoraFile, tmp_path: Path) -> None:
    save_lora(tmp_path / "a.safetensors", lora)
    read = load_lora(tmp_path / "a.safetensors")
    assert list(read.modules) == [LINEAR, CONV]
    assert (read.format, read.path, read.unused_keys) == ("native", tmp_path / "a.safetensors", ())
    for name, factors in lora.modules.items():
        assert torch.equal(read.modules[name].up, factors.up)
        assert torch.equal(read.modules[name].down, factors.down)
        assert read.modules[name].weight_shape == factors.weight_shape
        assert read.modules[name].alpha == factors.alpha


def test_keys_and_shapes_are_those_of_native_naming(lora: LoraFile, tmp_path: Path) -> None:
    save_lora(tmp_path / "a.safetensors", lora)
    with safe_open(tmp_path / "a.safetensors", "pt") as file:
        shapes = {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118 - no mapping
    assert shapes == {
        f"{LINEAR}.lora_up.weight": (6, 2),
        f"{LINEAR}.lora_down.weight": (2, 5),
        f"{LINEAR}.alpha": (),
        f"{CONV}.lora_up.weight": (6, 3, 1, 1),
        f"{CONV}.lora_down.weight": (3, 4, 3, 3),
        f"{CONV}.alpha": (),
    }


def test_the_header_says_what_other_tools_look_for(lora: LoraFile, tmp_path: Path) -> None:
    save_lora(tmp_path / "relight.safetensors", lora, {"modelspec.author": "me"})
    header = load_lora(tmp_path / "relight.safetensors").metadata
    expected = {
        "lbm_native_naming": "true",
        "ss_network_module": "networks.lora",
        "ss_network_dim": "2",
        "ss_network_alpha": "2",
        "ss_network_args": '{"conv_dim": "3", "conv_alpha": "3"}',
        "ss_base_model_version": "lbm",
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": "lbm/lora",
        "modelspec.title": "relight",
        "modelspec.author": "me",
    }
    assert expected.items() <= header.items()


def test_the_headers_own_strings_survive_but_not_a_stale_rank(lora: LoraFile, tmp_path: Path) -> None:
    old = LoraFile(lora.modules, metadata={"ss_network_dim": "64", "modelspec.title": "kept"})
    save_lora(tmp_path / "a.safetensors", old)
    header = load_lora(tmp_path / "a.safetensors").metadata
    assert (header["ss_network_dim"], header["modelspec.title"]) == ("2", "kept")


def test_alpha_is_always_the_rank_and_the_change_the_same(make_factors: MakeFactors, tmp_path: Path) -> None:
    scaled = make_factors((6, 5), rank=2, alpha=0.5)
    save_lora(tmp_path / "a.safetensors", LoraFile({LINEAR: scaled}))
    read = load_lora(tmp_path / "a.safetensors").modules[LINEAR]
    assert read.alpha == read.rank == 2
    torch.testing.assert_close(read.delta(), scaled.delta())


def test_a_missing_alpha_means_scale_one(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    del tensors[f"{LINEAR}.alpha"]
    save_file(tensors, tmp_path / "a.safetensors")
    assert load_lora(tmp_path / "a.safetensors").modules[LINEAR].scale == 1.0


def test_a_foreign_alpha_is_read(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    save_file(tensors, tmp_path / "a.safetensors")
    read = load_lora(tmp_path / "a.safetensors").modules[LINEAR]
    expected = 0.5 * tensors[f"{LINEAR}.lora_up.weight"] @ tensors[f"{LINEAR}.lora_down.weight"]
    torch.testing.assert_close(read.delta(), expected)


def test_a_rank_9999_file_written_elsewhere_is_the_whole_change(tmp_path: Path) -> None:
    change = torch.randn(6, 4)
    u, sigma, vh = torch.linalg.svd(change, full_matrices=False)
    file = {"lora_up.weight": u * sigma, "lora_down.weight": vh, "alpha": torch.tensor(9999.0)}
    save_file(
        {f"{LINEAR}.{key}": value.bfloat16().contiguous() for key, value in file.items()},
        tmp_path / "a.safetensors",
    )
    read = load_lora(tmp_path / "a.safetensors").modules[LINEAR]
    assert float((read.delta() - change).norm() / change.norm()) < 0.005


def test_keys_that_are_not_understood_are_listed(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    extra = {"denoiser.conv_in.weight": torch.ones(3), "denoiser.conv_out.alpha": torch.tensor(4.0)}
    save_file({**tensors, **extra}, tmp_path / "a.safetensors")
    assert set(load_lora(tmp_path / "a.safetensors").unused_keys) == set(extra)


@pytest.mark.parametrize(("lost", "said"), [("up", "no lora_up.weight"), ("down", "no lora_down.weight")])
def test_a_factor_without_its_partner_is_refused_by_name(
    tensors: dict[str, Tensor], tmp_path: Path, lost: str, said: str
) -> None:
    del tensors[f"{LINEAR}.lora_{lost}.weight"]
    save_file(tensors, tmp_path / "half.safetensors")
    with pytest.raises(LoraFormatError, match=rf"half\.safetensors: {LINEAR} has .* but {said}"):
        load_lora(tmp_path / "half.safetensors")


@pytest.mark.parametrize(
    ("up", "down"),
    [((6, 2), (3, 5)), ((6, 2, 3, 3), (2, 5, 3, 3)), ((6, 2, 1, 1), (2, 5)), ((6,), (2, 5)), ((6, 2), (5,))],
)
def test_factors_that_do_not_fit_together_are_refused_by_name(
    tensors: dict[str, Tensor], tmp_path: Path, up: tuple[int, ...], down: tuple[int, ...]
) -> None:
    tensors[f"{LINEAR}.lora_up.weight"] = torch.zeros(up)
    tensors[f"{LINEAR}.lora_down.weight"] = torch.zeros(down)
    save_file(tensors, tmp_path / "odd.safetensors")
    with pytest.raises(LoraFormatError, match=rf"odd\.safetensors: {LINEAR}: .*up.*{up[0]}.*down"):
        load_lora(tmp_path / "odd.safetensors")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("bm.weight", "GLoRA"),
        ("lora_E", "AdaLoRA"),
        ("reshape_weight", "another size"),
    ],
)
def test_kinds_that_are_not_read_are_refused_by_key(
    tensors: dict[str, Tensor], tmp_path: Path, key: str, kind: str
) -> None:
    save_file({**tensors, f"{LINEAR}.{key}": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(LoraFormatError, match=rf"{LINEAR}\.{key} holds .*{kind}"):
        load_lora(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("key", "kind"), [("oft_blocks", "oft"), ("boft_R", "boft"), ("a1.weight", "glora"), ("ia3_l", "ia3")]
)
def test_two_kinds_in_one_module_are_refused_by_name(
    tensors: dict[str, Tensor], tmp_path: Path, key: str, kind: str
) -> None:
    save_file({**tensors, f"{LINEAR}.{key}": torch.ones(2, 2)}, tmp_path / "a.safetensors")
    with pytest.raises(LoraFormatError, match=rf"{LINEAR} is lora and {kind} at once"):
        load_lora(tmp_path / "a.safetensors")


@pytest.mark.parametrize("part", ["lora_up.weight", "lora_down.weight"])
def test_a_file_with_nan_is_refused_by_key(tensors: dict[str, Tensor], tmp_path: Path, part: str) -> None:
    tensors[f"{LINEAR}.{part}"][0, 0] = nan
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(NonFiniteError, match=rf"a\.safetensors: {LINEAR}\.{part}"):
        load_lora(tmp_path / "a.safetensors")


def test_an_infinite_alpha_is_refused_by_name(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors[f"{LINEAR}.alpha"] = torch.tensor(inf)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(NonFiniteError, match=rf"{LINEAR}: alpha is inf"):
        load_lora(tmp_path / "a.safetensors")


def test_an_alpha_of_several_values_is_refused_by_name(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors[f"{LINEAR}.alpha"] = torch.ones(2)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LoraFormatError, match=rf"{LINEAR}\.alpha .*\(2,\)"):
        load_lora(tmp_path / "a.safetensors")


def test_a_file_of_another_kind_is_refused_with_its_first_keys(tmp_path: Path) -> None:
    keys = ("denoiser.conv_in.weight", "denoiser.conv_in.bias")
    save_file({key: torch.zeros(2, 2) for key in keys}, tmp_path / "other.safetensors")
    with pytest.raises(LoraFormatError, match=r"other\.safetensors.*First keys: .*conv_in.*native"):
        load_lora(tmp_path / "other.safetensors")


def test_a_truncated_file_is_refused(lora: LoraFile, tmp_path: Path) -> None:
    save_lora(tmp_path / "a.safetensors", lora)
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[: len(whole) - 40])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors"):
        load_lora(tmp_path / "cut.safetensors")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"none\.safetensors"):
        load_lora(tmp_path / "none.safetensors")


def test_a_torch_file_of_tensors_is_read_too(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    torch.save(tensors, tmp_path / "a.pt")
    assert list(load_lora(tmp_path / "a.pt").modules) == [LINEAR]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_factors_are_stored_in_the_asked_dtype(lora: LoraFile, tmp_path: Path, dtype: torch.dtype) -> None:
    save_lora(tmp_path / "a.safetensors", lora, dtype=dtype)
    read = load_lora(tmp_path / "a.safetensors").modules[CONV]
    assert read.up.dtype == read.down.dtype == dtype
    assert torch.equal(read.up, lora.modules[CONV].up.to(dtype))


def test_values_beyond_float16_are_refused_and_the_old_file_stays(lora: LoraFile, tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    save_lora(path, lora)
    before = path.read_bytes()
    huge = LoraFactors(torch.full((6, 1), 1e6), torch.ones(1, 5), 1.0, (6, 5))
    with pytest.raises(NonFiniteError, match=rf"{LINEAR}.*float16"):
        save_lora(path, LoraFile({LINEAR: huge}), dtype=torch.float16)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_lora_of_nothing_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(LoraFormatError, match="without modules"):
        save_lora(tmp_path / "a.safetensors", LoraFile({}))
    assert list(tmp_path.iterdir()) == []


def test_the_same_lora_gives_the_same_bytes(lora: LoraFile, tmp_path: Path) -> None:
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        save_lora(tmp_path / folder / "a.safetensors", lora)
    assert (tmp_path / "one/a.safetensors").read_bytes() == (tmp_path / "two/a.safetensors").read_bytes()


def test_a_transposed_factor_is_written_right(tmp_path: Path) -> None:
    up, down = torch.randn(2, 6).T, torch.randn(5, 2).T
    save_lora(tmp_path / "a.safetensors", LoraFile({LINEAR: LoraFactors(up, down, 2.0, (6, 5))}))
    assert torch.equal(load_lora(tmp_path / "a.safetensors").modules[LINEAR].up, up)


@settings(deadline=None, max_examples=25)
@given(
    out=st.integers(1, 6),
    inner=st.integers(1, 6),
    kernel=st.sampled_from([(), (1, 1), (3, 3), (1, 5)]),
    seed=st.integers(0, 1000),
)
def test_a_full_rank_change_of_any_shape_survives_a_file(
    out: int, inner: int, kernel: tuple[int, ...], seed: int
) -> None:
    change = torch.randn(out, inner, *kernel, generator=torch.Generator().manual_seed(seed))
    stored = formats.NATIVE.keys.tensors("m.layer", factors_full_rank(change))
    up, down = stored["m.layer.lora_up.weight"], stored["m.layer.lora_down.weight"]
    assert up.shape[2:] == tuple(1 for _ in kernel)
    assert down.shape[1:] == change.shape[1:]
    assert torch.equal((up.flatten(1) @ down.flatten(1)).reshape(change.shape), change)


def test_what_a_lora_holds_is_summed_up(lora: LoraFile) -> None:
    assert lora.ranks == {2: 1, 3: 1}
    assert lora.parameters == 2 * (6 + 5) + 3 * (6 + 36)
    assert str(lora) == "a LoRA of 2 modules"


def clamped_file(path: Path, header: dict[str, str], *, alpha: float = 16.0) -> Tensor:
    """An output convolution of 4 channels whose factors are the whole change; gives that change."""
    change = torch.randn(4, 8, 3, 3)
    file = {
        "denoiser.conv_out.lora_up.weight": torch.eye(4).reshape(4, 4, 1, 1),
        "denoiser.conv_out.lora_down.weight": change,
        "denoiser.conv_out.alpha": torch.tensor(alpha),
    }
    save_file(file, path, header)
    return change


@pytest.mark.parametrize(
    "header",
    [
        {"ss_network_dim": "32", "ss_network_args": '{"conv_dim": "16", "conv_alpha": "16"}'},
        {"ss_network_dim": "32", "ss_network_args": '{"conv_dim": 16}'},
        {"ss_network_dim": "16", "ss_network_alpha": "16"},
    ],
)
def test_an_alpha_that_repeats_the_asked_rank_beside_a_whole_change_is_scale_one(
    header: dict[str, str], tmp_path: Path
) -> None:
    change = clamped_file(tmp_path / "a.safetensors", header)
    read = load_lora(tmp_path / "a.safetensors").modules["denoiser.conv_out"]
    assert (read.alpha, read.scale) == (4.0, 1.0)
    assert torch.equal(read.delta(), change)


@pytest.mark.parametrize(
    "header",
    [
        {"ss_network_dim": "4", "ss_network_alpha": "16"},
        {"ss_network_args": '{"conv_dim": "4", "conv_alpha": "16"}'},
        {"ss_network_dim": "Dynamic", "ss_network_args": "no JSON"},
        {"ss_network_args": "[16]"},
        {"ss_network_dim": "32"},
    ],
)
def test_an_alpha_that_was_chosen_keeps_its_scale(header: dict[str, str], tmp_path: Path) -> None:
    change = clamped_file(tmp_path / "a.safetensors", header)
    read = load_lora(tmp_path / "a.safetensors").modules["denoiser.conv_out"]
    torch.testing.assert_close(read.delta(), 4.0 * change)


def test_factors_of_more_than_the_possible_rank_keep_their_scale(tmp_path: Path) -> None:
    file = {
        f"{LINEAR}.lora_up.weight": torch.ones(4, 8),
        f"{LINEAR}.lora_down.weight": torch.ones(8, 6),
        f"{LINEAR}.alpha": torch.tensor(16.0),
    }
    save_file(file, tmp_path / "a.safetensors", {"ss_network_dim": "16"})
    assert load_lora(tmp_path / "a.safetensors").modules[LINEAR].scale == 2.0


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_float8_factors_are_read_without_loss(
    tensors: dict[str, Tensor], tmp_path: Path, dtype: torch.dtype
) -> None:
    stored = {key: value.to(dtype) if value.ndim else value for key, value in tensors.items()}
    save_file(stored, tmp_path / "a.safetensors")
    read = load_lora(tmp_path / "a.safetensors").modules[LINEAR]
    assert torch.equal(read.up, stored[f"{LINEAR}.lora_up.weight"].float())


def test_factors_that_are_no_numbers_are_refused_by_key(tensors: dict[str, Tensor], tmp_path: Path) -> None:
    tensors[f"{LINEAR}.lora_up.weight"] = torch.ones(6, 2, dtype=torch.int8)
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LoraFormatError, match=rf"{LINEAR}\.lora_up\.weight is int8"):
        load_lora(tmp_path / "a.safetensors")
