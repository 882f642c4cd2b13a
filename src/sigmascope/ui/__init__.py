"""ui: what lies here, and what it offers."""
