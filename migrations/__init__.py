"""The database schema's Alembic revisions, and the functions that apply and check them."""
