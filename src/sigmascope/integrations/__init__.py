"""Frameworks meet Sigmascope here, and only here."""
