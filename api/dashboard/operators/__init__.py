"""Pages of operators, under `/ops` on the admin listener."""
