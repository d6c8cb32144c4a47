"""A turn from its request to its answer: legs, by pass-through or token by token."""
