"""The operators' HTTP API: what is in doubt, why, what it holds, and the orders that decide it."""
