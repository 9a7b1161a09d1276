"""One attacker with a valid key beside honest tenants."""
