"""Matrices that are cut over the tensor-parallel ranks: layers that come cut, and what the ranks exchange for them."""
