"""Screenshots of every page of the dashboard, over a real service with data that two tenants have made through the SDK."""
