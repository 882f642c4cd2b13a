import json
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from sigmascope import TensorDumps, save_tensors
from sigmascope.cli import root

COND = torch.randn(1, 77, 8, generator=torch.Generator().manual_seed(0))


def run(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(sys, "argv", ["sigmascope", "compare-tensors", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as stop:
        root.run()
    return int(stop.value.code or 0)


def with_token_changed(token: int) -> Tensor:
    changed = COND.clone()
    changed[0, token] *= 1.5
    return changed


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    tensors = {
        "a": COND,
        "same": COND,
        "bf16": COND.bfloat16(),
        "token": with_token_changed(12),
        "turned": COND.transpose(1, 2),
    }
    paths = {name: tmp_path / f"{name}.safetensors" for name in tensors}
    for name, tensor in tensors.items():
        save_tensors(paths[name], {"cond": tensor, "[b]mask[/b]": torch.ones(1, 77)})
    return paths


@pytest.mark.parametrize(("other", "code"), [("same", 0), ("bf16", 0), ("token", 1), ("turned", 1)])
def test_the_exit_code_tells_whether_they_agree(
    files: dict[str, Path], other: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(files["a"], files[other], monkeypatch=monkeypatch) == code


def test_another_layout_passes_when_asked(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(files["a"], files["turned"], "--any-layout", monkeypatch=monkeypatch) == 0


def test_the_user_s_tolerance_decides(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(files["a"], files["token"], "--rtol", "0.6", monkeypatch=monkeypatch) == 0
    assert run(files["a"], files["bf16"], "--rtol", "0", monkeypatch=monkeypatch) == 1


def test_names_choose_what_is_compared(files: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(files["a"], files["token"], "--name", "[b]mask[/b]", monkeypatch=monkeypatch) == 0
    assert run(files["a"], files["bf16"], "--name", "cond=cond", monkeypatch=monkeypatch) == 0


def test_the_table_names_the_token_and_fits_80_columns(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(files["a"], files["token"], monkeypatch=monkeypatch)
    out = capsys.readouterr().out
    assert "all of it at token 12" in " ".join(out.split())
    assert "[b]mask[/b]" in out
    assert out.rstrip().endswith("Verdict: different")
    assert max(map(len, out.splitlines())) <= 80


def test_json_is_the_whole_comparison(
    files: dict[str, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run(files["a"], files["token"], "--json", monkeypatch=monkeypatch)
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert report["verdict"] == "different"
    assert report["path_b"] == str(files["token"])
    [cond] = [each for each in report["tensors"] if each["name_a"] == "cond"]
    assert cond["first_token"] == 12
    assert len(cond["errors"]["tokens"]["relative_l2"]) == 77


def test_an_svg_shows_each_token_that_differs(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(files["a"], files["token"], "--picture", tmp_path / "e.svg", monkeypatch=monkeypatch)
    tree = ElementTree.parse(tmp_path / "e.svg")
    tips = [text for title in tree.iter("{http://www.w3.org/2000/svg}title") if (text := title.text)]
    assert [tip.split(":")[0] for tip in tips] == ["token 12"]


def test_a_bar_is_as_tall_as_its_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    a = torch.ones(1, 4, 8)
    b = a * torch.tensor([1.01, 1.02, 1.04, 1.0]).view(1, 4, 1)
    for name, tensor in (("a", a), ("b", b)):
        save_file({"cond": tensor}, tmp_path / f"{name}.safetensors")
    picture = tmp_path / "e.svg"
    run(tmp_path / "a.safetensors", tmp_path / "b.safetensors", "--picture", picture, monkeypatch=monkeypatch)
    tall = [
        float(rect.attrib["height"])
        for rect in ElementTree.parse(picture).iter("{http://www.w3.org/2000/svg}rect")
        if len(rect)
    ]
    assert tall == pytest.approx([tall[0], 2 * tall[0], 4 * tall[0]], abs=0.2)


def test_a_png_is_a_picture_that_pillow_opens(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from PIL import Image

    run(files["a"], files["bf16"], "--picture", tmp_path / "e.png", monkeypatch=monkeypatch)
    with Image.open(tmp_path / "e.png") as picture:
        picture.load()
        assert picture.size[0] == 1920
        assert len(picture.getcolors(1 << 20) or []) > 3


def test_identical_tensors_make_a_picture_too(
    files: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(files["a"], files["same"], "--picture", tmp_path / "e.svg", monkeypatch=monkeypatch) == 0
    assert "No tensor with tokens differs" in (tmp_path / "e.svg").read_text(encoding="utf-8")


def test_folders_are_compared_dump_by_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, cond in (("a", COND), ("b", with_token_changed(3))):
        dumps = TensorDumps(tmp_path / name)
        dumps.save("positive", cond)
        dumps.save("negative", COND)
    TensorDumps(tmp_path / "b").save("extra", COND)
    assert run(tmp_path / "a", tmp_path / "b", monkeypatch=monkeypatch) == 1
    out = capsys.readouterr().out
    assert "positive: tensor" in out
    assert "Dumps only in B: 1" in out


def damaged(path: Path, kind: str) -> None:
    raw = path.read_bytes()
    if kind == "cut":
        path.write_bytes(raw[:-40])
    elif kind == "empty":
        path.write_bytes(b"")
    else:
        length = struct.unpack("<Q", raw[:8])[0]
        path.write_bytes(raw[:8] + b"x" * length + raw[8 + length :])


@pytest.mark.parametrize("kind", ["cut", "empty", "header"])
def test_a_damaged_dump_is_one_clear_error_with_exit_code_2(
    files: dict[str, Path], kind: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    damaged(files["same"], kind)
    assert run(files["a"], files["same"], monkeypatch=monkeypatch) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "same.safetensors" in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["a", "missing"], "does not exist"),
        (["a", "folder"], "is a folder"),
        (["folder", "folder"], "holds no dump"),
        (["a", "same", "--name", "=x"], "lacks a name"),
        (["a", "same", "--name", "nope"], "has no tensor 'nope'"),
        (["a", "same", "--name", "cond", "--name", "cond=x"], "given twice"),
        (["a", "same", "--picture", "e.gif"], "is not SVG or PNG"),
        (["a", "same", "--picture", "a.safetensors/e.svg"], "cannot be reached"),
        (["a", "same", "--token-axis", "7"], "3 axes"),
    ],
)
def test_what_makes_no_sense_is_an_error_with_exit_code_2(
    files: dict[str, Path],
    arguments: list[str],
    said: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    places = {**files, "missing": tmp_path / "missing.safetensors", "folder": tmp_path / "folder"}
    given = [places.get(argument, argument) for argument in arguments]
    assert run(*given, monkeypatch=monkeypatch) == 2
    assert said in " ".join(capsys.readouterr().err.split())


def test_help_has_an_example_and_loads_no_torch() -> None:
    code = (
        "import sys\nsys.argv = ['sigmascope', 'compare-tensors', '--help']\n"
        "from sigmascope.cli import main\n"
        "try:\n    main()\nexcept SystemExit as stop:\n    assert not stop.code\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "sigmascope compare-tensors comfyui.safetensors" in done.stdout
