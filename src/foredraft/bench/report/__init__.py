"""Tables, figures and pages from benchmark files."""
