"""The order of runs: by when they were kept, and no longer by what a clock said when they began."""

from datetime import datetime, timedelta

import sqlalchemy as sql
from alembic import op

revision = "2"
down_revision = "1"

_SOON_SECONDS = 3600.0


def upgrade() -> None:
    """Give each run its place among the others."""
    op.add_column("runs", sql.Column("placed_at", sql.Text, nullable=False, server_default=""))
    runs = sql.table("runs", *map(sql.column, ("number", "started_at", "kept_at", "seconds", "placed_at")))
    connection = op.get_bind()
    known = connection.execute(
        sql.select(runs.c.number, runs.c.started_at, runs.c.kept_at, runs.c.seconds).order_by(runs.c.number)
    ).all()
    placed, newest = list[dict[str, object]](), ""
    for number, started_at, kept_at, seconds in known:
        ended_at = _later(started_at, seconds)
        if _later(ended_at, _SOON_SECONDS) < kept_at:  # it came from another store, or from a file
            place = ended_at
        else:
            place = newest = max(newest, kept_at)
        placed.append({"of": number, "place": place})
    if placed:
        moved = sql.update(runs).where(runs.c.number == sql.bindparam("of"))
        connection.execute(moved.values(placed_at=sql.bindparam("place")), placed)
    filtered = ["started_at", "pipeline", "model", "outcome", "source", "recipe"]
    op.drop_index("runs_by_time", "runs")
    op.drop_index("runs_by_pipeline", "runs")
    op.create_index("runs_by_place", "runs", ["placed_at", "number", *filtered])
    op.create_index("runs_by_pipeline", "runs", ["pipeline", "placed_at"])


def _later(moment: str, seconds: float) -> str:
    try:
        later = datetime.fromisoformat(moment) + timedelta(seconds=seconds)
        return later.isoformat(timespec="microseconds")
    except OverflowError:  # beyond the last year
        return moment
