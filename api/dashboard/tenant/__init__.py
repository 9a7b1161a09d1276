"""Pages of tenants, a module for each noun."""
