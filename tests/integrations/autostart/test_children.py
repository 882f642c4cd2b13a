"""Children that `multiprocessing` starts under SIGMASCOPE=1: their records are beside their parent's, not in its place."""

import multiprocessing
from pathlib import Path

import pytest
from tests.integrations.programs import plain, write

import sigmascope
from sigmascope.integrations.launch import LINE

pytestmark = pytest.mark.slow

PROGRAM = """
import concurrent.futures, multiprocessing, sys
def work(number):
    import sigmascope
    with sigmascope.stage(f"denoising {number}"), sigmascope.step():
        return 2 * number
if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        print(list(pool.map(work, [3])))
    import sigmascope
    with sigmascope.stage("of the parent"):
        pass
"""


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_a_child_has_a_record_beside_its_parent_s(method: str, tmp_path: Path) -> None:
    write(tmp_path, "site/sitecustomize.py", LINE)  # what Python does with the startup file
    write(tmp_path, "script.py", PROGRAM)
    told = {"SIGMASCOPE": "1", "SIGMASCOPE_QUIET": "1", "SIGMASCOPE_OUTPUT": "run.json"}
    done = plain(["script.py", method], tmp_path, PYTHONPATH=str(tmp_path / "site"), **told)
    assert (done.code, done.out, done.err) == (0, "[6]\n", "")
    (own,) = tmp_path.glob("run-*.json")
    stages = [sigmascope.load_run(path).stages for path in (tmp_path / "run.json", own)]
    assert [[stage.name for stage in each] for each in stages] == [["of the parent"], ["denoising 3"]]
