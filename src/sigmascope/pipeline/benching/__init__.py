"""The parts of `sigmascope.pipeline.bench`: what is measured, how it is called, and what its stages are."""
