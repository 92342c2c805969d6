"""Ways of training on several ranks: summing gradients, FSDP, tensor-parallel plans."""
