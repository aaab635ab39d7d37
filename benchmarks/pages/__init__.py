"""Pages and pictures of the docs, filled in from results files."""
