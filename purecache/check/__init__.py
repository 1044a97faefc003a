"""Exhaustive checking of the real transitions: every state that small worlds can reach."""
