"""The watch of ComfyUI: every prompt is a record, with no node placed. `session.start` begins it."""
