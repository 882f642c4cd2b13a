"""The kinds of choices that `PipelineOptimizer` makes, each in a module of its own, and how they are undone."""
