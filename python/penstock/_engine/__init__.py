"""Training of unmodified torch modules whose weights, gradients and states live where the engine keeps them."""
