"""A `Run` made visible. Every view reads the record and nothing else."""

from sigmascope.reports.console import print_run, render_run

__all__ = ["print_run", "render_run"]
