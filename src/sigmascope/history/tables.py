"""The tables of the store. `docs/history.md` describes them for who asks in SQL.

A column that is added needs a step in `migrations`, and raises `REVISION`.
"""

from typing import Final

from sqlalchemy import (
    BigInteger,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
)

REVISION: Final = "2"
"""Of these tables: the last step in `migrations`."""
METADATA: Final = MetaData()

RUNS: Final = Table(
    "runs",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("id", Text, nullable=False, unique=True),
    Column("name", Text, nullable=False),
    Column("started_at", Text, nullable=False),
    Column("kept_at", Text, nullable=False),
    Column("source", Text, nullable=False),
    Column("outcome", Text, nullable=False),
    Column("seconds", Float, nullable=False),
    Column("generations", Integer, nullable=False),
    Column("generation_seconds", Float),
    Column("pipeline", Text),
    Column("model", Text),
    Column("recipe", Text),
    Column("work", Text),
    Column("device", Text),
    Column("hardware", Text),
    Column("width", Integer),
    Column("height", Integer),
    Column("num_frames", Integer),
    Column("batch_size", Integer),
    Column("steps", Integer),
    Column("peak_bytes", BigInteger),
    Column("version", Text),
    Column("record_bytes", BigInteger, nullable=False),
    Column("placed_at", Text, nullable=False, server_default=""),
    # With what one filters by: a database reads it from here, and looks up only the rows that it gives.
    Index(
        "runs_by_place",
        "placed_at",
        "number",
        "started_at",
        "pipeline",
        "model",
        "outcome",
        "source",
        "recipe",
    ),
    Index("runs_by_pipeline", "pipeline", "placed_at"),
)

RECORDS: Final = Table(
    "records",
    METADATA,
    Column("run", ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("content", LargeBinary, nullable=False),
)

LORAS: Final = Table(
    "loras",
    METADATA,
    Column("run", ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("lora", Text, primary_key=True),
    Index("loras_by_name", "lora"),
)

TAGS: Final = Table(
    "tags",
    METADATA,
    Column("run", ForeignKey("runs.number", ondelete="CASCADE"), primary_key=True, autoincrement=False),
    Column("tag", Text, primary_key=True),
    Index("tags_by_name", "tag"),
)

NOTES: Final = Table(
    "notes",
    METADATA,
    Column("number", Integer, primary_key=True, autoincrement=True),
    Column("run", ForeignKey("runs.number", ondelete="CASCADE"), nullable=False),
    Column("written_at", Text, nullable=False),
    Column("note", Text, nullable=False),
    Index("notes_by_run", "run"),
)
