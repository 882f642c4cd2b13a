"""Text encoding, one question a file. `sigmascope.stages.text_encoding` is the public face."""
