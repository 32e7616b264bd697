"""How true predictions are: plans on hosts with rate-limited links, predicted first, then run."""
