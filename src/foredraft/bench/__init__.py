"""Is it lossless, how fast is it: prompts, and checks of a target with its drafter."""
