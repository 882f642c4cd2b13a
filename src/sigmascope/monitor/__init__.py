"""The live side: recorders, the stages and steps they watch, and what is current in this context."""

from sigmascope.monitor.context import current_recorder, stage, step
from sigmascope.monitor.recorder import Recorder

__all__ = ["Recorder", "current_recorder", "stage", "step"]
