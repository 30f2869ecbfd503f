"""What every message is, and the versions of the protocol."""

from __future__ import annotations

from typing import ClassVar

import msgspec

WIRE_VERSION = 2
OLDEST_WIRE_VERSION = 1


class Message(msgspec.Struct, array_like=True, tag=True):
    """Base of all messages; the tag is the first element of the array.

    `since`: the first wire version that knows the message. A link does not send it to an older peer, so a
    sender may never count on its arrival.
    """

    since: ClassVar[int] = 1
