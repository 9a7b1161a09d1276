"""The HTTP API: authenticates and checks requests, records them in the ledger, and answers with results from it.

Imports go down only:

1. ``app``: the list of routers.
2. ``tinker``, ``openai``, ``weft`` and ``health``: the endpoints of each wire.
3. ``followed_sample``, ``sample_submission``, ``training_submission``: steps that several endpoints share.
4. ``authentication``, ``json_body``, ``request_body``, ``paging``, ``errors``, ``request_observer``: parts of every request.
5. ``services``: the parts that the process has opened.
6. ``admission``, ``fair_threads``, ``route_bounds``, ``tenant_shares``: bounds of what a tenant has in progress.
7. ``wire``: formats of request and response bodies.

A new resource touches three files: its endpoint file (routes and request models), ``app``, and its test.
"""
