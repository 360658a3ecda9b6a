"""Numbers and names in files, within the limits in which they can be worked with and drawn."""

from __future__ import annotations

from typing import Annotated, TypeAlias

from msgspec import Meta

Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**53)]
Place: TypeAlias = Annotated[int, Meta(ge=-(2**53), le=2**53)]  # whoever has it knows its range
Number: TypeAlias = Annotated[float, Meta(ge=-1e100, le=1e100)]
Share: TypeAlias = Annotated[float, Meta(ge=0, le=1)]
Cosine: TypeAlias = Annotated[float, Meta(ge=-1.01, le=1.01)]  # up to what rounding adds
Name: TypeAlias = Annotated[str, Meta(max_length=4096)]  # of what messages name again and again
Digest: TypeAlias = Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]  # SHA-256
