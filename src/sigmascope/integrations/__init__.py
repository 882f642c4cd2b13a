"""Sigmascope inside other software: diffusers pipelines, whole Python processes, ASGI servers."""
