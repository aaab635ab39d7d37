"""Values and pure functions: trees, draft laws, warp, verifiers, random numbers, statistics, theory.

Nothing here knows a model or chooses a device. Dimension letters used throughout the package:
B rows, N nodes, V vocabulary, S slots, D depth, L history, H hidden; p is the target, q the draft.
"""
