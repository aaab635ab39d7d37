"""From a name to a model: files, checks, the engine that runs it, sizes."""
