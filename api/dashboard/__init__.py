"""The dashboard: HTML pages for tenants, over the same functions as the API. It reads cookies, and never keys but at login."""
