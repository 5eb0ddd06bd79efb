"""The facts of a certificate: the user that it names, and its end."""

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
import trustme

from dtx.tls import common_name, expirations


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


@pytest.mark.parametrize(
    "end",
    [
        datetime(2031, 2, 3, 4, 5, 6, tzinfo=UTC),
        datetime(2049, 12, 31, 23, 59, 59, tzinfo=UTC),  # the last one in two digits
        datetime(2050, 1, 1, tzinfo=UTC),
        datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC),  # RFC 5280: "no well-defined expiration date"
    ],
)
def test_the_end_of_each_certificate_is_read(end: datetime) -> None:
    authority = trustme.CA()
    names = (f"{number}.example" for number in range(200))  # the length of the certificate has two bytes
    issued = authority.issue_cert(*names, not_before=end - timedelta(1), not_after=end)
    text = b"a comment\n" + issued.private_key_and_cert_chain_pem.bytes() + authority.cert_pem.bytes()
    first, second = expirations(text.decode())
    assert (first, [second]) == (end, expirations(authority.cert_pem.bytes().decode()))
    assert expirations("no certificate") == []
