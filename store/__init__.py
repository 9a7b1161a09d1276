"""Access to the database and the data folder: tables, transactions, settings, clock, and batching of concurrent reads."""
