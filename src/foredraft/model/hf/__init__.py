"""Models of transformers behind the ``TargetModel`` forward, and what only they have."""
