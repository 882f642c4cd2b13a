"""Acting on a pipeline: encoding and decoding that survive running out of memory."""
