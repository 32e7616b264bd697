"""What the profile says of links, beside what fresh processes measure on them."""
