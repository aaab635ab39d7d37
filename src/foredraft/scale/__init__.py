"""More than one device or machine: capacity plans."""
