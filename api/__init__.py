"""The HTTP API. It authenticates and checks requests, records them in the ledger and reads results from it.

Imports go down only: ``app``; the endpoints in ``tinker``, ``openai``, ``weft`` and ``health``; the steps that several
endpoints share, such as ``training_submission`` and ``sample_submission``; ``services``; ``wire``, the formats of bodies.

A new route touches three files: its endpoint file (route and request model), ``app`` (the list of routers) and its test.
"""
