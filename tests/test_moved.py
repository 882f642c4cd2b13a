"""Old import paths give what they gave, and say where it is now."""

import subprocess
import sys
import warnings
from importlib import import_module
from pathlib import Path

import pytest
from tests.integrations.programs import ended, environment

from sigmascope.moved import MOVED

SHOWN = (
    ("analysis.compare_report", "compare_work", "analysis.run_comparison"),
    ("analysis.diagnostics.diagnose", "diagnose", "analysis.diagnostics"),
    ("lbm.train", "Listeners", "lbm.training.metrics"),
    ("lbm.train", "train", "lbm.training.train"),
    ("lora.combine", "CombineOptions", "lora.merge"),
    ("lora.formats", "load_lora", "lora.reader"),
    ("lora.formats", "save_lora", "lora.writer"),
    ("lora.merge", "merge_lora", "lora.apply"),
    ("lora.models.layout", "layout_of", "lora.families.layouts"),
    ("lora.ranking.budget", "StorageCost", "lora.budget"),
    ("lora.ranking.rank_rules", "RankRules", "lora.ranks"),
    ("lora.svd", "truncated_svd", "lora.decompose"),
    ("lora.verdict", "judge_lora", "lora.compatibility"),
    ("monitor.profiling", "profile_steps", "monitor.profile"),
    ("pipeline.prediction", "predict_peak", "pipeline.peak_prediction"),
    ("probes.adapters.applied", "AppliedPatch", "probes.applied_patch"),
    ("records.atomic", "atomic_path", "files"),
)
"""What pages of the last release imported: old path, name, and the module that holds it."""
OLD_STARTUP_LINE = (
    'import os, sys; exec("try:\\n'
    " from sigmascope.integrations.autostart.process import start_from_environment as start\\n start()\\n"
    "except Exception as failure:\\n sys.stderr.write(f'Sigmascope: nothing is watched: {failure}\\\\n')"
    "\") if os.environ.get('SIGMASCOPE') == '1' else None\n"
)
"""The file as the last release wrote it."""


@pytest.mark.parametrize(("old", "name", "new"), SHOWN)
def test_an_old_path_gives_the_same_object_and_names_the_new_path(old: str, name: str, new: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"sigmascope.{new}.{name} now"):
        given = getattr(import_module(f"sigmascope.{old}"), name)
    assert given is getattr(import_module(f"sigmascope.{new}"), name)


def test_an_old_path_gives_what_was_renamed() -> None:
    with pytest.warns(DeprecationWarning, match=r"sigmascope.lora.merge.merge_loras now"):
        given = import_module("sigmascope.lora.combine").combine_loras
    assert given is import_module("sigmascope").merge_loras


def test_every_old_path_is_importable_and_every_new_one_exists() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # before a name is asked for, nothing is said
        for old in set(MOVED) - {"lora.formats", "lora.merge", "lora.verdict"}:  # which are still there
            assert import_module(f"sigmascope.{old}").__name__ == f"sigmascope.{old}"
    for home in {home for homes in MOVED.values() for home in homes.split()}:
        assert Path(import_module(f"sigmascope.{home}").__file__ or "").is_file()


@pytest.mark.slow
def test_the_warning_names_the_line_that_imports(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "\nfrom sigmascope.lora.svd import truncated_svd\nfrom sigmascope.lora.formats import load_lora\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    assert [
        line.partition(" Deprecation")[0] for line in done.stderr.splitlines() if "Deprecation" in line
    ] == [
        f"{script}:2:",
        f"{script}:3:",
    ]


def test_a_name_that_was_never_there_is_an_import_error() -> None:
    with pytest.raises(ImportError, match="nonsense"):
        from sigmascope.lora.ranking.rank_rules import nonsense  # type: ignore[import-not-found]  # noqa: F401
    with pytest.raises(ModuleNotFoundError):
        import_module("sigmascope.lora.never_there")


@pytest.mark.slow
def test_a_startup_file_of_the_last_release_watches_and_says_how_to_renew_it(tmp_path: Path) -> None:
    (tmp_path / "sigmascope-watch.pth").write_text(OLD_STARTUP_LINE)
    code = (
        f"import site; site.addsitedir({str(tmp_path)!r})\n"
        "import sigmascope\nwith sigmascope.stage('denoising'):\n    pass\nprint('done')"
    )
    done = ended(
        subprocess.run(
            [sys.executable, "-W", "error::DeprecationWarning:site", "-c", code],
            cwd=tmp_path,
            env=environment(SIGMASCOPE="1"),
            capture_output=True,
            text=True,
            check=False,
        )
    )
    assert (done.code, done.out) == (0, "done\n")
    assert "`sigmascope watch --install` renews it" in done.told
    assert len(list(tmp_path.glob("sigmascope-python-*.json"))) == 1
