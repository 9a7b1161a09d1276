"""The ledger of accepted requests (operations): SQL, records, pruning, wake-ups and the feed of sampled tokens."""
