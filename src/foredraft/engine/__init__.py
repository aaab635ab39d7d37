"""The decoding loop: requests, batches, the step and the generator. It does not know individual methods."""
