"""What every room speaks of: operators as maps of flat vectors, samplers, quantities,
moments, solutions, checks."""
