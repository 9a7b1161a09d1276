"""Secrets in texts for people: each kind is masked, what tells whose it was stays, and other text is left as it is."""

import pytest

from contracts.secrets import mask_secrets

PLAIN = "run 1f3a: at https://weft.example/ui?after=7, tml-0123456789ab has read whsec of eyJ"


@pytest.mark.parametrize(
    ("secret", "shown"),
    [
        ("tml-0123456789ab-" + "s3cret_" * 6, "tml-0123456789ab-…"),
        ("eyJhbGci.eyJ0ZW5hbnQ.s3cretsignature", "eyJ…"),
        ("whsec_" + "s3cretS3cret" * 3 + "=", "whsec_…"),
        ("postgresql://weft:s3cret@db/weft", "postgresql://…@db/weft"),
    ],
)
def test_a_secret_is_masked_wherever_it_stands(secret: str, shown: str) -> None:
    told = mask_secrets(f"{PLAIN} <{secret}> and ?token={secret}&key={secret}\n{secret}")
    assert "s3cret" not in told
    assert told.count(shown) == 4
    assert told.startswith(PLAIN)


def test_a_text_without_secrets_is_left_as_it_is() -> None:
    assert mask_secrets(PLAIN) == PLAIN
