"""Beyond one device and one request: capacity plans, offline batches."""
