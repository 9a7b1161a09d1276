"""Types that every package shares: ids, records, errors, losses, codecs and paths. Imports no other package of weft."""
