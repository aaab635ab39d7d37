"""Parts of a step, compiled or captured once and replayed."""
