"""The API validates requests before it queries the log."""

import pytest
from pydantic import ValidationError

from dtx.admin.forms import RedirectForm

LONGEST = "\u00e4" * 127 + "a"
"""255 bytes in 128 letters."""


@pytest.mark.parametrize("name", ["exchange", "routing_key", "queue"])
def test_a_name_too_long_for_amqp_is_no_redirection(name: str) -> None:
    """The limit is in bytes, not letters. With a longer name the branch could not be completed."""
    given = {"reason": "moved", "position": 1}
    assert getattr(RedirectForm.model_validate({**given, name: LONGEST}), name) == LONGEST
    with pytest.raises(ValidationError, match="AMQP permits at most 255 bytes"):
        RedirectForm.model_validate({**given, name: LONGEST + "a"})
