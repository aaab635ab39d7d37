"""Values and pure functions: trees, draft laws, warp, verifiers, noise, statistics, theory.

Nothing here has state, chooses a device, reads a file or knows a model. Letters, everywhere in the house:
B rows, N nodes, V vocabulary, S slots, D depth, L history, H hidden; p is the target, q the draft.
"""
