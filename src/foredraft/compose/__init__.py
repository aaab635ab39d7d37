"""From names to objects: specs, targets, drafters, generators."""
