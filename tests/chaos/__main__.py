"""Try to break Sigmascope, and print what was tried, what survived and how the rest failed."""

import argparse
import gc
import json
import os
import secrets
import shutil
import sys
import tempfile
from importlib import import_module
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tests.chaos.tries import Kind, Outcome, try_all

KINDS = ("faults", "kills", "files", "headers", "bombs", "disk", "uptime", "threads")
_EXAMPLES = """examples:
  python -m tests.chaos                             everything, with a new seed; up to 45 minutes on 2 cores
  python -m tests.chaos files bombs --n 0.1         a tenth of two kinds
  python -m tests.chaos kills --seed 7 --case 31    one try again, as it was
  make chaos N=10                                   over night

exit status: 0 everything survived, 1 something failed, 2 the command line makes no sense, 130 Ctrl-C"""


def main() -> int:
    asked = _parser().parse_args()
    if asked.case is not None and len(asked.kinds) != 1:
        _parser().error("--case needs exactly one kind, such as: files --case 12")
    seed = secrets.randbelow(1_000_000) if asked.seed is None else asked.seed
    console = Console(stderr=True)
    console.print(f"seed {seed}, N = {asked.n:g}", highlight=False)
    torch.set_num_threads(1)  # a thread of PyTorch's own would be missing in each child
    os.environ["SIGMASCOPE_KEEP"] = "0"  # nothing is written to the user's store
    outcomes: list[Outcome] = []
    work = Path(tempfile.mkdtemp(prefix="chaos-"))
    try:
        for name in asked.kinds or KINDS:
            kind: Kind = import_module(f"tests.chaos.{name}").KIND
            gc.freeze()  # to go through all that is imported at each collection takes most of a short try
            with console.status(f"{kind.name}: begins") as status:

                def tell(outcome: Outcome, total: int) -> None:
                    failed = f", {len(outcome.failed)} failed" if outcome.failed else ""
                    status.update(f"{outcome.kind}: {outcome.tried} of {total}{failed}")

                outcomes.append(
                    try_all(
                        kind,
                        seed=seed,
                        scale=asked.n,
                        work=work / kind.name,
                        keep=asked.keep / str(seed),
                        jobs=asked.jobs,
                        only=asked.case,
                        progress=tell,
                    )
                )
            _say(console, kind, outcomes[-1])
    except KeyboardInterrupt:
        console.print("stopped; what had ended by then:")
    else:
        work.joinpath("whole").touch()
    finally:
        whole = work.joinpath("whole").exists()
        shutil.rmtree(work, ignore_errors=True)
    if asked.json:
        print(json.dumps({"seed": seed, "n": asked.n, "kinds": [outcome.as_dict() for outcome in outcomes]}))  # noqa: T201
    else:
        Console().print(_table(outcomes))
    if not whole:
        return 130
    return 1 if any(outcome.failed for outcome in outcomes) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []], metavar="KIND", help=" ".join(KINDS))
    parser.add_argument(
        "--seed", type=int, help="decides all that is random in the tries; a new one each time"
    )
    parser.add_argument(
        "--n", type=_positive, default=1.0, help="how much of it: 1 is the whole, 0.05 a twentieth"
    )
    parser.add_argument("--case", type=int, metavar="NUMBER", help="run this one try of one kind")
    parser.add_argument("--jobs", type=int, default=2, help="tries at once; 2")
    parser.add_argument(
        "--keep", type=Path, default=Path("build/chaos"), help="where failed tries are kept; build/chaos"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    return parser


def _positive(text: str) -> float:
    number = float(text)
    if not 0 < number <= 1000:
        raise argparse.ArgumentTypeError(f"{text} is not between 0 and 1000")
    return number


def _say(console: Console, kind: Kind, outcome: Outcome) -> None:
    for number, why in sorted(outcome.failed.items()):
        console.print(f"  {kind.name} {number}: {why}", style="red", highlight=False, markup=False)
    for kept in outcome.kept:
        console.print(f"  kept: {kept}", highlight=False, markup=False)


def _table(outcomes: list[Outcome]) -> Table:
    table = Table("kind", "tried", "survived", "how", "how it failed", "seconds")
    for outcome in outcomes:
        how = "\n".join(f"{count} × {how}" for how, count in outcome.survived.most_common(12))
        failed = "\n".join(f"{number}: {why}" for number, why in sorted(outcome.failed.items())[:12])
        survived = sum(outcome.survived.values())
        table.add_row(outcome.kind, str(outcome.tried), str(survived), how, failed, f"{outcome.seconds:.0f}")
    return table


if __name__ == "__main__":
    sys.exit(main())
