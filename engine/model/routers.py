"""Names of the small layers of a mixture of experts that adapters leave as they are, in the trainer and on vLLM alike."""

ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})
"""Last names of layers that choose or weigh experts. vLLM serves no adapters on them."""
