"""The first tables."""

import sqlalchemy as sql
from alembic import op

revision = "1"
down_revision = None


def upgrade() -> None:
    """Make all of them."""
    op.create_table(
        "runs",
        sql.Column("number", sql.Integer, primary_key=True, autoincrement=True),
        sql.Column("id", sql.Text, nullable=False, unique=True),
        sql.Column("name", sql.Text, nullable=False),
        sql.Column("started_at", sql.Text, nullable=False),
        sql.Column("kept_at", sql.Text, nullable=False),
        sql.Column("source", sql.Text, nullable=False),
        sql.Column("outcome", sql.Text, nullable=False),
        sql.Column("seconds", sql.Float, nullable=False),
        sql.Column("generations", sql.Integer, nullable=False),
        sql.Column("generation_seconds", sql.Float),
        sql.Column("pipeline", sql.Text),
        sql.Column("model", sql.Text),
        sql.Column("recipe", sql.Text),
        sql.Column("work", sql.Text),
        sql.Column("device", sql.Text),
        sql.Column("hardware", sql.Text),
        sql.Column("width", sql.Integer),
        sql.Column("height", sql.Integer),
        sql.Column("num_frames", sql.Integer),
        sql.Column("batch_size", sql.Integer),
        sql.Column("steps", sql.Integer),
        sql.Column("peak_bytes", sql.BigInteger),
        sql.Column("version", sql.Text),
        sql.Column("record_bytes", sql.BigInteger, nullable=False),
    )
    filtered = ["pipeline", "model", "outcome", "source", "recipe"]
    op.create_index("runs_by_time", "runs", ["started_at", "number", *filtered])
    op.create_index("runs_by_pipeline", "runs", ["pipeline", "started_at"])
    _table_of_run("records", sql.Column("content", sql.LargeBinary, nullable=False))
    _table_of_run("loras", sql.Column("lora", sql.Text, primary_key=True))
    op.create_index("loras_by_name", "loras", ["lora"])
    _table_of_run("tags", sql.Column("tag", sql.Text, primary_key=True))
    op.create_index("tags_by_name", "tags", ["tag"])
    op.create_table(
        "notes",
        sql.Column("number", sql.Integer, primary_key=True, autoincrement=True),
        sql.Column("run", sql.Integer, _of_run(), nullable=False),
        sql.Column("written_at", sql.Text, nullable=False),
        sql.Column("note", sql.Text, nullable=False),
    )
    op.create_index("notes_by_run", "notes", ["run"])


def _table_of_run(name: str, column: "sql.Column[object]") -> None:
    run = sql.Column("run", sql.Integer, _of_run(), primary_key=True, autoincrement=False)
    op.create_table(name, run, column)


def _of_run() -> sql.ForeignKey:
    return sql.ForeignKey("runs.number", ondelete="CASCADE")
