"""The vocabulary of all rooms: operators as maps of flat vectors, samplers, quantities,
moments, solutions, and checks of arguments."""
