"""The loop: sequences, batches, the step, and what drives it. It knows no method's name."""
