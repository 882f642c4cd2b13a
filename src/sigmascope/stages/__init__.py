"""What each stage of a workflow did: a baseline before it, an analysis after it, and a summary of that.

Pure: models and tensors in, facts out. A probe that fails gives None with a reason; nothing here changes what
it looks at.
"""
