"""Memory at one moment, between two moments, and at its highest: all its types from one place."""

from sigmascope.records.peak import AcceleratorPeak, PeakMemory
from sigmascope.records.snapshot import AcceleratorMemory, MemoryImpact, MemorySnapshot

__all__ = ["AcceleratorMemory", "AcceleratorPeak", "MemoryImpact", "MemorySnapshot", "PeakMemory"]
