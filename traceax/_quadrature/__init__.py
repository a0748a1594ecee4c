"""Functions of eigenvalues, and the quadrature rules that integrate them."""
