"""Linear algebra: leading singular subspaces, projections, and the errors of what is stored."""
