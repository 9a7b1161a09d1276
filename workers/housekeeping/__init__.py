"""Housekeeping: small steps that delete what has expired and end what is forsaken, each by itself."""
