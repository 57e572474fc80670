"""Raw input to batches of tensors, one file per kind of input."""
