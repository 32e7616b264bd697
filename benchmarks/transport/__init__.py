"""Messages, exchanges and sums over every transport, beside a copy in memory; what a computation costs after a wait."""
