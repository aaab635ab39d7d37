"""Files: atomic writes, JSON, provenance."""
