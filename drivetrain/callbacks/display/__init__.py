"""How progress is measured and shown."""
