"""Classes of service: factors on a tenant's share. None goes before another in principle, so none can starve."""

from enum import StrEnum

from contracts.stored_words import known


class ServiceClass(StrEnum):
    """Class of a tenant's work."""

    INTERACTIVE = "interactive"
    STANDARD = "standard"
    BATCH = "batch"


def known_class(text: str) -> ServiceClass:
    """Return the stored class. One that only another version knows counts as the standard one, as the scheduler counts it."""
    return known(ServiceClass, text, ServiceClass.STANDARD)


FACTORS = {ServiceClass.INTERACTIVE: 4.0, ServiceClass.STANDARD: 1.0, ServiceClass.BATCH: 0.25}
"""Factor of each class. The least is the floor: beside one other tenant of the same share, batch work gets a seventeenth."""
