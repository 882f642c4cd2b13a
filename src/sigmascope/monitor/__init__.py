"""The live side: recorders, the stages and steps they watch, and what is current in this context."""

from sigmascope.monitor.recorder import Recorder, current_recorder, stage, step

__all__ = ["Recorder", "current_recorder", "stage", "step"]
