"""How large the code is, what its names mean, and how far a reader walks through it."""
