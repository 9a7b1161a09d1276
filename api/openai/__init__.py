"""OpenAI's wire: chat, plain completions and models over a tenant's adapters, under ``/v1``."""
