"""Whether halopipe is right, or says before the first step what it cannot keep."""
