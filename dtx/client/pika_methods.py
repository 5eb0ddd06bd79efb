"""The methods of classes 101 (dtx-demarcation) and 105 (dtx-coordination) in the form of pika's methods.

They are made from the table of methods (:mod:`dtx.wire.amqp09.methods`). The import of this module registers them with
pika's frame decoder and channels. An xid is the ``bytes`` of its wire form here, like every longstr;
:class:`dtx.xa.xid.Xid` reads and writes it. The ticket is the first field. The XML marks every method as
``synchronous``, but answers are not marked here: in pika the word means "wait for the answer".
"""

from collections.abc import Sequence
from typing import Any, ClassVar, Final, Self

from pika import amqp_object, spec

from dtx.wire.amqp09 import codec, methods
from dtx.wire.amqp09.codec import TICKET
from dtx.wire.amqp09.errors import WireError, syntax_error
from dtx.wire.amqp09.recovery import read_xids, write_xids
from dtx.xa.xid import Xid

_DEFAULTS: Final = {"H": 0, "I": 0, "bit": False, "long": b""}


class DtxMethod(amqp_object.Method):  # type: ignore[misc]  # pika has no types
    """A method. Arguments are given in the order of the XML or by name; missing ones are 0, false or empty."""

    INDEX: int
    NAME: str
    synchronous = False
    _defaults: ClassVar[dict[str, object]]

    def __init__(self, *values: object, **named: object) -> None:
        given = dict(zip(self._defaults, values, strict=False)) | named
        if len(given) < len(values) + len(named) or not given.keys() <= self._defaults.keys():
            raise TypeError(f"{self.NAME} takes {', '.join(self._defaults) or 'no arguments'}")
        self.__dict__.update(self._defaults | given)

    @staticmethod
    def _unpack(payload: bytes) -> tuple[Any, ...]:
        raise NotImplementedError

    @staticmethod
    def _pack(channel: int, *values: object) -> bytes:
        raise NotImplementedError

    def encode(self) -> list[bytes]:
        """Return the encoded arguments; pika joins them."""
        return [self._pack(0, *(getattr(self, name) for name in self._defaults))[11:-1]]

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """Read the arguments from *offset* to the end of *encoded*.

        Raises:
            WireError: 502, the arguments are truncated, or further bytes follow them.
        """
        values = self._unpack(bytes(4) + encoded[offset:])
        self.__dict__.update(zip(self._defaults, values, strict=True))
        return self


class _RecoverOk(DtxMethod):
    """A batch of a recovery scan; an empty batch ends it. ``xids`` are wire forms."""

    xids: list[bytes]

    def __init__(self, xids: Sequence[bytes] = ()) -> None:
        super().__init__(list(xids))

    def encode(self) -> list[bytes]:
        """See :class:`DtxMethod`."""
        return [self._pack(0, write_xids(self.xids))[11:-1]]

    def decode(self, encoded: bytes, offset: int = 0) -> Self:
        """See :class:`DtxMethod`."""
        (table,) = self._unpack(bytes(4) + encoded[offset:])
        self.xids = read_xids(table)
        return self

    def decoded(self) -> list[Xid]:
        """The xids as values.

        Raises:
            XaError: 502, an xid is malformed.
        """
        return [Xid.from_wire(xid) for xid in self.xids]


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("-"))


def _made(row: type[codec.Method]) -> type[DtxMethod]:
    """Make the class of a row of the table."""
    group, name = map(_camel, row.NAME.split("."))
    wire = [("ticket" if field == TICKET else field, "long" if kind == "xid" else kind) for field, kind in row.WIRE]

    def malformed(_: bytes) -> WireError:
        return syntax_error(f"{group}.{name} is truncated or followed by further bytes")

    scope = codec.compiled(row.KEY, wire, lambda *values: values, malformed)
    return type(
        name,
        (_RecoverOk if row is methods.DtxRecoverOk else DtxMethod,),
        {
            "INDEX": row.KEY,
            "NAME": f"{group}.{name}",
            "__doc__": row.__doc__,
            "synchronous": row.ANSWER is not None,
            "_defaults": {field: _DEFAULTS[kind] for field, kind in wire},
            "_unpack": staticmethod(scope["decode"]),
            "_pack": staticmethod(scope["pack"]),
        },
    )


METHODS: Final[dict[int, type[DtxMethod]]] = {
    key: _made(row) for key, row in methods.METHODS.items() if key >> 16 in methods.DTX_CLASSES
}
"""All methods of both classes, by class << 16 | method."""


def _group(index: int) -> Any:
    inside = {made.__name__: made for key, made in METHODS.items() if key >> 16 == index}
    name = next(iter(inside.values())).NAME.partition(".")[0]
    return type(name, (amqp_object.Class,), {"INDEX": index, "NAME": name, **inside})


DtxDemarcation: Final = _group(101)
"""Class 101: the association of channels with branches."""
DtxCoordination: Final = _group(105)
"""Class 105: the completion of branches."""


def register() -> None:
    """Register :data:`METHODS` with pika's frame decoder. The import does it. A second call changes nothing."""
    spec.methods.update(METHODS)


register()
