"""The dashboard beside training: open run pages, the list of ten thousand runs, and what Chromium says."""
