"""One step's work on more and more devices: measured on 1, 2 and 4 ranks, predicted up to 64, layouts compared."""
