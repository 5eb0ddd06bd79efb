"""The user that a certificate names."""

from typing import Any

import pytest

from dtx.tls import common_name


@pytest.mark.parametrize(
    ("certificate", "name"),
    [
        ({"subject": ((("organizationName", "o"),), (("commonName", "alice"),))}, "alice"),
        ({"subject": ((("organizationName", "o"),),)}, None),
        ({"subject": ((("commonName", "alice"),), (("commonName", "root"),))}, None),
        ({"subject": ((("commonName", "alice"), ("commonName", "root")),)}, None),
        ({"subject": ((("commonName", ""),),)}, None),
        ({}, None),
    ],
)
def test_a_certificate_has_one_common_name_or_no_user(certificate: dict[str, Any], name: str | None) -> None:
    assert common_name(certificate) == name
