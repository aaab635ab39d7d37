"""Online distillation: a drafter that learns while it serves (arXiv:2310.07177)."""
