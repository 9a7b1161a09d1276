"""Formats of the wire: conversion of request bodies to typed records, and of results to response bodies.

One rule for request models, on all three wires (Tinker's, OpenAI's and weft's own): a model stands in the file of its
endpoint. Only a model that several endpoint files or a codec read stands here, in ``tinker_requests`` or
``openai_requests``. No module here uses FastAPI's dependencies, the database or a tenant.
"""
