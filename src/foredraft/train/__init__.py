"""Training draft heads: one loop for all recipes. Needs the extra ``[train]``."""
