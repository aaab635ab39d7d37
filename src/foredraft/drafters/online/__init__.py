"""Online distillation: trains a drafter while it serves (arXiv:2310.07177)."""
