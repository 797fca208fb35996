"""The loader: which samples a rank gets, in an order and from a position that do not depend on the number of ranks."""
